"""Reading and writing `.npy` and `.safetensors` files as named tensors of raw bytes.

The bytes are in C order. A tensor whose dtype gradwire does not encode passes through unchanged,
even if NumPy has no type for it (float8).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gradwire.container import Tensor, TensorFile
from gradwire.errors import UserError
from gradwire.safetensors_format import header_of, order_in_file, read_safetensors
from gradwire.tensor_dtypes import Kind, bits_of

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
    if path.suffix == ".npy":
        return "npy"
    if path.suffix == ".safetensors":
        return "safetensors"
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
    read_header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
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
