"""The file that ``gradwire compress`` writes: named tensors, as frames or as plain bytes.

spec/format.md, section Container, defines it. A reader refuses a file that breaks one of its rules.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import gradwire
from gradwire.errors import UserError

MAGIC = b"GC"
VERSION = 1
PREFIX = struct.Struct("<2sBBIQ")
MAX_HEADER_BYTES = 2**27
MAX_NUMEL = 2**40
MAX_RANK = 64

Kind = Literal["npy", "safetensors"]
Storage = Literal["frame", "plain"]

# The dtypes that frames hold. For each kind of file: the dtype's name there -> its name in frames.
FRAME_DTYPES: dict[Kind, dict[str, str]] = {
    "npy": {"<f4": "float32", "<f2": "float16"},
    "safetensors": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"},
}
_TENSOR_KEYS = {"name", "dtype", "shape", "storage", "offset", "size"}


class ContainerError(UserError, ValueError):
    """A container file that breaks the format. ``code`` is the name of a gradwire status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _require(condition: bool, message: str, code: str = "corrupt_payload") -> None:
    if not condition:
        raise ContainerError(code, message)


@dataclass(frozen=True)
class Tensor:
    """A named tensor. `dtype` is a name in the vocabulary of its kind of file. `data` are the
    values in C order ("plain") or their frame, as `storage` says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    storage: Storage = "plain"

    @property
    def numel(self) -> int:
        """Number of values: the product of the shape, 1 for a scalar."""
        return math.prod(self.shape)

    def describe(self) -> dict[str, Any]:
        """Everything but the data, as plain values."""
        head = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return {**head, "storage": self.storage}

    def inspect_frame(self) -> dict[str, Any]:
        """`gradwire.inspect` of the frame. Raises ContainerError unless the frame has the tensor's
        number of values and dtype, GradwireError for a bad frame."""
        frame = gradwire.inspect(self.data)
        _require(
            frame["dtype"] in [names.get(self.dtype) for names in FRAME_DTYPES.values()],
            f"tensor {self.name!r}: its dtype is {self.dtype!r}, the frame holds {frame['dtype']}",
        )
        _require(
            frame["numel"] == self.numel,
            f"tensor {self.name!r}: the frame holds {frame['numel']} values, the shape "
            f"{list(self.shape)} needs {self.numel}",
            "length_mismatch",
        )
        return frame


@dataclass(frozen=True)
class TensorFile:
    """The content of a file of tensors, and of the container that holds it compressed. A file of
    kind npy is one tensor named ""."""

    kind: Kind
    tensors: tuple[Tensor, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def is_container(data: bytes | memoryview) -> bool:
    """Whether ``data`` begins as a container does."""
    return bytes(data[:2]) == MAGIC


def serialize(content: TensorFile) -> Iterator[bytes | memoryview]:
    """Yields the parts of the file, in order: prefix, header, then each tensor's bytes."""
    entries = []
    offset = 0
    for tensor in content.tensors:
        entry = tensor.describe() | {"offset": offset, "size": len(tensor.data)}
        if tensor.storage == "plain":
            entry["crc32"] = zlib.crc32(tensor.data)
        entries.append(entry)
        offset += len(tensor.data)
    described = {"kind": content.kind, "metadata": content.metadata, "tensors": entries}
    # json.dumps escapes to ASCII, so a name with a lone surrogate still makes valid UTF-8.
    header = json.dumps(described, separators=(",", ":")).encode("ascii")
    _require(
        len(header) <= MAX_HEADER_BYTES,
        f"the header would have {len(header)} bytes, {MAX_HEADER_BYTES} are allowed",
        "limit_exceeded",
    )
    prefix = PREFIX.pack(MAGIC, VERSION, 0, 0, len(header))
    yield PREFIX.pack(MAGIC, VERSION, 0, _header_checksum(prefix, header), len(header))
    yield header
    for tensor in content.tensors:
        yield tensor.data


def parse(data: bytes | memoryview) -> TensorFile:
    """Reads a whole container file; the tensors' ``data`` are views of ``data``.

    Checks everything but the frames themselves, which their decoder does. Raises ContainerError
    with code truncated, bad_magic, unsupported_version, reserved_bits, checksum_mismatch,
    corrupt_payload, trailing_bytes or limit_exceeded.
    """
    content, body = _parse_header(memoryview(data).cast("B"))
    _expect_keys(content, {"kind", "metadata", "tensors"}, "the header")
    kind, metadata, entries = content["kind"], content["metadata"], content["tensors"]
    # Not looked up in the dictionary: the header's kind may be a list, which has no hash.
    valid = tuple(FRAME_DTYPES)
    _require(kind in valid, f"kind is {kind!r}, valid: {', '.join(valid)}")
    is_texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    _require(is_texts, "metadata is not an object of strings")
    _require(isinstance(entries, list), "tensors is not an array")
    tensors = []
    position = 0
    for index, entry in enumerate(entries):
        tensor = _parse_entry(entry, index, kind, position, body)
        position += len(tensor.data)
        tensors.append(tensor)
    left = len(body) - position
    _require(left == 0, f"{left} bytes follow the last tensor's data", "trailing_bytes")
    names = {tensor.name for tensor in tensors}
    _require(len(names) == len(tensors), "two tensors have the same name")
    _require(
        kind != "npy" or (len(tensors) == 1 and tensors[0].name == "" and not metadata),
        'a container of kind npy holds one tensor named "" and no metadata',
    )
    return TensorFile(kind, tuple(tensors), metadata)


def _header_checksum(prefix: bytes | memoryview, header: bytes | memoryview) -> int:
    return zlib.crc32(header, zlib.crc32(prefix[8:16], zlib.crc32(prefix[:4])))


def _parse_header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns the header's object and the data area."""
    _require(
        MAGIC.startswith(bytes(view[:2])),
        "not a gradwire container: it does not begin with 'GC'",
        "bad_magic",
    )
    _require(
        len(view) >= PREFIX.size,
        f"a container has at least {PREFIX.size} bytes, this one {len(view)}",
        "truncated",
    )
    _, version, flags, checksum, header_size = PREFIX.unpack_from(view)
    _require(
        version == VERSION,
        f"container version {version}; this program reads {VERSION}",
        "unsupported_version",
    )
    _require(flags == 0, f"reserved flag bits are set: 0x{flags:02x}", "reserved_bits")
    _require(
        header_size <= MAX_HEADER_BYTES,
        f"the header claims {header_size} bytes, {MAX_HEADER_BYTES} are allowed",
        "limit_exceeded",
    )
    end = PREFIX.size + header_size
    _require(
        end <= len(view),
        f"the header ends at byte {end}, the file has {len(view)} bytes",
        "truncated",
    )
    header = view[PREFIX.size : end]
    intact = checksum == _header_checksum(view[: PREFIX.size], header)
    _require(intact, "the header's checksum does not match", "checksum_mismatch")
    try:
        content = json.loads(bytes(header).decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ContainerError("corrupt_payload", f"the header is not valid JSON: {error}") from error
    _require(isinstance(content, dict), "the header is not a JSON object")
    return content, view[end:]


def _parse_entry(entry: Any, index: int, kind: Kind, position: int, body: memoryview) -> Tensor:
    where = f"tensor {index}"
    _require(isinstance(entry, dict), f"{where} is not an object")
    plain = entry.get("storage") == "plain"
    _expect_keys(entry, _TENSOR_KEYS | {"crc32"} if plain else _TENSOR_KEYS, where)
    name, dtype, storage = entry["name"], entry["dtype"], entry["storage"]
    _require(isinstance(name, str), f"{where}: name is not a string")
    where = f"tensor {index} ({name!r})"
    _require(isinstance(dtype, str), f"{where}: dtype is not a string")
    is_known = storage in ("frame", "plain")
    _require(is_known, f"{where}: storage is {storage!r}, valid: frame, plain")
    valid = FRAME_DTYPES[kind]
    wrong = f"{where}: dtype is {dtype!r}; valid ones for a frame: {', '.join(valid)}"
    _require(plain or dtype in valid, wrong)
    shape = _parse_shape(entry["shape"], where)
    offset, size = _natural(entry["offset"], where), _natural(entry["size"], where)
    gap = f"{where}: offset is {offset}, the tensor before it ends at {position}"
    _require(offset == position, gap)
    beyond = f"{where}: {size} bytes at offset {offset}, the data area has {len(body)} bytes"
    _require(size <= len(body) - position, beyond, "truncated")
    data = body[position : position + size]
    intact = not plain or zlib.crc32(data) == _natural(entry["crc32"], where)
    _require(intact, f"{where}: the checksum does not match", "checksum_mismatch")
    return Tensor(name, dtype, shape, data, storage)


def _parse_shape(shape: Any, where: str) -> tuple[int, ...]:
    _require(isinstance(shape, list), f"{where}: shape is not an array")
    too_many = f"{where}: {len(shape)} dimensions, {MAX_RANK} are allowed"
    _require(len(shape) <= MAX_RANK, too_many, "limit_exceeded")
    dims = tuple(_natural(dim, where) for dim in shape)
    # Zeros are left out, so that even an empty tensor cannot have a dimension beyond the limit.
    numel = math.prod(dim for dim in dims if dim)
    _require(numel <= MAX_NUMEL, f"{where}: more than 2^40 values", "limit_exceeded")
    return dims


def _natural(value: Any, where: str) -> int:
    is_natural = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    _require(is_natural, f"{where}: {value!r} is not an integer >= 0")
    return int(value)


def _expect_keys(mapping: dict[str, Any], keys: set[str], where: str) -> None:
    found, wanted = ", ".join(sorted(mapping)), ", ".join(sorted(keys))
    _require(set(mapping) == keys, f"{where} has the keys {found}; it must have {wanted}")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping
