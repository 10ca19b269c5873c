"""The format of `.safetensors` files: the length of a header as u64, the header in JSON, the data.

https://github.com/huggingface/safetensors describes it. The files that are written have the bytes
that the package safetensors writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gradwire.container import RESERVED_NAME, Tensor
from gradwire.strict_json import most_header_bytes, parse_json
from gradwire.tensor_dtypes import SAFETENSORS_BITS, bytes_of

_LENGTH_BYTES = 8
_ALIGNMENT = 8  # of the data; spaces fill the header
_NESTING = 3  # of a header: an object, a tensor in it, its shape
_MOST_HEADER_BYTES = 100_000_000  # that the package reads
_KEYS = {"dtype", "shape", "data_offsets"}
_RANK = {dtype: rank for rank, dtype in enumerate(SAFETENSORS_BITS)}


def read_safetensors(data: memoryview) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a file, as views of `data` and in the order of their names, and its metadata.

    Raises ValueError, which names the tensor.
    """
    header, body = _read_header(data)
    metadata = header.pop(RESERVED_NAME, None)
    if metadata is None:  # or null, as in the package
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{RESERVED_NAME} is not an object of strings")
    placed = sorted((_read_entry(name, entry, body) for name, entry in header.items()), key=_place)
    end = 0
    for begin, stop, tensor in placed:
        if begin != end:
            what = "overlaps another tensor" if begin < end else "leaves a gap before it"
            raise ValueError(f"tensor {tensor.name!r}: its data, from byte {begin}, {what}")
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes belong to no tensor")
    return sorted((tensor for _, _, tensor in placed), key=lambda tensor: tensor.name), metadata


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


def _read_header(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    begin = _LENGTH_BYTES
    length = int.from_bytes(data[:begin], "little")
    if len(data) < begin or length > len(data) - begin:
        raise ValueError(f"it is cut off, or no such file: {len(data)} bytes end in the header")
    most = min(_MOST_HEADER_BYTES, most_header_bytes(len(data)))
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
    where = f"tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ValueError(f"{where} must have {', '.join(sorted(_KEYS))}, and nothing else")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        raise ValueError(f"{where} has dtype {dtype}, not supported: {', '.join(SAFETENSORS_BITS)}")
    if not _are_natural(shape) or not _are_natural(place) or len(place) != 2:
        raise ValueError(f"{where}: shape or data_offsets do not hold integers from 0 on")
    begin, end = place
    if not begin <= end <= len(body):
        raise ValueError(f"{where}: its data would end at byte {end} of {len(body)}")
    tensor = Tensor(name, dtype, tuple(shape), body[begin:end])
    needed = bytes_of("safetensors", dtype, tensor.numel)
    if needed != end - begin:
        raise ValueError(
            f"{where}: {end - begin} bytes are not those of dtype {dtype} and shape {shape}"
        )
    return begin, end, tensor


def _place(entry: tuple[int, int, Tensor]) -> tuple[int, int]:
    return entry[0], entry[1]


def _are_natural(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
