"""Trits that are drawn at random, for terngrad and stoch3."""

from __future__ import annotations

import math

from common import FLT_MAX, Draws, f32, group_size, total
from payloads import ternary

GROUP_MULTIPLE = 320


def clipping_limit(values: list[float], clip: float) -> float:
    """clip times the population standard deviation, or FLT_MAX to clip nothing."""
    mean = total(values) / len(values)
    mean_square = total([b * b for b in values]) / len(values)
    variance = mean_square - mean * mean
    if clip == 0 or not variance > 2.0**-32 * mean_square:
        return FLT_MAX
    return f32(min(clip * math.sqrt(variance), FLT_MAX)) or FLT_MAX


def encode(values: list[float], clip: float, coder: int, group: int, draws: Draws) -> bytes:
    if not values:
        return b""
    limit = clipping_limit(values, clip)
    words = draws.words(len(values))
    group = group_size(len(values), group)
    scales, trits = [], []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        scale = min(max(map(abs, part)), limit)
        step = f32(scale * 2.0**-24)
        scales.append(scale)
        for b, word in zip(part, words[first:], strict=False):
            sent = f32((word >> 8) * step) < min(abs(b), limit)
            trits.append((1 if b > 0 else -1) if sent else 0)
    return ternary.encode(scales, trits, coder)
