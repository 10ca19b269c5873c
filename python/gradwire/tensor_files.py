"""Reading and writing `.npy` and `.safetensors` files as named tensors of raw bytes.

The bytes are in C order. A tensor whose dtype gradwire does not encode passes through unchanged,
even if NumPy has no type for it (float8).
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gradwire.container import RESERVED_NAME, Tensor, TensorFile
from gradwire.errors import UserError
from gradwire.strict_json import HEADER_BYTES, most_header_bytes, parse_json
from gradwire.tensor_dtypes import SAFETENSORS_BITS, Kind, bits_of, bytes_of

_LENGTH_BYTES = 8
_ALIGNMENT = 8  # of the data; spaces fill the header
_NESTING = 3  # of a header: an object, a tensor in it, its shape
_MOST_HEADER_BYTES = 100_000_000  # that the package reads
_KEYS = {"dtype", "shape", "data_offsets"}
_RANK = {dtype: rank for rank, dtype in enumerate(SAFETENSORS_BITS)}


def read_safetensors(
    data: memoryview, header_bytes: int = HEADER_BYTES
) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a file, as views of `data` and in the order of their names, and its metadata.

    header_bytes: how long its header may be, however small the file is. Raises ValueError, which
    names the tensor.
    """
    header, body = _read_header(data, header_bytes)
    metadata = _pop_metadata(header)
    read = (_read_entry(name, entry, body) for name, entry in header.items())
    placed = sorted(read, key=itemgetter(0, 1))
    end = 0
    for begin, stop, tensor in placed:
        if begin != end:
            what = "overlaps another tensor" if begin < end else "leaves a gap before it"
            raise ValueError(f"tensor {tensor.name!r}: its data, from byte {begin}, {what}")
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes belong to no tensor")
    return sorted((tensor for _, _, tensor in placed), key=attrgetter("name")), metadata


def read_head(data: memoryview) -> bytes:
    """The bytes before the data of a file that `read_safetensors` has read."""
    return bytes(data[: _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")])


def parse_head(head: bytes) -> list[Tensor]:
    """The tensors of a file's first bytes, without data and in its order. Raises ValueError."""
    header = parse_json(head[_LENGTH_BYTES:], _NESTING)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    _pop_metadata(header)
    for name, entry in header.items():
        _check_entry(name, entry)
    described = sorted(header.items(), key=lambda pair: pair[1]["data_offsets"])
    tensors = [Tensor(name, one["dtype"], tuple(one["shape"]), b"") for name, one in described]
    sizes = [bytes_of("safetensors", tensor.dtype, tensor.numel) or 0 for tensor in tensors]
    ends = list(itertools.accumulate(sizes))
    places = [list(pair) for pair in zip([0, *ends], ends, strict=False)]
    if [one["data_offsets"] for _, one in described] != places:
        raise ValueError("its tensors do not stand one behind the other")
    return tensors


def order_in_file(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the order of their data: those with large values first, so that all of them
    are aligned."""
    return sorted(tensors, key=lambda tensor: (-_RANK[tensor.dtype], tensor.name))


def header_of(tensors: Sequence[Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes before the data of tensors that stand in this order. Raises ValueError."""
    content: dict[str, Any] = {RESERVED_NAME: metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        size = bytes_of("safetensors", tensor.dtype, tensor.numel)
        if size is None:
            raise ValueError(f"tensor {tensor.name!r} takes no whole number of bytes")
        place = [end, end + size]
        described = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        content[tensor.name] = described
        end += size
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    try:
        header = text.encode()
    except UnicodeEncodeError as error:
        letter = text[error.start]
        name = next((tensor.name for tensor in tensors if letter in tensor.name), RESERVED_NAME)
        raise ValueError(
            f"{name!r} has half of a surrogate pair, which no .safetensors file can hold"
        ) from None
    header += b" " * (-len(header) % _ALIGNMENT)
    if len(header) > _MOST_HEADER_BYTES:
        raise ValueError(
            f"its header would have {len(header)} bytes; .safetensors files allow "
            f"{_MOST_HEADER_BYTES}"
        )
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _read_header(data: memoryview, least: int) -> tuple[dict[str, Any], memoryview]:
    begin = _LENGTH_BYTES
    length = int.from_bytes(data[:begin], "little")
    if len(data) < begin or length > len(data) - begin:
        raise ValueError(f"it is cut off, or no such file: {len(data)} bytes end in the header")
    most = min(_MOST_HEADER_BYTES, most_header_bytes(len(data), least))
    if length > most:
        raise ValueError(
            f"its header has {length} bytes; of a file of {len(data)}, {most} are allowed"
        )
    header = parse_json(bytes(data[begin : begin + length]), _NESTING)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, data[begin + length :]


def _read_entry(name: str, entry: Any, body: memoryview) -> tuple[int, int, Tensor]:
    """The tensor, and where its data begin and end."""
    _check_entry(name, entry)
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    where = f"tensor {name!r}"
    if not begin <= end <= len(body):
        raise ValueError(f"{where}: its data would end at byte {end} of {len(body)}")
    tensor = Tensor(name, dtype, tuple(shape), body[begin:end])
    needed = bytes_of("safetensors", dtype, tensor.numel)
    if needed != end - begin:
        raise ValueError(
            f"{where}: {end - begin} bytes are not those of dtype {dtype} and shape {shape}"
        )
    return begin, end, tensor


def _check_entry(name: str, entry: Any) -> None:
    where = f"tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ValueError(f"{where} must have {', '.join(sorted(_KEYS))}, and nothing else")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        raise ValueError(f"{where} has dtype {dtype}, not supported: {', '.join(SAFETENSORS_BITS)}")
    if not _are_natural(shape) or not _are_natural(place) or len(place) != 2:
        raise ValueError(f"{where}: shape or data_offsets do not hold integers from 0 on")


def _pop_metadata(header: dict[str, Any]) -> dict[str, str]:
    metadata = header.pop(RESERVED_NAME, None)
    if metadata is None:  # or null, as in the package
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{RESERVED_NAME} is not an object of strings")
    return metadata


def _are_natural(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


_NUMPY_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


class Writer(Protocol):
    """A file to write."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class TensorFileError(UserError, ValueError):
    """A file cannot be read or written; the message says why, and names a file that is read."""


def values_of(tensor: Tensor, frame_dtype: str) -> NDArray[Any]:
    """The values of a plain tensor, one-dimensional: without a copy where they lie aligned.

    frame_dtype: FRAME_DTYPES's name for the tensor's dtype. NumPy has no bfloat16, so bfloat16
    values come as uint16 of their bits.
    """
    values = np.frombuffer(tensor.data, dtype=_NUMPY_DTYPES[frame_dtype])
    return np.require(values, requirements=["ALIGNED"])


def widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """The float32 values that equal the result of values_of."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def kind_of(path: Path) -> Kind:
    """The kind of file that `path` names by its ending."""
    if path.suffix in (".npy", ".safetensors"):
        return cast(Kind, path.suffix[1:])
    hint = " (load it and save each array as .npy)" if path.suffix == ".npz" else ""
    raise TensorFileError(f"{path}: not a .npy or .safetensors file{hint}")


def read_tensor_file(path: Path) -> TensorFile:
    """Reads a whole file. Raises TensorFileError, OSError."""
    kind = kind_of(path)
    with path.open("rb") as file:
        try:
            if kind == "npy":
                return TensorFile(kind, (_read_npy(file),))
            tensors, metadata = read_safetensors(memoryview(file.read()))
            return TensorFile(kind, tuple(tensors), metadata)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # NumPy lets through what Python's parser raises
            reason = str(error).partition("\n")[0]
            raise TensorFileError(f"{path}: cannot read it as .{kind}: {reason}") from None


def write_tensor_file(
    content: TensorFile,
    file: Writer,
    values: Callable[[Tensor], bytes | memoryview] = lambda tensor: tensor.data,
) -> None:
    """Writes `content` in its own kind. values: gives the plain bytes of a tensor, when they are
    written and not before. Raises TensorFileError, and what `values` raises."""
    tensors = list(content.tensors)
    if content.kind == "npy":
        (tensor,) = tensors
        header = {"descr": tensor.dtype, "fortran_order": False, "shape": tensor.shape}
        np.lib.format.write_array_header_1_0(cast(Any, file), header)
    else:
        tensors = order_in_file(tensors)
        try:
            file.write(header_of(tensors, content.metadata))
        except ValueError as error:
            raise TensorFileError(f"cannot write .safetensors: {error}") from None
    for tensor in tensors:
        file.write(values(tensor))


def _read_npy(file: BinaryIO) -> Tensor:
    """Raises whatever NumPy raises."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} is not known")
    # Version 3 is version 2 with other letters in the names of records.
    read_header = getattr(np.lib.format, f"read_array_header_{min(version[0], 2)}_0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that Python 2 wrote, or of damaged ones
        shape, fortran_order, dtype = read_header(file)
    descr: Any = np.lib.format.dtype_to_descr(dtype)  # a list for records
    if dtype.hasobject or dtype.subdtype or not isinstance(descr, str):
        raise ValueError(f"arrays of records or objects (dtype {dtype}) are not supported")
    if bits_of("npy", descr) is None:
        raise ValueError(f"dtype {descr} is not supported")
    if any(length < 0 for length in shape):
        raise ValueError(f"shape {shape} has a negative length")
    data: bytes | memoryview = file.read()
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        what = "bytes follow the array" if len(data) > needed else "it is cut off"
        raise ValueError(f"{what}: {len(data)} bytes, shape and dtype take {needed}")
    if fortran_order:
        data = np.ndarray(shape, dtype, data, order="F").tobytes()
    return Tensor("", descr, tuple(shape), data)
