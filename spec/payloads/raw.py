"""raw: the values as they are."""

from __future__ import annotations

import struct

from common import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Draws,
    Frame,
    require,
    require_no_parameters,
    to_bytes,
    widen_bf16,
)

NUMBER, NAME = 1, "raw"
CARRIES_NON_FINITE = True
LEAVES_OUT_ZEROS = False
check_parameters = require_no_parameters


def check_size(frame: Frame) -> None:
    width = 4 if frame.dtype == FLOAT32 else 2
    fits = len(frame.payload) == width * frame.n
    require(fits, "corrupt_payload", f"raw takes {width} bytes a value")


def decode(frame: Frame) -> bytes:
    if frame.dtype == FLOAT16:
        return widen_f16(frame.payload)
    if frame.dtype == BFLOAT16:
        return widen_bf16(frame.payload)
    return frame.payload


def widen_f16(halves: bytes) -> bytes:
    widened = b""
    for (half,) in struct.iter_unpack("<H", halves):
        sign, exponent, fraction = half >> 15, half >> 10 & 31, half & 0x3FF
        if exponent == 31:
            widened += (sign << 31 | 0x7F800000 | fraction << 13).to_bytes(4, "little")
        else:
            scale = 2.0 ** (max(exponent, 1) - 25)
            magnitude = (fraction + (1024 if exponent else 0)) * scale
            widened += struct.pack("<f", -magnitude if sign else magnitude)
    return widened


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> None:
    """There are no options."""


def parameters(options: None) -> tuple[int, int]:
    return 0, 0


def encode(values: list[float], options: None, draws: Draws) -> bytes:
    return to_bytes(values)
