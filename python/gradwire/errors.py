"""The errors and warnings of the Python code; this module needs no other package."""

from __future__ import annotations

from gradwire._core import GradwireError


class UserError(Exception):
    """Something cannot be done. The message says why, for the user: the command line shows it
    without a traceback."""


class LimitError(GradwireError):
    """No choice of codecs keeps the limit of an `auto` text. The message says what is possible."""


class LimitWarning(RuntimeWarning):
    """No choice of codecs keeps the limit of an `auto` text at the moment."""


def missing(package: str, source: str) -> str:
    """What to do where a package that gradwire can use is not installed.

    gradwire is on no package index, where anybody could take its names, so this names its source.

    Args:
        package: What is not installed.
        source: What pip installs in gradwire's source tree to bring it, such as `'.[torch]'`.
    """
    return f"{package} not installed; in gradwire's source tree `pip install {source}` brings it"
