"""3lc: a value's trit is its sign where it exceeds half of s times the largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import FLT_MAX, Draws, Frame, f32, group_size, require
from payloads import ternary

NUMBER, NAME = 16, "3lc"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True


def check_parameters(param_a: int, param_b: int) -> None:
    known = param_a & 3 in ternary.CODERS.values()
    require(known, "reserved_bits", f"3lc coder {param_a & 3}")
    require(param_b % 5 == 0, "reserved_bits", f"3lc group {param_b}")


def check_size(frame: Frame) -> None:
    ternary.check_size(frame, frame.param_a & 3, frame.param_b)


def decode(frame: Frame) -> bytes:
    return ternary.decode(frame, frame.param_a & 3, frame.param_b)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    s: float
    coder: int
    group: int


def read(keys: dict[str, str]) -> Options:
    return Options(
        s=f32(float(keys.get("s", "1"))),
        coder=ternary.CODERS[keys.get("coder", "zre")],
        group=int(keys.get("bucket", "0")),
    )


def parameters(options: Options) -> tuple[int, int]:
    informative = min(math.floor((options.s - 1) * 16384 + 0.5), 16383)
    return options.coder | informative << 2, options.group


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    scales, trits = [], []
    group = group_size(len(values), options.group)
    for first in range(0, len(values), group):
        part = values[first : first + group]
        m = min(f32(options.s * max(map(abs, part))), FLT_MAX)
        half = f32(m * 0.5)
        scales.append(m)
        trits += [1 if b > half else -1 if b < -half else 0 for b in part]
    return ternary.encode(scales, trits, options.coder)
