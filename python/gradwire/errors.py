"""The base of the errors that the command line shows without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something cannot be done. The message says why, for the user."""
