"""bf16: the upper half of each float32, rounded."""

from __future__ import annotations

from common import Draws, Frame, narrow_tensor, require, require_no_parameters, to_bytes, widen_bf16

NUMBER, NAME = 2, "bf16"
CARRIES_NON_FINITE = True
LEAVES_OUT_ZEROS = False
check_parameters = require_no_parameters


def check_size(frame: Frame) -> None:
    fits = len(frame.payload) == 2 * frame.n
    require(fits, "corrupt_payload", "bf16 takes 2 bytes a value")


def decode(frame: Frame) -> bytes:
    return widen_bf16(frame.payload)


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> None:
    """There are no options."""


def parameters(options: None) -> tuple[int, int]:
    return 0, 0


def encode(values: list[float], options: None, draws: Draws) -> bytes:
    return narrow_tensor(to_bytes(values))
