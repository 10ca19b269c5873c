"""What the golden frames are built of."""

from __future__ import annotations

import struct

import common
import reference_encoder as encoder
from payloads import ternary
from payloads.inceptionn import NUMBER as INCEPTIONN
from payloads.qsgd import NUMBER as QSGD
from payloads.three_lc import NUMBER as THREE_LC

SIGNALLING_NAN = bytes.fromhex("010080ff")


def scales(*values: float) -> bytes:
    return common.to_bytes(list(values))


def three_lc(
    n: int, payload: bytes, coder: int = ternary.ZRE, bucket: int = 0, told: int = 0
) -> bytes:
    return encoder.seal_frame(THREE_LC, coder | told << 2, bucket, n, payload)


def inceptionn(n: int, payload: bytes, param_a: int = 0, flags: int = 0) -> bytes:
    return encoder.seal_frame(INCEPTIONN, param_a, 0, n, payload, flags)


def qsgd(
    n: int, payload: bytes, coder: int = 0, s: int = 7, bucket: int = 512, told: int = 0
) -> bytes:
    return encoder.seal_frame(QSGD, s | coder << 7 | told << 9, bucket, n, payload)


def two_chunks(first: bytes, second: bytes) -> bytes:
    """Scale 1 and the codes of two chunks with their sizes."""
    return scales(1.0) + struct.pack("<HH", len(first), len(second)) + first + second


FULL_CHUNK = b"\xff" * 585 + b"\xf3"  # 585 * 14 + 2 = 8192 packed bytes
