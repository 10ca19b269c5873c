"""One module a codec, in the order of format.md: how its payload is decoded, and how encoded.

Each has NUMBER and NAME; CARRIES_NON_FINITE (without error feedback, NaN and infinities are encoded
like any value: there is no marker); for decoding check_parameters, check_size and decode; for
encoding read (the codec string's keys), parameters (param_a and param_b) and encode.
"""

from __future__ import annotations

from typing import Any, Protocol

from common import Draws, Frame
from payloads import (
    bf16,
    fp16,
    inceptionn,
    int8,
    onebit,
    qsgd,
    raw,
    stc,
    stoch3,
    terngrad,
    three_lc,
    topk,
)


class Payload(Protocol):
    """What each module has."""

    NUMBER: int
    NAME: str
    CARRIES_NON_FINITE: bool

    def check_parameters(self, param_a: int, param_b: int, /) -> None: ...
    def check_size(self, frame: Frame, /) -> None: ...
    def decode(self, frame: Frame, /) -> bytes: ...
    def read(self, keys: dict[str, str], /) -> Any: ...
    def parameters(self, options: Any, /) -> tuple[int, int]: ...
    def encode(self, values: list[float], options: Any, draws: Draws, /) -> bytes: ...


_MODULES: tuple[Payload, ...] = (
    *(raw, bf16, fp16, int8, onebit, topk, inceptionn),
    *(three_lc, terngrad, stoch3, stc, qsgd),
)
CODECS = {module.NUMBER: module for module in _MODULES}
CODECS_BY_NAME = {module.NAME: module for module in _MODULES}
