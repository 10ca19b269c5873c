"""Containers in plain Python: the file of named tensors that `gradwire compress` writes.

The checks are in the order of format.md. reference.py reads the frames inside.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

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
NESTING = 4
# The dtypes of plain tensors, and the bits of a value.
SAFETENSORS_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
TIME_UNIT = r"(\[([1-9]\d{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
NPY_DTYPES = [r"\|[biu](1)", r"[<>][iu]([248])", r"[<>]f(2|4|8|16)", r"[<>]c(8|16|32)"]
NPY_DTYPES += [rf"[<>][Mm](8){TIME_UNIT}", r"\|[SV](0|[1-9]\d{0,9})", r"[<>]U(0|[1-9]\d{0,9})"]


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
    reserved = kind == "safetensors" and "__metadata__" in names
    corrupt_unless(not reserved, "a tensor with the name of the metadata")
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
    content = read_json(header)
    has_keys(content, {"kind", "metadata", "tensors"})
    return content, data[end:]


def read_json(text: bytes) -> Any:
    """The value of a text, with what Python's parser takes beyond RFC 8259 refused."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=no_key_twice,
            parse_constant=no_constant,
            parse_int=integer,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError("corrupt_payload", f"the header is no JSON: {error}") from error
    corrupt_unless(depth(value) <= NESTING, "arrays and objects nest too deep")
    return value


def integer(digits: str) -> int:
    """int() refuses more than 4300 digits; every integer from 10^19 on is beyond all limits."""
    return int(digits) if len(digits) < 20 else int(digits[:20])


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


def read_tensor(entry: Any, kind: str, begin: int, body: bytes) -> Tensor:
    """The tensor of an entry whose data must begin at `begin`."""
    plain = isinstance(entry, dict) and entry.get("storage") == "plain"
    has_keys(entry, KEYS | {"crc32"} if plain else KEYS)
    name, dtype, storage, shape = (entry[key] for key in ("name", "dtype", "storage", "shape"))
    corrupt_unless(isinstance(name, str) and isinstance(dtype, str), "name or dtype is no string")
    corrupt_unless(plain or storage == "frame", f"storage {storage!r}")
    corrupt_unless(bits_of(kind, dtype) is not None, f"dtype {dtype!r}")
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
        fits = 8 * size == math.prod(lengths) * (bits_of(kind, dtype) or 0)
        corrupt_unless(fits, f"{size} bytes of dtype {dtype!r}, shape {shape}")
        require(zlib.crc32(data) == whole(entry["crc32"]), "checksum_mismatch", f"of {name!r}")
    return Tensor(name, dtype, lengths, storage, data)


def bits_of(kind: str, dtype: str) -> int | None:
    """The bits of a value; None: there is no such dtype."""
    if kind == "safetensors":
        return SAFETENSORS_BITS.get(dtype)
    for pattern in NPY_DTYPES:
        if found := re.fullmatch(pattern, dtype, re.ASCII):
            size = int(found[1])
            return None if size >= 2**31 else 8 * size * (4 if "U" in dtype else 1)
    return None


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
