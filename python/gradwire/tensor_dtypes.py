"""The dtypes of tensors in files, by the names that each kind of file has for them."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["npy", "safetensors"]

# The dtypes that frames hold. For each kind of file: the dtype's name there -> its name in frames.
FRAME_DTYPES: dict[Kind, dict[str, str]] = {
    "npy": {"<f4": "float32", "<f2": "float16"},
    "safetensors": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"},
}

# The bits of a value. In a .safetensors file, tensors stand in the opposite order of dtypes.
SAFETENSORS_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}

# NumPy's type strings: letters, and the bytes of a value; characters of four bytes with U.
_NUMPY_TYPE = re.compile(
    r"\|[biu](?P<byte>1)"
    r"|[<>](?:[iu](?P<integer>[248])|f(?P<float>2|4|8|16)|c(?P<complex>8|16|32))"
    r"|[<>][mM](?P<time>8)(?:\[(?:[1-9][0-9]{0,9})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV](?P<raw>0|[1-9][0-9]{0,9})"
    r"|[<>]U(?P<characters>0|[1-9][0-9]{0,9})"
)
_LONGEST_ITEM = 2**31 - 1  # a number in a type string


def bits_of(kind: Kind, dtype: str) -> int | None:
    """The bits of a value of this dtype; None if `kind` has no such dtype."""
    if kind == "safetensors":
        return SAFETENSORS_BITS.get(dtype)
    found = _NUMPY_TYPE.fullmatch(dtype)
    if found is None:
        return None
    size = int(found[found.lastgroup or 0])
    if size > _LONGEST_ITEM:
        return None
    return 8 * size * (4 if found.lastgroup == "characters" else 1)


def bytes_of(kind: Kind, dtype: str, numel: int) -> int | None:
    """The bytes of numel values; None if no whole number of bytes holds them, or without such a
    dtype."""
    bits = bits_of(kind, dtype)
    return None if bits is None or bits * numel % 8 else bits * numel // 8
