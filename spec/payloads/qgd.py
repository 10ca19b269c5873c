"""qgd: the values of largest magnitude, up to the norm in sum, each as its sign times the norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import FLT_MAX, Draws, Frame, add_in_order, add_lanes, f32, require
from payloads import chunks, ternary

NUMBER, NAME = 20, "qgd"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a <= ternary.RICE, "reserved_bits", f"qgd param_a {param_a:#06x}")
    require(param_b == 0, "reserved_bits", f"qgd param_b {param_b:#x}")


def check_size(frame: Frame) -> None:
    ternary.check_size(frame, frame.param_a, 0)


def decode(frame: Frame) -> bytes:
    return ternary.decode(frame, frame.param_a, 0)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    coder: int


def read(keys: dict[str, str]) -> Options:
    return Options(ternary.CODERS[keys.get("coder", "rice")])


def parameters(options: Options) -> tuple[int, int]:
    return options.coder, 0


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    if not any(values):
        return b""
    squares = [[b * b for b in part] for part in chunks.cut(values)]
    norm = min(f32(math.sqrt(add_in_order([add_lanes(part) for part in squares]))), FLT_MAX)
    trits = [0] * len(values)
    total = 0.0
    order = sorted((i for i, b in enumerate(values) if b != 0), key=lambda i: (-abs(values[i]), i))
    most = math.isqrt(len(values) - 1) + 1  # the root, rounded up
    for i in order[:most]:
        trits[i] = 1 if values[i] > 0 else -1
        total += abs(values[i])
        if f32(total) >= norm:
            break
    return ternary.encode([norm], trits, options.coder)
