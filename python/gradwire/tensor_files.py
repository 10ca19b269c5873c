"""Reading and writing `.npy` and `.safetensors` files as named tensors of raw bytes.

The bytes are in C order. A tensor whose dtype gradwire does not encode passes through unchanged,
even if NumPy has no type for it (float8).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradwire.container import Kind, Tensor, TensorFile
from gradwire.errors import UserError

_NUMPY_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

# The names of dtypes in safetensors files, and the names that the package's writer takes.
_WRITER_DTYPES = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


class Writer(Protocol):
    """A file to write."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class TensorFileError(UserError, ValueError):
    """A file cannot be read or written; the message names the file and the reason."""


def values_of(tensor: Tensor, frame_dtype: str) -> NDArray[Any]:
    """The values of a plain tensor, one-dimensional, without a copy.

    frame_dtype: FRAME_DTYPES's name for the tensor's dtype. NumPy has no bfloat16, so bfloat16
    values come as uint16 of their bits.
    """
    return np.frombuffer(tensor.data, dtype=_NUMPY_DTYPES[frame_dtype])


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
    if kind == "npy":
        return TensorFile(kind, (_read_npy(path),))
    return _read_safetensors(path)


def write_tensor_file(content: TensorFile, file: Writer) -> None:
    """Writes `content` in its own kind."""
    if content.kind == "npy":
        _write_npy(file, content.tensors[0])
    else:
        _write_safetensors(file, content)


def _read_npy(path: Path) -> Tensor:
    try:
        # Only the header is read here. NumPy compares the size that it claims with the file's.
        array = np.lib.format.open_memmap(path, mode="r")
        data = path.read_bytes()[array.offset :]
        if len(data) != array.nbytes:
            raise ValueError("bytes follow the array")
    except OSError:
        raise
    except Exception as error:  # NumPy lets through what Python's parser raises
        raise TensorFileError(f"{path}: cannot read it as .npy: {error}") from None
    descr: Any = np.lib.format.dtype_to_descr(array.dtype)  # a list for records
    if not isinstance(descr, str):
        raise TensorFileError(f"{path}: arrays of records (dtype {array.dtype}) are not supported")
    if not array.flags.c_contiguous:
        data = np.ndarray(array.shape, array.dtype, data, order="F").tobytes()
    return Tensor("", descr, array.shape, data)


def _write_npy(file: Writer, tensor: Tensor) -> None:
    try:
        dtype = np.dtype(tensor.dtype)
        array = np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)
    except (TypeError, ValueError) as error:
        raise TensorFileError(f"the file's dtype {tensor.dtype!r} does not fit: {error}") from None
    np.lib.format.write_array(file, array, allow_pickle=False)


def _read_safetensors(path: Path) -> TensorFile:
    safetensors = _import_safetensors()
    try:
        # The file is read once, by deserialize; safe_open maps it and reads the header alone.
        with safetensors.safe_open(path, framework="np") as header:
            metadata: Mapping[str, str] = header.metadata() or {}
        parts = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise TensorFileError(f"{path}: cannot read it as .safetensors: {error}") from None
    tensors = []
    for name, part in sorted(parts, key=lambda item: item[0]):
        if part["dtype"] not in _WRITER_DTYPES:
            raise TensorFileError(
                f"{path}: tensor {name!r} has dtype {part['dtype']}, not supported"
            )
        tensors.append(Tensor(name, part["dtype"], tuple(part["shape"]), memoryview(part["data"])))
    return TensorFile("safetensors", tuple(tensors), dict(metadata))


def _write_safetensors(file: Writer, content: TensorFile) -> None:
    safetensors = _import_safetensors()
    # The writer takes addresses, so the arrays must live until it has returned.
    arrays = {tensor.name: np.frombuffer(tensor.data, dtype=np.uint8) for tensor in content.tensors}
    specs = {}
    for tensor in content.tensors:
        if tensor.dtype not in _WRITER_DTYPES:
            raise TensorFileError(f"tensor {tensor.name!r} has dtype {tensor.dtype}, not supported")
        specs[tensor.name] = safetensors.TensorSpec(
            dtype=_WRITER_DTYPES[tensor.dtype],
            shape=list(tensor.shape),
            data_ptr=arrays[tensor.name].ctypes.data,
            data_len=len(tensor.data),
        )
    try:
        file.write(safetensors.serialize(specs, content.metadata or None))
    except (safetensors.SafetensorError, UnicodeEncodeError) as error:  # lone surrogates in a name
        raise TensorFileError(f"cannot write .safetensors: {error}") from None


def _import_safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise TensorFileError(
            ".safetensors files need the safetensors package: pip install 'gradwire[safetensors]'"
        ) from None
    if not hasattr(safetensors, "TensorSpec"):
        raise TensorFileError(
            f"the safetensors package found is {safetensors.__version__}, gradwire needs 0.8 or "
            "newer: pip install 'gradwire[safetensors]'"
        )
    return safetensors
