"""A module for each codec, which decodes and encodes its payload.

A new codec needs a file in this folder and no other entry. Its module has these names:

- NUMBER and NAME
- CARRIES_NON_FINITE: without error feedback, NaN and infinities are encoded like any value, and no
  marker is written
- LEAVES_OUT_ZEROS: a value that is not sent leaves a sum as it is
- for decoding: check_parameters, check_size and decode
- for encoding: read (the keys of the codec string), parameters (param_a and param_b) and encode
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from common import Draws, Frame


class Payload(Protocol):
    """The contents of each codec's module."""

    NUMBER: int
    NAME: str
    CARRIES_NON_FINITE: bool
    LEAVES_OUT_ZEROS: bool

    def check_parameters(self, param_a: int, param_b: int, /) -> None: ...
    def check_size(self, frame: Frame, /) -> None: ...
    def decode(self, frame: Frame, /) -> bytes: ...
    def read(self, keys: dict[str, str], /) -> Any: ...
    def parameters(self, options: Any, /) -> tuple[int, int]: ...
    def encode(self, values: list[float], options: Any, draws: Draws, /) -> bytes: ...


# The modules of this folder by name; codecs share those without a NUMBER.
MODULES: dict[str, Any] = {
    path.stem: import_module(f"payloads.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))
}
CODECS: dict[int, Payload] = {
    module.NUMBER: module
    for module in sorted(
        (module for module in MODULES.values() if hasattr(module, "NUMBER")),
        key=lambda module: module.NUMBER,
    )
}
CODECS_BY_NAME: dict[str, Payload] = {codec.NAME: codec for codec in CODECS.values()}
