"""Where a command writes its results, and how its errors name files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

from typer import Option

from gradwire import GradwireError
from gradwire.errors import UserError

_OUTPUT_HELP = (
    "Where to write: a file, or a directory if there are several inputs. Default: beside each "
    "input, with .gw added to its name or taken from it."
)
OutputOption = Annotated[Path | None, Option("--output", "-o", help=_OUTPUT_HELP)]


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Errors in the block that name no file are about `path`, and say so."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    except MemoryError:
        raise UserError(f"{path}: out of memory") from None
    except (UserError, GradwireError) as error:
        named = str(error).startswith(f"{path}: ")
        raise UserError(str(error) if named else f"{path}: {error}") from None


@contextmanager
def report_beside(target: Path) -> Iterator[None]:
    """What is printed in the block goes to stderr if `target` is stdout."""
    if target.exists() and os.path.samestat(target.stat(), os.fstat(1)):
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


class Outputs:
    """Where the results of a command's inputs go.

    output: the user's --output. None puts each result beside its source. A directory takes all
    results. A file is valid with one input alone.
    """

    def __init__(self, output: Path | None, inputs: int, force: bool) -> None:
        self._output = output
        self._inputs = inputs
        self._force = force
        self._sources: dict[Path, Path] = {}

    def claim(self, source: Path, name: str) -> Path:
        """Returns the file to write for `source`, called `name` unless the user named it.

        Raises UserError if the directory does not exist, if the file or a symbolic link exists and
        is not to be overwritten, or if another input already claimed the file.
        """
        if self._output is None:
            target = source.with_name(name)
        elif self._output.is_dir():
            target = self._output / name
        elif self._inputs > 1:
            raise UserError(
                f"--output {self._output}: with {self._inputs} inputs it must be a directory"
            )
        else:
            target = self._output
        if not target.parent.is_dir():
            raise UserError(f"{target.parent}: no such directory")
        place = Path(os.path.realpath(target))
        other = self._sources.setdefault(place, source)
        if other is not source:
            raise UserError(f"{other} and {source} would both be written to {target}")
        if os.path.lexists(target) and not self._force:
            what = "exists" if target.exists() else f"is a symbolic link to {place}"
            does = "overwrites it" if target.exists() else "writes the file that it names"
            raise UserError(f"{target} {what}; --force {does}")
        return target
