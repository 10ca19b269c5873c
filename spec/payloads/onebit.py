"""onebit: the sign of each value, and the means of the negative and of the other values."""

from __future__ import annotations

import math

from common import (
    FLT_MAX,
    Draws,
    Frame,
    ceil_div,
    f32,
    group_size,
    require,
    to_bytes,
    to_floats,
    total,
)

NUMBER, NAME = 5, "onebit"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = False


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a == 0, "reserved_bits", "param_a of onebit is reserved")
    require(param_b % 8 == 0, "reserved_bits", f"onebit group {param_b}")


def check_size(frame: Frame) -> None:
    size = len(frame.payload)
    whole = 8 * ceil_div(frame.n, group_size(frame.n, frame.param_b)) + ceil_div(frame.n, 8)
    fits = size == 0 or (frame.n > 0 and size == whole)
    require(fits, "corrupt_payload", f"onebit takes 0 or {whole} bytes")


def decode(frame: Frame) -> bytes:
    if not frame.payload:
        return bytes(4 * frame.n)
    group = group_size(frame.n, frame.param_b)
    head = 8 * ceil_div(frame.n, group)
    means = to_floats(frame.payload[:head])
    for i, mean in enumerate(means):
        sign = math.copysign(1, mean)
        fits = sign > 0 if i % 2 == 0 else sign < 0 or mean == 0
        fits = fits and frame.payload[4 * i : 4 * i + 4] != b"\0\0\0\x80"
        require(fits and math.isfinite(mean), "corrupt_payload", f"mean {mean}")
    require(any(means), "corrupt_payload", "all means are zero")
    bits = int.from_bytes(frame.payload[head:], "little")
    require(bits >> frame.n == 0, "corrupt_payload", "padding is not zero")
    return to_bytes([means[i // group * 2 + (bits >> i & 1)] for i in range(frame.n)])


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> int:
    """The group size."""
    return int(keys.get("bucket", "0"))


def parameters(options: int) -> tuple[int, int]:
    return 0, options


def encode(values: list[float], options: int, draws: Draws) -> bytes:
    group = group_size(len(values), options)
    means: list[float] = []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        negatives = sum(b < 0 for b in part)
        means.append(mean([0.0 if b < 0 else b for b in part], len(part) - negatives))
        means.append(mean([b if b < 0 else 0.0 for b in part], negatives))
    bits = sum(1 << i for i, b in enumerate(values) if b < 0)
    packed = bits.to_bytes(ceil_div(len(values), 8), "little")
    return to_bytes(means) + packed if any(means) else b""


def mean(values: list[float], count: int) -> float:
    if count == 0:
        return 0.0
    return f32(max(min(total(values) / count, FLT_MAX), -FLT_MAX))
