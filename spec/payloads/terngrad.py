"""terngrad: trits of clipped values, drawn at random, in two bits each or five to a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import Draws, Frame, f32, require
from payloads import drawn, ternary

NUMBER, NAME = 17, "terngrad"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_b % drawn.GROUP_MULTIPLE == 0, "reserved_bits", f"terngrad group {param_b}")


def check_size(frame: Frame) -> None:
    ternary.check_size(frame, frame.param_a & 3, frame.param_b)


def decode(frame: Frame) -> bytes:
    return ternary.decode(frame, frame.param_a & 3, frame.param_b)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    clip: float
    coder: int
    group: int


def read(keys: dict[str, str]) -> Options:
    five = keys.get("pack") == "trits5"
    return Options(
        clip=f32(float(keys.get("clip", "2.5"))),
        coder=ternary.CODERS[keys.get("coder", "none")] if five else ternary.TWO_BIT,
        group=int(keys.get("bucket", "0")),
    )


def parameters(options: Options) -> tuple[int, int]:
    informative = min(math.floor(options.clip * 1024 + 0.5), 16383)
    return options.coder | informative << 2, options.group


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    return drawn.encode(values, options.clip, options.coder, options.group, draws)
