"""A checkpoint on this machine that follows versions: .safetensors files, changed in place.

A marker file beside them says which version they hold, in which files, and whether they hold it
wholly. So who is killed while they change knows it at the next start, a file that somebody has put
beside them is not taken for theirs, and of several who follow the same files one changes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from gradwire.container import Tensor
from gradwire.files import lock_folder, replace_file
from gradwire.strict_json import parse_json
from gradwire.tensor_dtypes import bytes_of
from gradwire.tensor_files import header_of, order_in_file, parse_head, read_head, read_safetensors
from gradwire.weights.errors import WeightsError, listed
from gradwire.weights.folder import local_path
from gradwire.weights.manifest import is_manifest
from gradwire.weights.target import Target, Track
from gradwire.weights.tensors import Bytes, View, checked_name, raw_values
from gradwire.weights.update import Update

_SUFFIX = ".safetensors"
_FILE = f"model{_SUFFIX}"  # where a folder gets new tensors
_OTHERS = {".bin", ".ckpt", ".npz", ".pt", ".pth"}  # which other programs write
_INDEX = f"*{_SUFFIX}.index.json"  # of a sharded folder


class Checkpoint:
    """The tensors of a .safetensors file or of a folder of such files.

    remedy: Target's.
    version: what they hold; 0: they have no marker, as before the first version. None: nothing
    whole.
    """

    def __init__(
        self, place: str | os.PathLike[str], threads: int, remedy: str | None = None
    ) -> None:
        self._path = path = local_path(place)
        self._threads, self._remedy = threads, remedy
        in_folder = path.suffix != _SUFFIX
        if (in_folder and path.is_file()) or path.suffix in _OTHERS:
            raise WeightsError(
                f"{path}: a checkpoint is a .safetensors file, or a folder of such files"
            )
        self._marker = (
            path / ".gradwire.json" if in_folder else path.with_name(f".{path.name}.gradwire.json")
        )
        self._refuse_store()
        self._maps: list[np.memmap] = []
        self._head, self._metadata = b"", {"format": "pt"}
        self._places: dict[str, str] = {}  # the tensors' files
        self._own: set[str] = set()  # files with tensors of the version alone
        self._absent: set[str] = set()  # tied tensors of the version that are in none of them
        self._checked: list[tuple[object, ...]] = []  # looks of files that `check` accepted
        self.version = self._read_marker()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else changes the files, in any process of this machine."""
        folder = self._path.parent if self._path.suffix == _SUFFIX else self._path
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            yield

    def is_moved(self) -> bool:
        """Whether somebody else has brought the files to another version, which is `version` now,
        since `version` was read."""
        before, self.version = self.version, self._read_marker()
        return self.version != before

    def is_touched(self) -> bool:
        """Whether somebody has changed the files since `check` accepted them."""
        return self._looks() != self._checked

    def views(self, mode: Literal["r+", "c"] = "r+") -> dict[str, View]:
        """The tensors, mapped to memory. mode: NumPy's; `c`: changes stay in memory."""
        found: dict[str, View] = {}
        self._maps, self._places, heads = [], {}, list[bytes]()
        for file in self._files():
            if not file.stat().st_size:
                raise WeightsError(f"{file}: it is empty, and no .safetensors file")
            mapped = np.memmap(file, np.uint8, mode)
            self._maps.append(mapped)
            try:
                tensors, metadata = read_safetensors(memoryview(mapped))
            except ValueError as error:
                raise WeightsError(f"{file}: {error}") from None
            for tensor in tensors:
                checked_name(tensor.name)
                if tensor.name in found:
                    raise WeightsError(f"{file}: tensor {tensor.name!r} is in another file, too")
                values = raw_values(np.frombuffer(tensor.data, np.uint8), tensor.shape)
                found[tensor.name] = View(tensor.name, tensor.dtype, tensor.shape, values)
                self._places[tensor.name] = file.name
            heads.append(read_head(memoryview(mapped)))
            self._metadata = metadata if len(heads) == 1 else metadata | self._metadata
        self._head = heads[0] if len(heads) == 1 else b""
        self._require_all(found)
        return found

    def head(self, views: Mapping[str, View]) -> bytes:
        """The first bytes of a file with these tensors: those of the own file where it has them;
        otherwise in an order of gradwire, with the metadata of all own files."""
        tensors = [Tensor(name, view.dtype, view.shape, b"") for name, view in views.items()]
        described = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        own = parse_head(self._head) if self._head else []
        is_own = {tensor.name: (tensor.dtype, tensor.shape) for tensor in own} == described
        if self._head and is_own:
            return self._head
        return header_of(order_in_file(tensors), self._metadata)

    def check(self, update: Update, writes: bool = True) -> None:
        """Raises StaleBaseError unless the update can be applied, and WeightsError if tensors would
        be lost that no version has put here, or links written through. writes: whether the files
        here will change."""
        if writes:
            self._refuse_links()
        looks = self._looks()
        views = self._base("c")
        known = {entry.name for entry in update.entries.values()} | set(update.removed)
        lost = [name for name in views if name not in known and self._places[name] not in self._own]
        if lost:
            of, publish = "that the delta does not know", ""
            if self._remedy is not None:
                of, publish = "of no version", ", or publish them, too"
            raise WeightsError(
                f"{self._path} has tensors {of}, which would be lost: {listed(lost)}. "
                f"Nothing was changed; move them to another folder{publish}"
            )
        self._own |= set(self._places.values())
        self._target(views).check(update)
        self._checked = looks

    def apply(self, update: Update, track: Track = iter) -> None:
        """Applies an update that `check` has accepted; the change is durable then."""
        views = self._base()
        target = self._target(views)
        absent = self._may_be_absent(update) - views.keys()
        if views and target.fits(update, absent) and not (update.head and self._head):
            self._absent = absent
            self._mark(None)
            target.write(update, track)
            for mapped in self._maps:
                mapped.flush()
        else:
            self._rewrite(update, track)
        self._mark(update.version)

    def write_copy(self, update: Update, file: Path, track: Track = iter) -> None:
        """Writes the tensors with an update that `check` has accepted to another file."""
        views = self._updated(update, track)
        self._write_file(views, update.head or self.head(views), file, marks=False)

    def forget(self) -> None:
        """Removes the marker: the files are of no store."""
        self._marker.unlink(missing_ok=True)

    def _refuse_links(self) -> None:
        for file in (*self._files(), self._new_file):  # which may be a link to nothing
            if file.is_symlink() or (file.exists() and file.stat().st_nlink > 1):
                raise WeightsError(
                    f"{file} is a link, or others link to it, as in the cache of Hugging Face: it "
                    "would change in their folders, too. Nothing was changed; give a copy "
                    f"(cp -rL {self._path} COPY)"
                )

    def _rewrite(self, update: Update, track: Track) -> None:
        """Where tensors appear, vanish or change shape, all go into one new file."""
        views = self._updated(update, track)
        file = self._new_file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._own.add(file.name)
        self._write_file(views, update.head or self.head(views), file, marks=True)
        for other in [*self._indices(), *self._files()]:
            if other != file and (other.name in self._own or other.suffix != _SUFFIX):
                other.unlink()
        self._maps = []  # of files that are gone
        self._own, self._absent = {file.name}, set()

    def _updated(self, update: Update, track: Track) -> dict[str, View]:
        views = self._base("c")
        self._target(views).write(update, track)
        return views

    def _may_be_absent(self, update: Update) -> set[str]:
        """Names that the files lacked from the start: programs save one name of tied tensors."""
        tied = {entry.name for entry in update.entries.values() if entry.kind == "tied"}
        return tied if update.base == 0 else tied & self._absent

    def _target(self, views: dict[str, View]) -> Target:
        return Target(views, self._threads, make=_make, remedy=self._remedy)

    def _write_file(self, views: dict[str, View], head: bytes, file: Path, marks: bool) -> None:
        """marks: from the moment on when the file is replaced, the checkpoint is not whole."""
        with replace_file(file, durable=True) as output:
            output.write(head)
            for tensor in parse_head(head):
                output.write(views[tensor.name].read().data)
            output.flush()
            if marks:
                self._mark(None)

    def _base(self, mode: Literal["r+", "c"] = "r+") -> dict[str, View]:
        """The tensors to which an update is applied. Files that hold nothing whole may lack some,
        or have some twice: who was killed had not removed the old ones yet."""
        self._refuse_store()  # it may have become one
        try:
            return self.views(mode)
        except WeightsError:
            if self.version is not None:
                raise
            return {}

    def _require_all(self, found: Mapping[str, View]) -> None:
        """Raises WeightsError if a file or tensor that an index names is not there."""
        for index in self._indices():
            try:
                places = parse_json(index.read_bytes(), 2)["weight_map"]
                missing = sorted(n for n in set(places.values()) if not (self._path / n).exists())
                missing += [f"tensor {name!r}" for name in places if name not in found]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise WeightsError(f"{index}: it is no index of a checkpoint: {error}") from None
            if missing:
                raise WeightsError(
                    f"{index} names {missing[0]}, which is missing: copy the whole folder"
                )

    def _refuse_store(self) -> None:
        path = self._path
        if path.suffix != _SUFFIX and path.is_dir() and any(map(is_manifest, os.listdir(path))):
            raise WeightsError(
                f"{path} is a store, whose files are no checkpoint: take another folder; "
                "Subscriber(store, local=folder) brings a checkpoint there"
            )

    def _indices(self) -> list[Path]:
        return [] if self._path.suffix == _SUFFIX else sorted(self._path.glob(_INDEX))

    @property
    def _new_file(self) -> Path:
        """That of all tensors, where they go into one."""
        return self._path if self._path.suffix == _SUFFIX else self._path / _FILE

    def _files(self) -> list[Path]:
        if self._path.suffix == _SUFFIX:
            return [self._path] if self._path.exists() else []
        return sorted(self._path.glob(f"*{_SUFFIX}"))

    def _looks(self) -> list[tuple[object, ...]]:
        """What changes with the files. The marker tells more than times: clocks are coarse, and
        what is written to mapped memory need not change a file's time."""
        found = [(file, file.stat()) for file in self._files()]
        looks = [(file, one.st_ino, one.st_size, one.st_mtime_ns) for file, one in found]
        return [(self._marker.read_bytes() if self._marker.exists() else b"",), *looks]

    def _read_marker(self) -> int | None:
        if not self._files():
            return None
        try:
            found = parse_json(self._marker.read_bytes(), 2)
            version, self._own = found["version"], set(found["files"])
            self._absent = set(found.get("absent", []))
        except FileNotFoundError:
            return 0
        except (ValueError, TypeError, KeyError):
            return None
        return version if type(version) is int else None

    def _mark(self, version: int | None) -> None:
        with replace_file(self._marker, durable=True) as file:
            found = {"version": version, "files": sorted(self._own)}
            found |= {"absent": sorted(self._absent)} if self._absent else {}
            file.write(json.dumps(found).encode() + b"\n")
        self.version = version


def _make(name: str, dtype: str, shape: tuple[int, ...]) -> View:
    size = bytes_of("safetensors", dtype, int(np.prod(shape, dtype=object))) or 0
    data: Bytes = np.zeros(size, np.uint8)
    return View(name, dtype, shape, raw_values(data, shape))
