"""Containers in plain Python: the file of named tensors that `gradwire compress` writes.

The checks are in the order of format.md. reference.py reads the frames inside.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from common import BFLOAT16, FLOAT16, FLOAT32, FormatError, little, require
from reference import parse_frame

VERSION = 1
PREFIX_SIZE = 16
MAX_HEADER = 2**27
MAX_DIMENSIONS = 64
MAX_VALUES = 2**40
# The dtypes that a frame may hold, by kind of file.
FRAME_DTYPES = {
    "npy": {"<f4": FLOAT32, "<f2": FLOAT16},
    "safetensors": {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16},
}
KEYS = {"name", "dtype", "shape", "storage", "offset", "size"}


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: str
    data: bytes


@dataclass(frozen=True)
class Container:
    kind: str
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]


def checksum(before: bytes, length: bytes, header: bytes) -> int:
    """The checksum of all bytes of prefix and header but the checksum field itself."""
    return zlib.crc32(before + length + header)


def parse_container(data: bytes) -> Container:
    content, body = read_header(data)
    kind, metadata, entries = (content[key] for key in ("kind", "metadata", "tensors"))
    corrupt_unless(isinstance(kind, str) and kind in FRAME_DTYPES, f"kind {kind!r}")
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    corrupt_unless(texts, "metadata holds something else than strings")
    corrupt_unless(isinstance(entries, list), "tensors is not an array")
    tensors: list[Tensor] = []
    end = 0
    for entry in entries:
        tensors.append(read_tensor(entry, kind, end, body))
        end += len(tensors[-1].data)
    require(end == len(body), "trailing_bytes", f"{len(body) - end} after the last tensor")
    names = [tensor.name for tensor in tensors]
    corrupt_unless(len(set(names)) == len(names), "two tensors have one name")
    corrupt_unless(kind != "npy" or (names == [""] and not metadata), "not the tensor of an npy")
    for tensor in tensors:
        check_frame(tensor, kind)
    return Container(kind, metadata, tuple(tensors))


def read_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header's object, and the data after it."""
    require(b"GC".startswith(data[:2]), "bad_magic", f"starts with {data[:2].hex(' ')}")
    require(len(data) >= PREFIX_SIZE, "truncated", f"{len(data)} bytes are no prefix")
    require(data[2] == VERSION, "unsupported_version", f"version {data[2]}")
    require(data[3] == 0, "reserved_bits", f"flags {data[3]:#04x}")
    stored, length = little(data[4:8]), little(data[8:16])
    require(length <= MAX_HEADER, "limit_exceeded", f"a header of {length} bytes")
    end = PREFIX_SIZE + length
    require(end <= len(data), "truncated", f"the header ends at {end}, the file at {len(data)}")
    header = data[PREFIX_SIZE:end]
    matches = stored == checksum(data[:4], data[8:16], header)
    require(matches, "checksum_mismatch", "of the header")
    try:
        content = json.loads(header.decode("utf-8"), object_pairs_hook=no_key_twice)
    except (ValueError, RecursionError) as error:
        raise FormatError("corrupt_payload", f"the header is no JSON: {error}") from error
    has_keys(content, {"kind", "metadata", "tensors"})
    return content, data[end:]


def read_tensor(entry: Any, kind: str, begin: int, body: bytes) -> Tensor:
    """The tensor of an entry whose data must begin at `begin`."""
    plain = isinstance(entry, dict) and entry.get("storage") == "plain"
    has_keys(entry, KEYS | {"crc32"} if plain else KEYS)
    name, dtype, storage, shape = (entry[key] for key in ("name", "dtype", "storage", "shape"))
    corrupt_unless(isinstance(name, str) and isinstance(dtype, str), "name or dtype is no string")
    corrupt_unless(plain or storage == "frame", f"storage {storage!r}")
    corrupt_unless(plain or dtype in FRAME_DTYPES[kind], f"a frame of dtype {dtype!r}")
    corrupt_unless(isinstance(shape, list), "shape is not an array")
    require(len(shape) <= MAX_DIMENSIONS, "limit_exceeded", f"{len(shape)} dimensions")
    lengths = tuple(map(whole, shape))
    few = math.prod(filter(None, lengths)) <= MAX_VALUES
    require(few, "limit_exceeded", f"shape {shape}")
    offset, size = whole(entry["offset"]), whole(entry["size"])
    corrupt_unless(offset == begin, f"offset {offset}, not {begin}")
    require(size <= len(body) - begin, "truncated", f"{size} bytes at {begin}")
    data = body[begin : begin + size]
    if plain:
        require(zlib.crc32(data) == whole(entry["crc32"]), "checksum_mismatch", f"of {name!r}")
    return Tensor(name, dtype, lengths, storage, data)


def check_frame(tensor: Tensor, kind: str) -> None:
    if tensor.storage == "frame":
        frame = parse_frame(tensor.data)
        corrupt_unless(frame.dtype == FRAME_DTYPES[kind][tensor.dtype], "a frame of another dtype")
        fits = frame.n == math.prod(tensor.shape)
        require(fits, "length_mismatch", f"{frame.n} values for shape {tensor.shape}")


def whole(value: Any) -> int:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    corrupt_unless(fits, f"{value!r} where an integer from 0 on must stand")
    return int(value)


def has_keys(value: Any, keys: set[str]) -> None:
    corrupt_unless(isinstance(value, dict) and set(value) == keys, f"not an object of {keys}")


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    corrupt_unless(len(dict(pairs)) == len(pairs), "a key stands twice in an object")
    return dict(pairs)


def corrupt_unless(condition: bool, message: str) -> None:
    require(condition, "corrupt_payload", message)


# --- Encoding ---------------------------------------------------------------------------------


def seal_container(header: bytes, body: bytes, version: int = VERSION, flags: int = 0) -> bytes:
    """A container with a correct checksum, whatever header and body hold."""
    before, length = struct.pack("<2sBB", b"GC", version, flags), struct.pack("<Q", len(header))
    stored = struct.pack("<I", checksum(before, length, header))
    return before + stored + length + header + body


def encode_container(container: Container) -> bytes:
    entries, body = [], b""
    for tensor in container.tensors:
        entry = {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "storage": tensor.storage,
            "offset": len(body),
            "size": len(tensor.data),
        }
        if tensor.storage == "plain":
            entry["crc32"] = zlib.crc32(tensor.data)
        entries.append(entry)
        body += tensor.data
    content = {"kind": container.kind, "metadata": container.metadata, "tensors": entries}
    return seal_container(json.dumps(content, separators=(",", ":")).encode("ascii"), body)
