"""The ``gradwire`` command."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from gradwire import GradwireError
from gradwire.cli.app import app
from gradwire.errors import UserError, printable


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line: ``arguments``, or those of the process.

    Always ends with SystemExit. 0: done. 1: it could not be done, and one line on stderr says why.
    2: the command line is wrong. 130: interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="gradwire")
    except (UserError, GradwireError, OSError) as error:
        print(f"gradwire: error: {printable(_describe(error), keep=chr(10))}", file=sys.stderr)
        raise SystemExit(1) from None
    except MemoryError:
        print("gradwire: error: out of memory", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("gradwire: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _describe(error: Exception) -> str:
    """The error's message, without what Python adds to it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
