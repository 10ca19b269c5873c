"""The file that ``gradwire compress`` writes: named tensors, as frames or as plain bytes.

Format, version 1. Integers are little-endian.

====== ==== =====================================================================================
offset size field
====== ==== =====================================================================================
0      2    magic ``'G' 'C'`` (0x47 0x43)
2      1    version = 1
3      1    flags: all eight bits are reserved, must be zero, are refused otherwise
4      4    checksum: CRC-32 (that of zlib, gzip and PNG) over bytes 0..3 and 8..15 and the header
8      8    H: length of the header in bytes, at most 2^27
16     H    the header: one JSON object, UTF-8, no byte order mark
16+H   .    the data area: the stored bytes of the tensors, back to back, in the header's order
====== ==== =====================================================================================

The header has exactly these keys:

``kind``
    ``"npy"`` or ``"safetensors"``: the kind of file that was compressed and will be restored.
``metadata``
    object of strings: the ``__metadata__`` of a safetensors file; empty for npy.
``tensors``
    array of objects, one a tensor. An npy container has exactly one, whose name is ``""``.

Each tensor has exactly these keys (``crc32`` only where ``storage`` is ``"plain"``):

``name``
    string; no two are equal.
``dtype``
    string, in the vocabulary of ``kind``: a NumPy type string (``"<f4"``, ``"|b1"``) or a
    safetensors one (``"F32"``, ``"BF16"``).
``shape``
    array of integers >= 0, at most 64 of them; their product, and the product of the non-zero
    ones, is at most 2^40.
``storage``
    ``"frame"``: one frame of spec/format.md that holds the values in C order; the frame's number
    of values equals the product of ``shape``, and its dtype is that of the tensor: f32 for
    ``"<f4"`` and ``"F32"``, f16 for ``"<f2"`` and ``"F16"``, bf16 for ``"BF16"``; no other can
    be a frame. Values of 16 bits are restored from the f32 that the frame decodes to: rounded to
    nearest, ties to even, a NaN to 0x7fc0 or 0x7e00 with its sign; or, where the codec is raw, as
    the bits that stand in the payload.
    ``"plain"``: the values as they were, in C order.
``offset``, ``size``
    integers >= 0: where the stored bytes lie in the data area. The first offset is 0, each further
    one the sum of the sizes before it, and the last tensor ends where the file ends: no gaps, no
    overlap, no trailing bytes.
``crc32``
    CRC-32 of the stored bytes of a plain tensor. A frame brings its own checksum.

A reader refuses a file that breaks any of these rules. CRC-32 stands here, and not the XXH3 of the
frames, because it is in the standard library of nearly every language: listing a file needs nothing
else.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

MAGIC = b"GC"
VERSION = 1
PREFIX = struct.Struct("<2sBBIQ")
MAX_HEADER_BYTES = 2**27
MAX_NUMEL = 2**40
MAX_RANK = 64

Kind = Literal["npy", "safetensors"]
Storage = Literal["frame", "plain"]

# The dtypes that frames hold: a kind's name for each, and the name that gradwire.inspect gives it.
FRAME_DTYPES: dict[Kind, dict[str, str]] = {
    "npy": {"<f4": "float32", "<f2": "float16"},
    "safetensors": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"},
}
_TENSOR_KEYS = {"name", "dtype", "shape", "storage", "offset", "size"}


class ContainerError(ValueError):
    """A container file that breaks the format. ``code`` is the name of a gradwire status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a container; ``data`` is a frame or the plain bytes, as ``storage`` says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: Storage
    data: bytes | memoryview

    @property
    def numel(self) -> int:
        """Number of values: the product of the shape, 1 for a scalar."""
        return math.prod(self.shape)

    def check_frame(self, numel: int, dtype: str) -> None:
        """Raises ContainerError unless a frame of these values is what the tensor needs.

        ``dtype``: as `gradwire.inspect` names it.
        """
        if dtype not in [names.get(self.dtype) for names in FRAME_DTYPES.values()]:
            raise ContainerError(
                "corrupt_payload",
                f"tensor {self.name!r}: its dtype is {self.dtype!r}, the frame holds {dtype}",
            )
        if numel != self.numel:
            raise ContainerError(
                "length_mismatch",
                f"tensor {self.name!r}: the frame holds {numel} values, the shape "
                f"{list(self.shape)} needs {self.numel}",
            )


@dataclass(frozen=True)
class Container:
    """A container's whole content."""

    kind: Kind
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def is_container(data: bytes | memoryview) -> bool:
    """Whether ``data`` begins as a container does."""
    return bytes(data[:2]) == MAGIC


def serialize(container: Container) -> Iterator[bytes | memoryview]:
    """Yields the parts of the file, in order: prefix, header, then each tensor's bytes."""
    entries = []
    offset = 0
    for tensor in container.tensors:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "storage": tensor.storage,
            "offset": offset,
            "size": len(tensor.data),
        }
        if tensor.storage == "plain":
            entry["crc32"] = zlib.crc32(tensor.data)
        entries.append(entry)
        offset += len(tensor.data)
    content = {"kind": container.kind, "metadata": container.metadata, "tensors": entries}
    # Plain ASCII escapes: a name with a lone surrogate still makes valid UTF-8.
    header = json.dumps(content, separators=(",", ":")).encode("ascii")
    if len(header) > MAX_HEADER_BYTES:
        raise ContainerError(
            "limit_exceeded",
            f"the header would have {len(header)} bytes, {MAX_HEADER_BYTES} are allowed",
        )
    prefix = PREFIX.pack(MAGIC, VERSION, 0, 0, len(header))
    checksum = _header_checksum(prefix, header)
    yield PREFIX.pack(MAGIC, VERSION, 0, checksum, len(header))
    yield header
    for tensor in container.tensors:
        yield tensor.data


def parse(data: bytes | memoryview) -> Container:
    """Reads a whole container file; the tensors' ``data`` are views of ``data``.

    Checks everything but the frames themselves, which their decoder does. Raises ContainerError
    with code truncated, bad_magic, unsupported_version, reserved_bits, checksum_mismatch,
    corrupt_payload, trailing_bytes or limit_exceeded.
    """
    view = memoryview(data).cast("B")
    content, body = _parse_header(view)
    _expect_keys(content, {"kind", "metadata", "tensors"}, "the header")
    kind: Kind = content["kind"]
    if kind not in tuple(FRAME_DTYPES):  # A list has no hash, so no look-up in the dictionary.
        _corrupt(f"kind is {kind!r}, valid: {', '.join(FRAME_DTYPES)}")
    metadata = content["metadata"]
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _corrupt("metadata is not an object of strings")
    entries = content["tensors"]
    if not isinstance(entries, list):
        _corrupt("tensors is not an array")
    tensors = []
    position = 0
    for index, entry in enumerate(entries):
        tensor = _parse_entry(entry, index, kind, position, body)
        position += len(tensor.data)
        tensors.append(tensor)
    if position != len(body):
        raise ContainerError(
            "trailing_bytes", f"{len(body) - position} bytes follow the last tensor's data"
        )
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        _corrupt("two tensors have the same name")
    if kind == "npy" and (len(tensors) != 1 or tensors[0].name != "" or metadata):
        _corrupt('a container of kind npy holds one tensor named "" and no metadata')
    return Container(kind, tuple(tensors), metadata)


def _header_checksum(prefix: bytes | memoryview, header: bytes | memoryview) -> int:
    return zlib.crc32(header, zlib.crc32(prefix[8:16], zlib.crc32(prefix[:4])))


def _parse_header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns the header's object and the data area."""
    if len(view) < PREFIX.size:
        if not MAGIC.startswith(bytes(view[:2])):
            raise ContainerError(
                "bad_magic", "not a gradwire container: it does not begin with 'GC'"
            )
        raise ContainerError(
            "truncated", f"a container has at least {PREFIX.size} bytes, this one {len(view)}"
        )
    magic, version, flags, checksum, header_size = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ContainerError("bad_magic", "not a gradwire container: it does not begin with 'GC'")
    if version != VERSION:
        raise ContainerError(
            "unsupported_version", f"container version {version}; this program reads {VERSION}"
        )
    if flags != 0:
        raise ContainerError("reserved_bits", f"reserved flag bits are set: 0x{flags:02x}")
    if header_size > MAX_HEADER_BYTES:
        raise ContainerError(
            "limit_exceeded",
            f"the header claims {header_size} bytes, {MAX_HEADER_BYTES} are allowed",
        )
    end = PREFIX.size + header_size
    if end > len(view):
        raise ContainerError(
            "truncated", f"the header ends at byte {end}, the file has {len(view)} bytes"
        )
    header = view[PREFIX.size : end]
    if checksum != _header_checksum(view[: PREFIX.size], header):
        raise ContainerError("checksum_mismatch", "the header's checksum does not match")
    try:
        content = json.loads(bytes(header).decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        _corrupt(f"the header is not valid JSON: {error}")
    if not isinstance(content, dict):
        _corrupt("the header is not a JSON object")
    return content, view[end:]


def _parse_entry(
    entry: object, index: int, kind: Kind, position: int, body: memoryview
) -> StoredTensor:
    where = f"tensor {index}"
    if not isinstance(entry, dict):
        _corrupt(f"{where} is not an object")
    plain = entry.get("storage") == "plain"
    _expect_keys(entry, _TENSOR_KEYS | {"crc32"} if plain else _TENSOR_KEYS, where)
    name, dtype, storage = entry["name"], entry["dtype"], entry["storage"]
    if not isinstance(name, str):
        _corrupt(f"{where}: name is not a string")
    where = f"tensor {index} ({name!r})"
    if not isinstance(dtype, str):
        _corrupt(f"{where}: dtype is not a string")
    if storage not in ("frame", "plain"):
        _corrupt(f"{where}: storage is {storage!r}, valid: frame, plain")
    if storage == "frame" and dtype not in FRAME_DTYPES[kind]:
        valid = ", ".join(FRAME_DTYPES[kind])
        _corrupt(f"{where}: dtype is {dtype!r}; valid ones for a frame: {valid}")
    shape = _parse_shape(entry["shape"], where)
    offset, size = _natural(entry["offset"], where), _natural(entry["size"], where)
    if offset != position:
        _corrupt(f"{where}: offset is {offset}, the tensor before it ends at {position}")
    if size > len(body) - position:
        raise ContainerError(
            "truncated",
            f"{where}: {size} bytes at offset {offset}, the data area has {len(body)} bytes",
        )
    data = body[position : position + size]
    if plain and zlib.crc32(data) != _natural(entry["crc32"], where):
        raise ContainerError("checksum_mismatch", f"{where}: the checksum does not match")
    return StoredTensor(name, dtype, shape, cast(Storage, storage), data)


def _parse_shape(shape: object, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list):
        _corrupt(f"{where}: shape is not an array")
    if len(shape) > MAX_RANK:
        raise ContainerError(
            "limit_exceeded", f"{where}: {len(shape)} dimensions, {MAX_RANK} are allowed"
        )
    dims = tuple(_natural(dim, where) for dim in shape)
    # Zeros aside, so that an empty tensor cannot smuggle in a dimension that nothing can hold.
    if math.prod(dim for dim in dims if dim) > MAX_NUMEL:
        raise ContainerError("limit_exceeded", f"{where}: more than 2^40 values")
    return dims


def _natural(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _corrupt(f"{where}: {value!r} stands where an integer >= 0 must")
    return value


def _expect_keys(mapping: dict[str, Any], keys: set[str], where: str) -> None:
    if set(mapping) != keys:
        found = ", ".join(sorted(mapping))
        _corrupt(f"{where} has the keys {found}; it must have {', '.join(sorted(keys))}")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _corrupt(message: str) -> NoReturn:
    raise ContainerError("corrupt_payload", message)
