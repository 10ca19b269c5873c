"""The file that ``gradwire compress`` writes: named tensors, as frames or as plain bytes.

spec/format.md, section Container, defines it. A reader refuses a file that breaks one of its rules.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import gradwire
from gradwire import _core
from gradwire.errors import UserError
from gradwire.strict_json import most_header_bytes, parse_json
from gradwire.tensor_dtypes import FRAME_DTYPES, Kind, bits_of, bytes_of

MAGIC = b"GC"
VERSION = 1
PREFIX = struct.Struct("<2sBBIQ")
MAX_HEADER_BYTES = 2**27
MAX_NUMEL = 2**40
MAX_RANK = 64

Storage = Literal["frame", "plain"]

RESERVED_NAME = "__metadata__"  # of no tensor in a .safetensors file
_SHOWN = 80  # letters of a value in an error, at most
_NESTING = 4  # of a header: an object, its tensors, one of them, its shape
_TENSOR_KEYS = {"name", "dtype", "shape", "storage", "offset", "size"}


class ContainerError(UserError, ValueError):
    """A container file that breaks the format. ``code`` is the name of a gradwire status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _require(condition: bool, message: str, code: str = "corrupt_payload") -> None:
    if not condition:
        raise ContainerError(code, message)


@dataclass(frozen=True, slots=True)
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

    def check_frame(self) -> None:
        """Checks the frame but for the content of its payload, its dtype and its number of values.
        Raises ContainerError, which names the tensor."""
        where = f"tensor {self.name!r}"
        try:
            frame = _core.frame_header(self.data)
        except gradwire.GradwireError as error:
            raise ContainerError(error.code, f"{where}: {error}") from None
        _require(
            frame["dtype"] in [names.get(self.dtype) for names in FRAME_DTYPES.values()],
            f"{where}: its dtype is {self.dtype!r}, the frame holds {frame['dtype']}",
        )
        _require(
            frame["numel"] == self.numel,
            f"{where}: the frame holds {frame['numel']} values, the shape {list(self.shape)} "
            f"needs {self.numel}",
            "length_mismatch",
        )

    def inspect_frame(self) -> dict[str, Any]:
        """`gradwire.inspect` of a frame that check_frame accepts. Raises as that does."""
        self.check_frame()
        try:
            return gradwire.inspect(self.data)
        except gradwire.GradwireError as error:  # the tags of its values
            raise ContainerError(error.code, f"tensor {self.name!r}: {error}") from None


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
    most = min(MAX_HEADER_BYTES, most_header_bytes(PREFIX.size + len(header) + offset))
    _require(
        len(header) <= most,
        f"the header would have {len(header)} bytes, {most} are allowed with {offset} bytes of "
        "tensors",
        "limit_exceeded",
    )
    prefix = PREFIX.pack(MAGIC, VERSION, 0, 0, len(header))
    yield PREFIX.pack(MAGIC, VERSION, 0, _header_checksum(prefix, header), len(header))
    yield header
    for tensor in content.tensors:
        yield tensor.data


def parse(data: bytes | memoryview) -> TensorFile:
    """Reads a whole container file; the tensors' ``data`` are views of ``data``.

    Checks everything but the frames themselves: ``check_frames`` does. Raises ContainerError
    with code truncated, bad_magic, unsupported_version, reserved_bits, checksum_mismatch,
    corrupt_payload, trailing_bytes or limit_exceeded.
    """
    header, body = _parse_header(memoryview(data).cast("B"))
    _expect_keys(header, {"kind", "metadata", "tensors"}, "the header")
    kind, metadata, entries = header["kind"], header["metadata"], header["tensors"]
    # Not looked up in the dictionary: the header's kind may be a list, which has no hash.
    valid = tuple(FRAME_DTYPES)
    _require(kind in valid, f"kind is not one of {', '.join(valid)}")
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
    content = TensorFile(kind, tuple(tensors), metadata)
    _check_names(content)
    return content


def check_content(content: TensorFile) -> None:
    """Raises the ContainerError with which `parse` would refuse plain tensors like these."""
    for index, tensor in enumerate(content.tensors):
        where = f"tensor {index} ({_shown(tensor.name)})"
        _check_dtype(content.kind, tensor.dtype, tensor.storage, where)
        _check_shape(tensor.shape, where)
        _check_size(tensor, content.kind, where)
    _check_names(content)


def check_frames(content: TensorFile) -> None:
    """Checks each frame as Tensor.check_frame does."""
    for tensor in content.tensors:
        if tensor.storage == "frame":
            tensor.check_frame()


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
    most = most_header_bytes(len(view))
    _require(
        header_size <= most,
        f"the header has {header_size} bytes; of a file of {len(view)}, {most} are allowed",
        "limit_exceeded",
    )
    try:
        content = parse_json(bytes(header), _NESTING)
    except ValueError as error:
        raise ContainerError("corrupt_payload", f"the header is not valid JSON: {error}") from error
    return content, view[end:]


def _parse_entry(entry: Any, index: int, kind: Kind, position: int, body: memoryview) -> Tensor:
    where = f"tensor {index}"
    plain = isinstance(entry, dict) and entry.get("storage") == "plain"
    _expect_keys(entry, _TENSOR_KEYS | {"crc32"} if plain else _TENSOR_KEYS, where)
    name, dtype, storage = entry["name"], entry["dtype"], entry["storage"]
    _require(isinstance(name, str), f"{where}: name is not a string")
    where = f"tensor {index} ({_shown(name)})"
    _require(isinstance(dtype, str), f"{where}: dtype is not a string")
    is_known = storage in ("frame", "plain")
    _require(is_known, f"{where}: storage is {_shown(storage)}, valid: frame, plain")
    _check_dtype(kind, dtype, storage, where)
    _require(isinstance(entry["shape"], list), f"{where}: shape is not an array")
    shape = _check_shape(entry["shape"], where)
    offset, size = (_natural(entry[key], f"{where}: {key}") for key in ("offset", "size"))
    gap = f"{where}: offset is {offset}, the tensor before it ends at {position}"
    _require(offset == position, gap)
    beyond = f"{where}: {size} bytes at offset {offset}, the data area has {len(body)} bytes"
    _require(size <= len(body) - position, beyond, "truncated")
    tensor = Tensor(name, dtype, shape, body[position : position + size], storage)
    if plain:
        _check_size(tensor, kind, where)
        intact = zlib.crc32(tensor.data) == _natural(entry["crc32"], f"{where}: crc32")
        _require(intact, f"{where}: the checksum does not match", "checksum_mismatch")
    return tensor


def _check_dtype(kind: Kind, dtype: str, storage: Storage, where: str) -> None:
    given = f"{where}: dtype is {_shown(dtype)}"
    if storage == "frame":
        valid = FRAME_DTYPES[kind]
        _require(dtype in valid, f"{given}; valid ones for a frame: {', '.join(valid)}")
    _require(bits_of(kind, dtype) is not None, f"{given}, which no .{kind} file has")


def _check_shape(shape: Sequence[Any], where: str) -> tuple[int, ...]:
    too_many = f"{where}: {len(shape)} dimensions, {MAX_RANK} are allowed"
    _require(len(shape) <= MAX_RANK, too_many, "limit_exceeded")
    dims = tuple(_natural(dim, f"{where}: a dimension") for dim in shape)
    # Zeros are left out, so that even an empty tensor cannot have a dimension beyond the limit.
    numel = math.prod(dim for dim in dims if dim)
    _require(numel <= MAX_NUMEL, f"{where}: more than 2^40 values", "limit_exceeded")
    return dims


def _check_size(tensor: Tensor, kind: Kind, where: str) -> None:
    needed = bytes_of(kind, tensor.dtype, tensor.numel)
    what = "no whole number of bytes" if needed is None else f"{needed} bytes"
    _require(
        len(tensor.data) == needed,
        f"{where}: {len(tensor.data)} bytes, dtype {tensor.dtype!r} and shape "
        f"{list(tensor.shape)} take {what}",
    )


def _check_names(content: TensorFile) -> None:
    names = {tensor.name for tensor in content.tensors}
    _require(len(names) == len(content.tensors), "two tensors have the same name")
    _require(
        content.kind != "safetensors" or RESERVED_NAME not in names,
        f"a tensor has the name {RESERVED_NAME!r}, under which .safetensors files keep metadata",
    )
    _require(
        content.kind != "npy" or (names == {""} and not content.metadata),
        'a container of kind npy holds one tensor named "" and no metadata',
    )


def _natural(value: Any, what: str) -> int:
    is_natural = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    _require(is_natural, f"{what} is {_shown(value)}, not an integer from 0 on")
    return int(value)


def _expect_keys(mapping: Any, keys: set[str], where: str) -> None:
    _require(isinstance(mapping, dict), f"{where} is not an object")
    found = _shown(sorted(mapping))
    wanted = ", ".join(sorted(keys))
    _require(set(mapping) == keys, f"{where} has the keys {found}; it must have {wanted}")


def _shown(value: object) -> str:
    """`value` for an error, which may not be as long as a header."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
