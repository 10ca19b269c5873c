"""The conventions of format.md, which all modules of this folder share.

A tensor is a `bytes` object of little-endian float32 values, so that every bit is kept.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
FLT_MAX = 3.4028234663852886e38
QUIET_NAN = bytes.fromhex("0000c07f")  # 0x7fc00000


class FormatError(ValueError):
    """Bytes that are refused. `status` is the name of a status code of format.md."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def require(condition: bool, status: str, message: str) -> None:
    if not condition:
        raise FormatError(status, message)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def f32(value: float) -> float:
    """Rounds to float32, ties to even; a magnitude that is too large becomes infinite.

    Arithmetic on doubles followed by this function is float32 arithmetic: for +, -, * and / of two
    float32, rounding to double and then to float32 gives the same result as rounding once.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def to_floats(tensor: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(tensor) // 4}f", tensor))


def to_bytes(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@dataclass(frozen=True)
class Frame:
    """An encoded tensor. In a packet, the codec table gives codec, dtype and parameters."""

    codec: int
    dtype: int
    param_a: int
    param_b: int
    n: int
    payload: bytes
    non_finite: bool = False


def require_no_parameters(param_a: int, param_b: int) -> None:
    require(param_a == 0 and param_b == 0, "reserved_bits", "the codec has no parameters")


def narrow_bf16(value: bytes) -> bytes:
    """Rounds a float32 to bf16, ties to even. A NaN becomes the quiet NaN of its sign."""
    bits = little(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return ((bits >> 16 & 0x8000) | 0x7FC0).to_bytes(2, "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def narrow_tensor(tensor: bytes) -> bytes:
    return b"".join(narrow_bf16(tensor[i : i + 4]) for i in range(0, len(tensor), 4))


def narrow_residual(tensor: bytes) -> bytes:
    """As narrow_tensor, but with the largest bf16 in place of an infinity."""
    largest = {b"\x80\x7f": b"\x7f\x7f", b"\x80\xff": b"\x7f\xff"}
    halves = narrow_tensor(tensor)
    pairs = (halves[i : i + 2] for i in range(0, len(halves), 2))
    return b"".join(largest.get(pair, pair) for pair in pairs)


def widen_bf16(halves: bytes) -> bytes:
    return b"".join(b"\0\0" + halves[i : i + 2] for i in range(0, len(halves), 2))


def group_size(n: int, group: int) -> int:
    """The number of values in a group; a group size of 0 stands for all n."""
    return group or max(n, 1)


# --- Sums -------------------------------------------------------------------------------------

PART_VALUES = 40960
LANES = 16


def total(values: list[float]) -> float:
    """The sum of the values as f64, in the order of format.md."""
    parts = range(0, len(values), PART_VALUES)
    return add_in_order([add_lanes(values[first : first + PART_VALUES]) for first in parts])


def add_in_order(numbers: list[float]) -> float:
    """Rounds each addition to f64. sum() would not: since Python 3.12 it is more exact."""
    result = 0.0
    for number in numbers:
        result += number
    return result


def add_lanes(part: list[float]) -> float:
    """The sum of a part: value i goes to lane i % 16, then the upper lanes to the lower ones."""
    lanes = [add_in_order(part[lane::LANES]) for lane in range(LANES)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


# --- Random words ----------------------------------------------------------------------------


def philox(counter: tuple[int, ...], key0: int, key1: int) -> tuple[int, ...]:
    """Philox4x32-10: four words from a counter of four words and a key of two."""
    a, b, c, d = counter
    for _ in range(10):
        product0, product1 = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = product1 >> 32 ^ b ^ key0, product1 & 0xFFFFFFFF
        c, d = product0 >> 32 ^ d ^ key1, product0 & 0xFFFFFFFF
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


@dataclass(frozen=True)
class Draws:
    """The random words of a tensor in a step, one for each value."""

    seed: int = 0
    draw_stream: int = 0
    step: int = 0

    def words(self, n: int) -> list[int]:
        key0, key1, _, _ = philox((*halves(self.draw_stream), 0, 0), *halves(self.seed))
        drawn: list[int] = []
        for block in range(ceil_div(n, 4)):
            drawn += philox((*halves(block), *halves(self.step)), key0, key1)
        return drawn[:n]


def halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32
