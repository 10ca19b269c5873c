"""fp16: each value as IEEE binary16, rounded."""

from __future__ import annotations

import struct

from common import Draws, Frame, require, require_no_parameters
from payloads.raw import widen_f16

NUMBER, NAME = 3, "fp16"
CARRIES_NON_FINITE = True
LEAVES_OUT_ZEROS = False
check_parameters = require_no_parameters


def check_size(frame: Frame) -> None:
    fits = len(frame.payload) == 2 * frame.n
    require(fits, "corrupt_payload", "fp16 takes 2 bytes a value")


def decode(frame: Frame) -> bytes:
    return widen_f16(frame.payload)


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> None:
    """There are no options."""


def parameters(options: None) -> tuple[int, int]:
    return 0, 0


def encode(values: list[float], options: None, draws: Draws) -> bytes:
    return b"".join(map(narrow_f16, values))


def narrow_f16(value: float) -> bytes:
    sign = struct.pack("<d", value)[7] & 0x80
    if value != value:
        return bytes([0x00, sign | 0x7E])
    try:
        return struct.pack("<e", value)
    except OverflowError:  # from 65520 on
        return bytes([0x00, sign | 0x7C])
