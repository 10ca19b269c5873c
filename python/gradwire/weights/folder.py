"""Folders with the files of a store: on this machine, or wherever fsspec reaches."""

from __future__ import annotations

import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from gradwire.errors import missing
from gradwire.files import give_name, remove_abandoned, replace_file
from gradwire.weights.errors import WeightsError

_FILE = re.compile("^file:(//(localhost(?=/))?|(?=/))")
_ABANDONED = 3600.0  # seconds in which a file that is being written has grown
_ADDRESS = re.compile(r"[A-Za-z][\w+.:-]*[\w]:(?=/)")  # a single letter is a drive


class Folder(ABC):
    """What a store needs of a file system: a file is there whole or not at all.

    Lists may be late: a file that was written need not be in `names` yet.
    """

    place: str = "a store of this program"  # as errors name it

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        """Writes a file, durably. only_new: raises FileExistsError where it is there already."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all files; none where the folder is not there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is this folder on this machine."""
        return False

    def remove_abandoned(self) -> list[str]:
        """Removes what is left of files whose writers were killed. Returns its names."""
        return []


def open_folder(place: str | os.PathLike[str] | Folder) -> Folder:
    """The folder of this name; `scheme://` is opened by fsspec."""
    if isinstance(place, Folder):
        return place
    text = _without_scheme(place)
    return RemoteFolder(text) if "://" in text else LocalFolder(local_path(text, "store"))


def _without_scheme(place: str | os.PathLike[str]) -> str:
    """The path of a file: address, where %20 is a space; anything else as it is."""
    text = os.fspath(place)
    path = _FILE.sub("", text)
    return text if path == text else unquote(path)


def local_path(place: str | os.PathLike[str], argument: str = "checkpoint") -> Path:
    """The path on this machine; `~` stands for a home, as in a shell. Raises WeightsError.
    argument: as errors name it."""
    text = _without_scheme(place)
    if not text:
        raise WeightsError(f"{argument}: the path is empty; '.' is the current folder")
    address = _ADDRESS.match(text)
    if address is not None:
        whole = f"{address[0]}//{text[address.end() :].lstrip('/')}"
        raise WeightsError(
            f"{text} is an address, and no path on this machine, where a checkpoint is. A store "
            f"there is given as a text, {whole!r}: a Path has one slash only"
        )
    try:
        return Path(text).expanduser().absolute()  # the program may change its folder
    except RuntimeError:  # ~nobody-here/x
        raise WeightsError(
            f"{text}: no such home is known; write the whole path, or ./~name for a folder of that "
            "name"
        ) from None


class LocalFolder(Folder):
    def __init__(self, path: Path) -> None:
        if path.is_file():
            raise WeightsError(f"{path} is a file; a store is a folder, or a prefix such as s3://")
        self._path = path
        self.place = str(path)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        return os.path.realpath(local_path(path)) == os.path.realpath(self._path)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        target = self._path / name
        written = target.with_name(f"{name}.{secrets.token_hex(4)}") if only_new else target
        with replace_file(written, durable=True) as file:
            for piece in pieces:
                file.write(piece)
        if only_new:
            give_name(written, target)

    def names(self) -> list[str]:
        return os.listdir(self._path) if self._path.is_dir() else []

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_abandoned(self) -> list[str]:
        return remove_abandoned(self._path, "v[0-9]*", age=_ABANDONED)


class MemoryFolder(Folder):
    """Files of this process alone.

    Attributes:
        files: By name.
    """

    place = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._writing = threading.Lock()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        try:
            return self.files[name][begin:end]
        except KeyError:
            raise FileNotFoundError(name) from None

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        data = b"".join(pieces)
        with self._writing:
            if only_new and name in self.files:
                raise FileExistsError(name)
            self.files[name] = data

    def names(self) -> list[str]:
        return list(self.files)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


class RemoteFolder(Folder):
    """A prefix that fsspec opens. Each file is put at once, as object stores do it whole."""

    def __init__(self, place: str) -> None:
        self.place = re.sub("(?<=[^:/])/+$", "", place)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            lacking = missing("fsspec", "'.[fsspec]'")
            raise WeightsError(f"a store in {place}: {lacking}") from None
        try:
            found: tuple[Any, str] = url_to_fs(self.place)
        except (ImportError, ValueError) as error:  # s3fs, gcsfs, or an unknown scheme
            raise WeightsError(f"a store in {place}: {error}") from None
        self.files, self._path = found

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        try:
            # By name, as s3fs has a version before them; with a range, since else it looks for the
            # size in an old list.
            data: bytes = self.files.cat_file(f"{self._path}/{name}", start=begin, end=end)
        except Exception as error:  # of many kinds
            # So servers call what is absent, too, to who may not list files.
            if not _is_refused(error) or self._lists(name):
                raise
            raise FileNotFoundError(f"{self.place}/{name}") from error
        knows_no_range = end is not None and len(data) > end - begin  # and has sent the whole file
        return data[begin:end] if knows_no_range else data

    def _lists(self, name: str) -> bool:
        try:
            return name in self.names()
        except Exception:  # as `read`
            return False

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        path, data = f"{self._path}/{name}", b"".join(pieces)
        if only_new and self.files.exists(path):
            raise FileExistsError(f"{self.place}/{name}")
        with suppress(PermissionError):  # of a bucket, by who may write below this prefix alone
            self.files.makedirs(self._path, exist_ok=True)
        try:
            self.files.pipe_file(path, data, mode="create" if only_new else "overwrite")
        except FileExistsError:
            raise FileExistsError(f"{self.place}/{name}") from None

    def names(self) -> list[str]:
        self.files.invalidate_cache()
        try:
            found = self.files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            if not _is_refused(error):
                raise
            why = f"{self.place} has no version yet, or may not be read: {error}"
            raise WeightsError(why) from error
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        try:
            self.files.rm_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return


def _is_refused(error: Exception) -> bool:
    """Whether a server has said 403."""
    if isinstance(error, PermissionError):
        return True
    return 403 in (getattr(error, name, None) for name in ("status", "status_code", "code"))
