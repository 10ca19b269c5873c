"""stoch3: drawn trits, five to a byte, without clipping."""

from __future__ import annotations

from dataclasses import dataclass

from common import Draws, Frame, require
from payloads import drawn, ternary

NUMBER, NAME = 18, "stoch3"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a <= ternary.RICE, "reserved_bits", f"param_a {param_a} of stoch3")
    require(param_b % drawn.GROUP_MULTIPLE == 0, "reserved_bits", f"stoch3 group {param_b}")


def check_size(frame: Frame) -> None:
    ternary.check_size(frame, frame.param_a, frame.param_b)


def decode(frame: Frame) -> bytes:
    return ternary.decode(frame, frame.param_a, frame.param_b)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    coder: int
    group: int


def read(keys: dict[str, str]) -> Options:
    return Options(ternary.CODERS[keys.get("coder", "none")], int(keys.get("bucket", "0")))


def parameters(options: Options) -> tuple[int, int]:
    return options.coder, options.group


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    return drawn.encode(values, 0.0, options.coder, options.group, draws)
