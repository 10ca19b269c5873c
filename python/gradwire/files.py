"""Files that are never left half written."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_RANDOM_BYTES = 4  # in the names of files that are being written


class OutputFile:
    """What writers of bytes need, and the number of bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.error: OSError | None = None  # the first; a writer may turn it into its own

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def replace_file(target: Path, durable: bool = False) -> Iterator[OutputFile]:
    """A file to write, which takes the place of `target` after the block: whole or not at all.

    A symbolic link stays, and the file that it names is replaced. A device, a pipe, and a stdout
    whose file has no name are written to, as none of them could be replaced. An OSError names
    `target`. `durable`: when the block is left, the file survives a crash of the machine, too.
    """
    place = Path(os.path.realpath(target))
    try:
        if target.exists() and not place.is_file():
            with target.open("wb") as device:
                yield OutputFile(device)
        else:
            with terminating_late():
                yield from _replace(place, durable)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error


def give_name(file: Path, target: Path) -> None:
    """Renames a file, durably, where no other has that name; of two who do so at once, one gets the
    FileExistsError. The file is gone then."""
    try:
        os.link(file, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, as FAT is, and much that is mounted from afar
        if target.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(target)) from None
        file.replace(target)
    finally:
        file.unlink(missing_ok=True)
    _sync_folder(target.parent)


def write_text(target: Path, text: str) -> None:
    """Writes `text` and a line's end in UTF-8, as `replace_file` does."""
    with replace_file(target) as file:
        file.write((text + "\n").encode())


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """While no other holder of this lock runs, in any process of this machine. A file system that
    has no locks gives none."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a child that was forked meanwhile has the handle, too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _replace(place: Path, durable: bool) -> Iterator[OutputFile]:
    remove_abandoned(place.parent, glob.escape(place.name))
    temporary, handle = _open_beside(place)
    try:
        with os.fdopen(handle, "wb") as file:
            if place.exists():
                os.fchmod(handle, stat.S_IMODE(place.stat().st_mode))
            output = OutputFile(file)
            try:
                yield output
            except Exception as error:
                raise output.error or error from None
            if durable:  # the bytes before the name
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(place)
        if durable:
            _sync_folder(place.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open_beside(place: Path) -> tuple[Path, int]:
    """A new file, with a lock that ends with its writer."""
    while True:
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(_RANDOM_BYTES)}")
        # As open() would, but for a file that is there.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, handle
        os.close(handle)  # another process has removed it before it had its lock


def remove_abandoned(folder: Path, pattern: str, age: float = 0.0) -> list[str]:
    """Removes what writers of a folder's files left behind that were killed. Returns its names.
    pattern: of the files' names, as glob has it. age: the seconds since the last write, where the
    writer may be on another machine, which need not see locks."""
    digits = "[0-9a-f]" * (2 * _RANDOM_BYTES)
    removed = []
    for path in folder.glob(f".{pattern}.{digits}"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error: its writer lives
                if time.time() - os.fstat(handle).st_mtime >= age:
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(handle)
    return removed


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Terminated(BaseException):
    """A signal came that ends the process."""


@contextmanager
def terminating_late() -> Iterator[None]:
    """Lets `finally` run when a signal would end the process in the block; then it does so.

    Only in the main thread, and only signals whose action is the default one: others, and SIGKILL,
    leave the temporary file.
    """
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise _Terminated

    numbers = [signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])
