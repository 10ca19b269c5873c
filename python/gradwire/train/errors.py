"""What ends a training; the command line prints the message."""

from __future__ import annotations


class TrainError(Exception):
    """The training cannot begin or go on. The message says why, for the user."""


class DivergedError(TrainError):
    """The loss became NaN or infinite."""
