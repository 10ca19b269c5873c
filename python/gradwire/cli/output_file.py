"""The files that a command writes, which are never left half written."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, BinaryIO

from typer import Option

from gradwire.errors import UserError

_OUTPUT_HELP = (
    "Where to write: a file, or a directory if there are several inputs. Default: beside each "
    "input, with .gw added to its name or taken from it."
)
OutputOption = Annotated[Path | None, Option("--output", "-o", help=_OUTPUT_HELP)]


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


class OutputFile:
    """What writers of bytes need, and the number of bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes


@contextmanager
def replace_file(target: Path) -> Iterator[OutputFile]:
    """A file to write, which takes the place of `target` after the block: whole or not at all.

    A symbolic link stays, and the file that it names is replaced. A device or a pipe is written
    to, as it is no file that could be replaced. An OSError names `target`.
    """
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with target.open("wb") as device:
                yield OutputFile(device)
        else:
            with _Termination():
                yield from _replace(Path(os.path.realpath(target)))
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error


def _replace(place: Path) -> Iterator[OutputFile]:
    handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield OutputFile(file)
        # mkstemp makes the file private; the user's other files get the rights the umask leaves.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class _Terminated(BaseException):
    """A signal came that ends the process."""


class _Termination:
    """Lets `finally` run when a signal would end the process in the block; then it does so.

    Only signals whose action is the default one. (SIGKILL leaves the temporary file.)
    """

    def __init__(self) -> None:
        self._changed: list[int] = []
        self._received = 0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._stop)
                self._changed.append(number)

    def __exit__(self, *_: object) -> None:
        for number in self._changed:
            signal.signal(number, signal.SIG_DFL)
        if self._received:
            os.kill(os.getpid(), self._received)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if not self._received:
            self._received = number
            raise _Terminated
