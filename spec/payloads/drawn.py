"""Trits that are drawn: what terngrad and stoch3 share."""

from __future__ import annotations

import math

from common import FLT_MAX, Draws, f32
from payloads import ternary
from payloads.onebit import PART_VALUES, add_in_order, add_lanes

BUCKET_MULTIPLE = 320


def clipping_limit(values: list[float], clip: float) -> float:
    """clip times the population standard deviation; FLT_MAX for no clipping."""
    squares = [b * b for b in values]
    mean, mean_square = (
        add_in_order([add_lanes(x[i : i + PART_VALUES]) for i in range(0, len(x), PART_VALUES)])
        / len(values)
        for x in (values, squares)
    )
    variance = mean_square - mean * mean
    if clip == 0 or not variance > 2.0**-32 * mean_square:
        return FLT_MAX
    return f32(min(clip * math.sqrt(variance), FLT_MAX)) or FLT_MAX


def encode(values: list[float], clip: float, coder: int, bucket: int, draws: Draws) -> bytes:
    if not values:
        return b""
    limit = clipping_limit(values, clip)
    words = draws.words(len(values))
    bucket = bucket or len(values)
    scales, trits = [], []
    for first in range(0, len(values), bucket):
        part = values[first : first + bucket]
        scale = min(max(map(abs, part)), limit)
        step = f32(scale * 2.0**-24)
        scales.append(scale)
        for b, word in zip(part, words[first:], strict=False):
            sent = f32((word >> 8) * step) < min(abs(b), limit)
            trits.append((1 if b > 0 else -1) if sent else 0)
    return ternary.encode(scales, trits, coder)
