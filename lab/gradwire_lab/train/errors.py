"""The errors that end a training; the command line prints the message."""

from __future__ import annotations

from gradwire.errors import UserError


class TrainError(UserError):
    """The training cannot begin or go on. The message says why and names the remedy, for the user:
    a data set or a device that cannot be used, a tool that failed, a worker that ended."""
