"""Updates: what leads from one version of named tensors to another, in memory and as a file.

The file is a .safetensors file. A whole tensor stands in it as it is, so that a full version is a
checkpoint that any program reads; a delta (spec/format.md) stands under its tensor's name as bytes
of dtype U8. The entry `gradwire` of the file's metadata holds JSON: format, version, base, and the
entries of all tensors (`Entry`), also of those that have not changed. Of files, `gradwire.head` may
hold the header of the new one, and `gradwire.removed` a list of names that it has no longer.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from gradwire import GradwireError, _core
from gradwire.container import Tensor
from gradwire.strict_json import most_header_bytes, parse_json
from gradwire.tensor_dtypes import SAFETENSORS_BITS, bytes_of
from gradwire.tensor_files import header_of, order_in_file, parse_head, read_safetensors
from gradwire.weights.errors import DamagedVersionError, WeightsError
from gradwire.weights.tensors import Bytes, Place, Placed, same_name

FORMAT = 1
METADATA = "gradwire"
_HEAD, _REMOVED = "gradwire.head", "gradwire.removed"  # of what leads from file to file
Kind = Literal["full", "delta", "same", "tied"]
Blob = bytes | bytearray | memoryview | Bytes
_NESTING = 5  # of the JSON: an object, its tensors, one of them, its shape
_HEADER_BYTES = 2**25  # of 70,000 tensors, of which few have changed
_LENGTH_BYTES = 8  # before the header of a .safetensors file
_HEX = 16  # digits of a digest: JSON numbers of 64 bits are not exact everywhere


@dataclass(frozen=True)
class Entry(Placed):
    """A tensor of a version, or a part of it.

    kind: its bytes are in the update ("full"), or a delta is; it has not changed ("same"); or it
    is the memory of the tensor with the key `to` ("tied"). digest: of its bytes in this version.
    base: the digest of its bytes in the base.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    digest: int = 0
    base: int = 0
    changed: int = 0
    size: int = 0
    at: Place = ()
    whole: tuple[int, ...] = ()
    to: str = ""

    @property
    def nbytes(self) -> int:
        return bytes_of("safetensors", self.dtype, self.numel) or 0

    @property
    def result(self) -> tuple[object, ...]:
        """What the tensor is in this version, whichever way leads there."""
        return self.dtype, self.shape, self.whole, self.digest, self.to

    def describe(self) -> dict[str, Any]:
        """The entry as JSON has it; what is empty is left out."""
        plain = dict(vars(self))
        plain |= {key: f"{plain[key]:0{_HEX}x}" for key in ("digest", "base") if plain[key]}
        plain |= {key: list(plain[key]) for key in ("at", "whole")}
        kept = {key: value for key, value in plain.items() if value not in (0, "", [])}
        return kept | {"shape": list(self.shape)}

    @staticmethod
    def parse(entry: Any) -> Entry:
        """Raises ValueError, which names the tensor."""
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError("an entry has no name")
        values = dict(entry)
        try:
            for key in ("digest", "base"):
                values[key] = _digest_of(values.get(key, "0" * _HEX))
            for key in ("shape", "at", "whole"):
                values[key] = tuple(_natural(n) for n in values.get(key, []))
            for key in ("changed", "size"):
                values[key] = _natural(values.get(key, 0))
            found = Entry(**values)
            known = found.kind in ("full", "delta", "same", "tied")
            if not known or found.dtype not in SAFETENSORS_BITS or not isinstance(found.to, str):
                raise ValueError(
                    f"kind {found.kind!r}, dtype {found.dtype!r}, tied to {found.to!r}"
                )
            if len(found.at) != len(found.whole) or (
                found.at and len(found.at) != len(found.shape)
            ):
                raise ValueError("its place and its shape do not fit together")
        except (TypeError, ValueError) as error:
            raise ValueError(f"tensor {entry['name']!r}: {error}") from None
        return found


@dataclass
class Update:
    """The way from the version `base` to `version`; base None: from nothing, all tensors are
    full. blobs: the bytes of full tensors and deltas by key. decoded: deltas that
    were decoded before they are applied.

    From one .safetensors file to another it also has: head, the bytes before the data of the new
    file, if the old one has others; removed, the names of tensors of the old file alone.
    """

    version: int
    base: int | None
    entries: dict[str, Entry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    decoded: dict[str, _core.DecodedDelta] = field(default_factory=dict)
    head: bytes = b""
    removed: Sequence[str] = ()

    @property
    def changed(self) -> int:
        """Elements that changed; all those of full tensors count. Of deltas that were folded, at
        most so many."""
        return sum(entry.changed for entry in self.entries.values())

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries.values() if entry.kind != "tied")

    def untied(self) -> Iterator[Entry]:
        """The entries, as if each tensor had memory of its own."""
        for entry in self.entries.values():
            digest = self.entries[entry.to or entry.key].digest
            yield replace(entry, digest=digest, to="") if entry.to else entry

    def add(self, entry: Entry, blob: Blob | None = None) -> None:
        self.entries[entry.key] = entry
        if blob is not None:
            self.blobs[entry.key] = blob

    def decode(self, numels: Mapping[str, int], threads: int) -> None:
        """Decodes the deltas of tensors that have so many elements, which are applied faster then,
        and take more than two bits for each element until then. Raises DamagedVersionError."""
        for key, blob in self.blobs.items():
            entry = self.entries[key]
            if entry.kind == "delta" and entry.numel == numels.get(key):
                try:
                    self.decoded[key] = _core.DecodedDelta(blob, threads=threads)
                except GradwireError as error:
                    raise DamagedVersionError(f"tensor {key!r}: {error}") from None

    def apply_delta(self, key: str, data: Bytes, threads: int) -> None:
        """Makes the base of a tensor, in `data`, its result. Raises DamagedVersionError."""
        try:
            if key in self.decoded:
                self.decoded[key].apply(data, threads=threads)
            else:
                _core.apply_delta(np.frombuffer(self.blobs[key], np.uint8), data, threads=threads)
        except GradwireError as error:
            raise DamagedVersionError(
                f"tensor {key!r}: {error}; the tensors are of no version now. Take a full version"
            ) from None

    def merge(self, others: Iterable[Update]) -> Update:
        """This update with the parts that others hold. What several hold is taken once."""
        merged = Update(self.version, self.base, dict(self.entries), dict(self.blobs))
        for other in others:
            news = [key for key in other.entries if key not in merged.entries]
            merged.entries |= {key: other.entries[key] for key in news}
            merged.blobs |= {key: other.blobs[key] for key in news if key in other.blobs}
        return merged


def check_parts(entries: Iterable[Entry]) -> None:
    """Raises WeightsError, which names the tensor, unless the parts of each tensor are of one whole
    and none has an element of another. Ranks may all have a whole tensor, if it is the same. The
    entries are untied: a tensor may be tied on one rank alone."""
    parts: dict[str, list[Entry]] = {}
    names: dict[str, str] = {}
    for entry in entries:
        parts.setdefault(entry.name, []).append(entry)
        if names.setdefault(entry.key, entry.name) != entry.name:
            raise same_name(entry.key)
    for name, several in parts.items():
        first = several[0]
        for entry in several[1:]:
            if (entry.dtype, entry.whole) != (first.dtype, first.whole):
                raise WeightsError(
                    f"tensor {name!r} is {_whole_of(first)} for a rank, and {_whole_of(entry)} for "
                    "another: all ranks publish parts of one tensor"
                )
        if not first.at and any(entry.result != first.result for entry in several):
            raise WeightsError(
                f"tensor {name!r} is whole for several ranks, and its values differ: let one of "
                "them publish it, or all of them shards of it"
            )
        if first.at and len(several) > 1:
            begin = np.array([entry.at for entry in several])
            end = begin + np.array([entry.shape for entry in several])
            meet = ((begin[:, None] < end) & (begin < end[:, None])).all(axis=2)
            one, other = np.argwhere(np.triu(meet, 1))[:1].reshape(-1, 2).T
            if one.size:
                raise WeightsError(
                    f"tensor {name!r}: the parts at {list(several[one[0]].at)} and at "
                    f"{list(several[other[0]].at)} have elements in common: each element is "
                    "published by one rank"
                )


def _whole_of(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.whole or entry.shape)}{'' if entry.at else ' and whole'}"


def write_update(update: Update) -> Sequence[bytes | memoryview]:
    """The file, in pieces. Raises WeightsError."""
    tensors = []
    for key, blob in update.blobs.items():
        entry, data = update.entries[key], memoryview(blob).cast("B")
        dtype, shape = ("U8", (len(data),)) if entry.kind == "delta" else (entry.dtype, entry.shape)
        tensors.append(Tensor(key, dtype, shape, data))
    tensors = order_in_file(tensors)
    described = {
        "format": FORMAT,
        "version": update.version,
        "base": update.base,
        "tensors": [entry.describe() for entry in update.entries.values()],
    }
    metadata = {METADATA: json.dumps(described, separators=(",", ":"))}
    if update.head:
        metadata[_HEAD] = update.head[_LENGTH_BYTES:].decode()
    if update.removed:
        metadata[_REMOVED] = json.dumps(update.removed)
    try:
        header = header_of(tensors, metadata)
    except ValueError as error:
        raise WeightsError(f"version {update.version}: {error}") from None
    pieces = [header, *(tensor.data for tensor in tensors)]
    most = most_header_bytes(sum(map(len, pieces)), _HEADER_BYTES)
    if len(header) > most:
        raise WeightsError(
            f"version {update.version}: the header would have {len(header)} bytes, {most} are "
            "allowed; publish fewer tensors at once"
        )
    return pieces


def read_update(data: Blob, where: str) -> Update:
    """The update of a file whose every byte has been checked, but for what deltas make of their
    base. Raises DamagedVersionError, which begins with `where`."""
    try:
        tensors, metadata = read_safetensors(memoryview(data).cast("B"), _HEADER_BYTES)
        update = parse_description(metadata.get(METADATA, ""))
        update.head = _parse_head(metadata.get(_HEAD, ""), update)
        update.removed = parse_json(metadata.get(_REMOVED, "[]").encode(), 1)
        for tensor in tensors:
            _check_blob(update.entries.get(tensor.name), tensor)
            update.blobs[tensor.name] = tensor.data
        for key, entry in update.entries.items():
            if (key in update.blobs) != (entry.kind in ("full", "delta")):
                raise ValueError(f"tensor {key!r} is {entry.kind}, and its bytes are missing")
    except ValueError as error:
        raise DamagedVersionError(f"{where}: {error}") from None
    return update


def _parse_head(text: str, update: Update) -> bytes:
    """The first bytes of the file that the update makes. Raises ValueError."""
    if not text:
        return b""
    data = text.encode()
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in parse_head(head)}
    if found != {entry.name: (entry.dtype, entry.shape) for entry in update.entries.values()}:
        raise ValueError("the head of the new file has other tensors than the delta")
    return head


def starts_update(data: bytes) -> bool:
    """Whether a file that begins so is one that write_update has written."""
    return data[_LENGTH_BYTES:].startswith(b'{"__metadata__":{"gradwire":')


def read_head(read: Callable[[str, int, int], bytes], name: str) -> tuple[Update, int]:
    """The update of a file without its bytes, and the file's size. read: gives the bytes of a file
    from one place to another. Raises DamagedVersionError, and what `read` raises."""
    update, _, size = _read_places(read, name)
    return update, size


def read_some(
    read: Callable[[str, int, int], bytes], name: str, keys: Collection[str], where: str
) -> tuple[Update, int]:
    """As read_head, with the bytes of the tensors with these keys, checked as read_update does. Of
    other tensors no byte is read."""
    update, places, size = _read_places(read, name)
    wanted = update.entries.keys() & set(keys)
    ends: dict[int, int] = {}  # of neighbours together, by where they begin
    begins: list[int] = []
    for begin, end in sorted(place for key, (_, place) in places.items() if key in wanted):
        if begins and ends[begins[-1]] == begin:
            ends[begins[-1]] = end
        elif begin < end:
            begins.append(begin)
            ends[begin] = end
    spans = {begin: memoryview(read(name, begin, ends[begin])) for begin in begins}
    try:
        for key in wanted & places.keys():
            tensor, (begin, end) = places[key]
            data = memoryview(b"")
            if begin < end:
                first = begins[bisect_right(begins, begin) - 1]
                data = spans[first][begin - first : end - first]
            _check_blob(update.entries.get(key), replace(tensor, data=data))
            update.blobs[key] = data
        for key in wanted - places.keys():
            if update.entries[key].kind in ("full", "delta"):
                raise ValueError(f"tensor {key!r}: its bytes are missing")
    except ValueError as error:
        raise DamagedVersionError(f"{where}: {error}") from None
    return update, size


def _read_places(
    read: Callable[[str, int, int], bytes], name: str
) -> tuple[Update, dict[str, tuple[Tensor, tuple[int, int]]], int]:
    """The update of a file without its bytes; its tensors, each with its place in the file; and the
    file's size."""
    length = int.from_bytes(read(name, 0, _LENGTH_BYTES), "little")
    data = _LENGTH_BYTES + length
    head = read(name, _LENGTH_BYTES, data)
    places = {}
    try:
        header = parse_json(head, _NESTING)
        update = parse_description(header.pop("__metadata__", {}).get(METADATA, ""))
        for key, entry in header.items():
            begin, end = map(_natural, entry["data_offsets"])
            tensor = Tensor(key, entry["dtype"], tuple(entry["shape"]), b"")
            places[key] = tensor, (data + begin, data + end)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedVersionError(f"{name}: {error}") from None
    return update, places, max((end for _, (_, end) in places.values()), default=data)


def parse_description(text: str) -> Update:
    """The update without its bytes, from the JSON in a file's metadata. Raises ValueError."""
    if not text:
        raise ValueError("it is a .safetensors file without deltas; `gradwire delta` makes others")
    described = parse_json(text.encode(), _NESTING)
    keys = {"format", "version", "base", "tensors"}
    if not isinstance(described, dict) or described.keys() != keys:
        raise ValueError(f"the entry {METADATA!r} of its metadata must have {', '.join(keys)}")
    if described["format"] != FORMAT:
        raise ValueError(f"format {described['format']}; this program reads {FORMAT}")
    return Update(
        _natural(described["version"]),
        None if described["base"] is None else _natural(described["base"]),
        parse_entries(described["tensors"]),
    )


def parse_entries(listed: Any) -> dict[str, Entry]:
    """The entries of a JSON list by key. Raises ValueError."""
    if not isinstance(listed, list):
        raise ValueError("its tensors are no list")
    entries = [Entry.parse(entry) for entry in listed]
    found = {entry.key: entry for entry in entries}
    if len(found) != len(entries):
        raise ValueError("a tensor is listed twice")
    for entry in entries:
        to = found.get(entry.to)
        if entry.kind == "tied" and (to is None or to.kind == "tied" or to.nbytes != entry.nbytes):
            raise ValueError(f"tensor {entry.key!r} is tied to {entry.to!r}, which does not fit")
    return found


def digest_of(data: Blob, threads: int = 1) -> int:
    return _core.digest_array(np.frombuffer(data, np.uint8), threads=threads)


def _check_blob(entry: Entry | None, tensor: Tensor) -> None:
    if entry is None or entry.kind not in ("full", "delta"):
        raise ValueError(f"the bytes of {tensor.name!r} belong to no tensor")
    if len(tensor.data) != entry.size:
        raise ValueError(f"tensor {entry.key!r} has {len(tensor.data)} bytes, not {entry.size}")
    if entry.kind == "full":
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise ValueError(f"tensor {entry.key!r} has another dtype or shape than its entry")
        if digest_of(tensor.data) != entry.digest:
            raise ValueError(f"tensor {entry.key!r}: its bytes were changed")
        return
    try:
        head: Mapping[str, int] = _core.inspect_delta(np.frombuffer(tensor.data, np.uint8))
    except GradwireError as error:
        raise ValueError(f"tensor {entry.key!r}: {error}") from None
    if head["n"] * head["width"] != entry.nbytes or (
        (head["base_digest"], head["result_digest"]) != (entry.base, entry.digest)
    ):
        raise ValueError(f"tensor {entry.key!r}: its delta is of another tensor")


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no integer from 0 on")
    return value


def _digest_of(text: Any) -> int:
    if not isinstance(text, str) or len(text) != _HEX:
        raise ValueError(f"{text!r} is no digest")
    return int(text, 16)
