"""The errors and warnings of the Python code; this module needs no other package."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire._core import AutoGoal, Compressor, GradwireError, is_coarse, is_goal, spell_out_codec

# Modules that stand between a program's line and a warning.
_OURS = re.compile(r"(gradwire|torch|contextlib|functools)(\.|$)")


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


@contextmanager
def requiring(user: str, what: str, package: str | None, source: str) -> Iterator[None]:
    """Around imports of what gradwire can use: a ModuleNotFoundError says who needs it.

    Args:
        package, source: As in `missing`. None: the package whose import fails.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        lacking = missing(package or str(error.name), source)
        raise ModuleNotFoundError(f"{user} needs {what}: {lacking}", name=error.name) from error


def warn_user(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns with the line of the program that has called gradwire, itself or through PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _OURS.match(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def warn_deprecated(old: str, new: str, *, since: str) -> None:
    """Warns that something works in this minor version and the next alone, as VERSIONING.md
    promises.

    Args:
        old: What is deprecated, as users write it.
        new: What to write instead.
        since: The minor version that deprecates it, such as "0.1". A test fails in the version that
            may drop it.
    """
    major, minor = map(int, since.split("."))
    text = f"{old} is deprecated since {since} and ends with {major}.{minor + 2}; write {new}"
    warn_user(text, DeprecationWarning)


RECOMMENDED = spell_out_codec("small")


def sends_coarsely(codec: str) -> bool:
    """Whether a codec or an `auto` text sends most values rarely, or with an error as large as the
    value."""
    return AutoGoal(codec).is_coarse if is_goal(codec) else is_coarse(codec)


def keeps_residual(codec: str) -> bool:
    """Whether a codec or an `auto` text has error feedback."""
    return is_goal(codec) or Compressor(codec, 1).residual is not None


def sends_late(codec: str) -> bool:
    """Whether a codec or an `auto` text holds much back for later exchanges."""
    return sends_coarsely(codec) and keeps_residual(codec)


def printable(text: str, keep: str = "") -> str:
    """`text` with an escape (such as \\x1b) for each character that is not printable.

    Control characters could command a terminal, marks of direction could reorder a line, and lone
    surrogates cannot be encoded. keep: characters that stay as they are.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
