"""stc: the values of largest magnitude, each as its sign times their mean magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from common import Draws, Frame, add_in_order, add_lanes, f32, little, require, to_bytes
from payloads import chunks, ternary
from payloads.topk import threshold

NUMBER, NAME = 19, "stc"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a <= ternary.RICE, "reserved_bits", f"stc param_a {param_a:#06x}")


def check_size(frame: Frame) -> None:
    ternary.check_size(frame, frame.param_a, 0)


def decode(frame: Frame) -> bytes:
    return ternary.decode(frame, frame.param_a, 0)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    density: float
    coder: int


def read(keys: dict[str, str]) -> Options:
    coder = ternary.CODERS[keys.get("coder", "rice")]
    return Options(f32(float(keys.get("density", "0.01"))), coder)


def parameters(options: Options) -> tuple[int, int]:
    return options.coder, little(to_bytes([options.density]))


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    if not any(values):
        return b""
    least = threshold(values, options.density)
    sent = [[abs(b) for b in part if abs(b) >= least] for part in chunks.cut(values)]
    mean = f32(add_in_order([add_lanes(part) for part in sent]) / sum(map(len, sent)))
    trits = [0 if abs(b) < least else 1 if b > 0 else -1 for b in values]
    return ternary.encode([mean], trits, options.coder)
