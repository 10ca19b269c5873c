"""A store: the versions in a folder, and the shortest way to the newest."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from gradwire.strict_json import parse_json
from gradwire.weights.difference import fold_updates
from gradwire.weights.errors import (
    DamagedVersionError,
    MissingVersionError,
    StaleBaseError,
    WeightsError,
)
from gradwire.weights.folder import Folder, open_folder
from gradwire.weights.manifest import (
    Manifest,
    Part,
    folded_from,
    is_manifest,
    label_of,
    version_of,
)
from gradwire.weights.update import Update, digest_of, read_some, read_update

_T = TypeVar("_T")
_HINT = "newest.json"
_PAUSE = 0.05  # seconds between two looks for a file
_KEPT = 50_000  # entries of manifests in memory, some 600 bytes each
_HEAD = 512  # bytes of a manifest, with who wrote it and when


class Store:
    """Reads and writes versions. patience: the seconds that a part may be late.

    replaced: how often `newest` has found that the versions are others than those before them, as
    after the folder was emptied and a training run began anew.
    """

    def __init__(self, place: str | os.PathLike[str] | Folder, patience: float, threads: int):
        self.folder = open_folder(place)
        if not patience >= 0:
            raise WeightsError(f"patience={patience}: seconds, from 0 on")
        self._patience = patience
        digest_of(b"", threads)  # refuses another number now, not in the middle of something
        self._threads = threads
        self._manifests: dict[str, Manifest] = {}  # they never change
        self._newest, self._head = 0, b""
        self.replaced = 0

    def newest(self) -> int:
        """The newest version; 0: there is none. Finds it even if lists are late."""
        known, head = self._newest, self._head_of(self._newest)
        is_other = head != self._head  # it was removed, or is another one
        if is_other:
            self._manifests.clear()
        found = self._find_newest(0 if is_other else known)
        # Only now: after an error the next call sees the same.
        if is_other and (head or found < known):
            self.replaced += 1
        if is_other or found != known:
            self._newest, self._head = found, self._head_of(found)
        return found

    def _find_newest(self, known: int) -> int:
        found = max(known, self._hint())
        if not found or self.manifest(label_of(found)) is None:
            listed = {version_of(name) or 0 for name in self._listed()}
            # What a list shows need not be readable yet.
            readable = (v for v in sorted(listed, reverse=True) if self.manifest(label_of(v)))
            found = next(readable, 0)
        while self.manifest(label_of(found + 1)) is not None:
            found += 1
        return found

    def _head_of(self, version: int) -> bytes:
        """The first bytes of a version's manifest; none where there is none."""
        try:
            return self.folder.read(f"{label_of(version)}.json", 0, _HEAD) if version else b""
        except FileNotFoundError:
            return b""

    def manifest(self, label: str) -> Manifest | None:
        """The manifest with this label, None: there is none. Raises DamagedVersionError."""
        if label not in self._manifests:
            name = f"{label}.json"
            try:
                data = self.folder.read(name)
            except FileNotFoundError:
                return None
            try:
                found = Manifest.parse(data, f"{self.folder.place}/{name}")
            except DamagedVersionError as error:
                version = version_of(name) or 0
                if label != label_of(version) or self._head_of(version + 1):
                    raise
                remedy = "Without this file, the version before it is the newest"
                raise DamagedVersionError(f"{error}. {remedy}") from None
            self._manifests[label] = found
            sizes = {label: len(one.entries) + 1 for label, one in self._manifests.items()}
            while len(self._manifests) > 1 and sum(sizes.values()) > _KEPT:
                oldest = next(iter(self._manifests))
                del self._manifests[oldest], sizes[oldest]
        return self._manifests[label]

    def has(self, version: int) -> bool:
        """Whether the version is there, if perhaps damaged."""
        try:
            return version > 0 and self.manifest(label_of(version)) is not None
        except DamagedVersionError:
            return True

    def require(self, version: int) -> None:
        """Raises MissingVersionError unless the version is there, if perhaps damaged. One after the
        newest may be late."""
        if self.has(version):
            return
        newest, why = self.newest(), "prune() removes old ones"
        if version > newest:
            if wait_for(lambda: self.has(version) or None, self._patience):
                return
            why = f"it did not come in {self._patience:g} s"
        raise MissingVersionError(
            f"{self.folder.place}: there is no version {version}; the newest is {newest}, and {why}"
        )

    def reread(self, label: str) -> Manifest | None:
        """As `manifest`, of the file as it is now, which may be another one."""
        self._manifests.pop(label, None)
        return self.manifest(label)

    def write_manifest(self, label: str, manifest: Manifest) -> None:
        """From here on the version exists. Raises FileExistsError where it exists already; anchors
        and folded deltas of a version with this number that was removed are replaced."""
        is_version = label == label_of(manifest.version)
        data = manifest.write()
        self.folder.write(f"{label}.json", [data], only_new=is_version)
        if is_version:
            self._newest, self._head = manifest.version, data[:_HEAD]

    def write_hint(self, version: int) -> None:
        """Lets readers find the newest version without a list."""
        self.folder.write(_HINT, [json.dumps({"version": version}).encode()])

    def load(self, label: str, keys: Collection[str] | None = None) -> Update:
        """A version with all its bytes, checked. keys: only those tensors; None: all.

        Raises:
            DamagedVersionError: A part is missing or was changed.
            MissingVersionError: The version is not there, or was removed meanwhile.
        """
        manifest = self.manifest(label)
        if manifest is None:
            raise self._removed(label)
        entries = manifest.entries
        wanted = entries.keys() if keys is None else entries.keys() & set(keys)
        found = Update(manifest.version, manifest.base)
        for part in manifest.parts:
            found = found.merge([self._load_part(part, label, manifest, keys)])
        if found.entries != dict(entries):
            raise DamagedVersionError(
                f"{self.folder.place}: {label}.json has other tensors than its parts"
            )
        found.entries = {key: entries[key] for key in entries if key in wanted}
        found.blobs = {key: blob for key, blob in found.blobs.items() if key in wanted}
        return found

    def follow(
        self, current: int | None, keys: Collection[str] | None = None, to: int | None = None
    ) -> Update:
        """One update from the version `current` to another, by default the newest: deltas, folded,
        or a full version and what follows it, whichever is smaller. What is damaged is left aside
        if that is possible. Where both are one version, the update says what its tensors are.

        Raises:
            StaleBaseError: No way leads there.
            DamagedVersionError: No way leads there without what is damaged.
            MissingVersionError: The version is not there, or was removed meanwhile.
        """
        damage: dict[str, DamagedVersionError] = {}
        if current is not None and current == to and (here := self.unchanged(to)) is not None:
            return here
        while True:
            wanted = self.newest() if to is None else to
            self.require(wanted)
            path = self._path(wanted, current, damage)
            update: Update | None = None
            try:
                for label in path:
                    loaded = self.load(label, keys)
                    update = fold_updates(update, loaded, self._threads) if update else loaded
            except DamagedVersionError as error:
                damage[label] = error
            except MissingVersionError:
                self._manifests.clear()  # looks again
            else:
                assert update is not None
                return update

    def unchanged(self, version: int) -> Update | None:
        """Says what the tensors of a version are; None: it is not there."""
        found = self.manifest(label_of(version))
        return None if found is None else found.unchanged()

    def way_to(self, version: int, current: int | None) -> list[str] | None:
        """The labels of the smallest way to a version; None: there is none."""
        return self._search(version, current, {})

    def _path(
        self, newest: int, current: int | None, damage: dict[str, DamagedVersionError]
    ) -> list[str]:
        found = self._search(newest, current, damage)
        if found is not None:
            return found
        if damage:
            raise next(iter(damage.values()))
        start = "nothing" if current is None else f"version {current}"
        raise StaleBaseError(
            f"{self.folder.place}: no way leads from {start} to version {newest}: no version after "
            "it is a full one, and a delta is missing or starts from the publisher's checkpoint "
            f"({self._origin(newest)}). Load that checkpoint and take Subscriber(..., version=0), "
            "or let the publisher make a full version: publish(..., anchor=True)"
        )

    def _search(
        self, newest: int, current: int | None, damage: dict[str, DamagedVersionError]
    ) -> list[str] | None:
        if current is not None and current >= newest:
            current = None  # it is after that version, or of another chain
        floor = current or 0
        folded = self._folded() if newest - floor > 1 else {}
        best: dict[int, tuple[int, list[str]]] = {newest: (0, [])}
        ends: list[tuple[int, list[str]]] = []
        for version in range(newest, floor, -1):
            if version not in best:
                continue
            size, rest = best[version]
            if ends and size >= min(ends)[0]:
                continue  # another way is smaller, whatever leads here; manifests take time
            for label, manifest in self._ways_to(version, folded, damage):
                way = (size + manifest.size, [label, *rest])
                if manifest.base is None or manifest.base == current:
                    ends.append(way)
                elif manifest.base > floor:
                    best[manifest.base] = min(way, best.get(manifest.base, way))
        return min(ends)[1] if ends else None

    def _ways_to(
        self, version: int, folded: dict[int, list[str]], damage: dict[str, DamagedVersionError]
    ) -> Iterator[tuple[str, Manifest]]:
        """The manifests that lead to a version and are not damaged. Not those of another version
        that had this number and was removed."""
        own: Manifest | None = None
        labels = [label_of(version), label_of(version, is_anchor=True), *folded.get(version, [])]
        for label in labels:
            if label in damage or (label == labels[1] and own is not None and not own.anchor):
                continue
            try:
                manifest = self.manifest(label)
            except DamagedVersionError as error:
                damage[label] = error
                continue
            if manifest is not None and (own is None or manifest.leads_where(own)):
                yield label, manifest
                own = manifest if label == labels[0] else own

    def _folded(self) -> dict[int, list[str]]:
        """The labels of folded deltas by their version. None where there are no lists, as over
        plain HTTP: the deltas one by one lead there, too."""
        found: dict[int, list[str]] = {}
        try:
            listed = self._listed()
        except Exception:  # of many kinds, where fsspec opens the folder
            return found
        for name in listed:
            if folded_from(name) is not None:
                found.setdefault(version_of(name) or 0, []).append(name.removesuffix(".json"))
        return found

    def _listed(self) -> list[str]:
        return [name for name in self.folder.names() if is_manifest(name)]

    def _hint(self) -> int:
        try:
            version = parse_json(self.folder.read(_HINT), 1)["version"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return 0  # it is a hint, and lists and manifests say the same
        return version if type(version) is int else 0

    def _origin(self, version: int) -> str:
        try:
            found = self.manifest(label_of(version))
        except DamagedVersionError:
            return "unknown"
        return found.origin if found is not None and found.origin else "none is known"

    def _load_part(
        self, part: Part, label: str, manifest: Manifest, keys: Collection[str] | None
    ) -> Update:
        """keys: those of other tensors need not be read."""
        where = f"{self.folder.place}/{part.name}"

        def look() -> Update | None:
            try:
                if keys is None:
                    data = self.folder.read(part.name)
                    update, size = None, len(data)
                else:
                    update, size = read_some(self.folder.read, part.name, keys, where)
            except FileNotFoundError:
                if self.reread(label) != manifest:
                    raise self._removed(label) from None
                return None
            if size != part.size:
                raise DamagedVersionError(f"{where} has {size} bytes, not {part.size}")
            return read_update(data, where) if update is None else update

        found = wait_for(look, self._patience)
        if found is None:
            raise DamagedVersionError(f"{where} is missing")
        return found

    def _removed(self, label: str) -> MissingVersionError:
        return MissingVersionError(
            f"{self.folder.place}: {label}.json is not there, or no longer: prune() removes old "
            "versions"
        )


def wait_for(look: Callable[[], _T | None], seconds: float) -> _T | None:
    """What `look` finds, as soon as it finds something; None: it has found nothing in time."""
    end = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < end:
        _pause()
    return found


def _pause() -> None:
    """Lets the others write what is missing. They may be ranks of this process, which wait until
    this one does."""
    loopback = sys.modules.get("gradwire.torch.network.loopback")
    if loopback is not None:
        loopback.let_others_run()
    time.sleep(_PAUSE)
