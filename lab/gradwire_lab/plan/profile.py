"""What a step of a model computes, layer by layer, and what codecs and messages cost.

A profile is a JSON file. Its times hold where and how they were measured: on that machine, with
`workers` processes that computed at once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from gradwire.errors import UserError
from gradwire.files import write_text
from gradwire_lab.json_fields import parse_object, read_fields

_KIND = "gradwire-profile"
_MIN_NUMEL = 256
_MOST_OF_OTHERS = 0.1  # of the cores


class PlanError(UserError):
    """A plan or a simulation cannot be made. The message says what it needs."""


@dataclass(frozen=True)
class Layer:
    """A parameter. backward_seconds: from the gradient before it (of the first: from the loss) to
    its own. bits: of a value of its gradient, as DDP sends it."""

    name: str
    dims: tuple[int, ...]
    backward_seconds: float
    bits: int = 32

    @property
    def numel(self) -> int:
        return prod(self.dims)

    @property
    def nbytes(self) -> float:
        """Of its gradient in memory."""
        return self.numel * self.bits / 8

    @property
    def goes_raw(self) -> bool:
        """Whether a layout sends it raw by default (LayoutOptions::min_numel)."""
        return len(self.dims) < 2 or self.numel < _MIN_NUMEL


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds a value, and bits a value, on the model's own gradients. pull_bits: of the average of
    what the profile's workers send, as servers encode it; None: as many as `bits`. Owners that are
    workers add their own gradient, which was not encoded, to the average, and its bits are close to
    `bits`."""

    encode_seconds: float
    decode_seconds: float
    bits: float
    pull_bits: float | None = None


@dataclass(frozen=True)
class MessageCosts:
    """What messages cost on an unlimited network, with all workers busy.

    message_seconds: of a message of the DDP hook, at its sender and at its receiver. byte_seconds:
    of a byte that a rank sends and of one that it receives, together. allreduce_seconds: of DDP's
    all-reduce of a single value among the profile's workers, or 2 processes for a lone worker.
    allreduce_byte_seconds: of each further byte that a rank sends. exchange_seconds: of each bucket
    of the hook, what its messages and codec lack: threads that wait for a core, cold caches.
    """

    message_seconds: float = 0.0
    byte_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    allreduce_byte_seconds: float = 0.0
    exchange_seconds: float = 0.0


@dataclass(frozen=True)
class LocalCosts:
    """What LocalSteps adds to a step of the optimizer beside codec and messages: to each step, and
    to a step that exchanges, such as the change of the model, and its average applied."""

    step_seconds: float = 0.0
    exchange_seconds: float = 0.0


@dataclass(frozen=True)
class Profile:
    """layers: in the order in which their gradients come. forward_seconds: from the beginning of
    the step to the loss. rest_seconds: from the last gradient to the end of the step."""

    model: str
    workers: int
    forward_seconds: float
    rest_seconds: float
    layers: tuple[Layer, ...]
    codecs: Mapping[str, CodecSpeed]
    transport: MessageCosts = MessageCosts()
    local: LocalCosts = LocalCosts()
    how: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backward_seconds(self) -> float:
        return sum(layer.backward_seconds for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """How long a step computes that exchanges nothing."""
        return self.forward_seconds + self.backward_seconds + self.rest_seconds

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def cores(self) -> int | None:
        """Those of the machine where it was measured, if the profile says it."""
        machine = self.how.get("machine")
        cores = machine.get("cores") if isinstance(machine, dict) else None
        return cores if isinstance(cores, int) else None

    @property
    def load_of_others(self) -> float | None:
        """The load average of other work, if that shared the cores: before it was measured, or
        meanwhile, where that is known."""
        meanwhile, before = (self.how.get(key) for key in ("cores_of_others", "load_average"))
        if isinstance(meanwhile, float) and self.cores and disturbs(meanwhile, self.cores):
            return meanwhile
        if isinstance(before, float) and self.cores and is_busy(before, self.cores):
            return before
        return None

    @property
    def remedy(self) -> str:
        """How to get a profile without doubts."""
        if "assumed" in self.how:
            return "with PyTorch installed they are measured"
        if self.how:
            return "measure the model again, on an idle machine"
        return "take `transport` from a profile that `gradwire plan --model` made on that machine"

    def codec(self, text: str) -> CodecSpeed:
        """Raises PlanError if the codec was not measured."""
        if text not in self.codecs:
            raise PlanError(
                f"the profile of {self.model} has no codec {text}, but "
                f"{', '.join(self.codecs) or 'none'}; {self.advise_codec(text)}"
            )
        return self.codecs[text]

    def advise_codec(self, text: str) -> str:
        """How the profile gets a codec: one that gradwire has measured, or one from elsewhere."""
        if self.how:
            return f"measure it again with --codec {text}"
        return f"add {text} to `codecs` of the file"

    def write(self, path: Path) -> None:
        document = {"kind": _KIND, **asdict(self)}
        write_text(path, json.dumps(document, indent=1, allow_nan=False))


def is_busy(load: float, cores: int) -> bool:
    """Whether other work shares the cores with a measurement."""
    return load > cores / 2


def disturbs(of_others: float, cores: int) -> bool:
    """Whether other work that used so many of the cores meanwhile makes a measurement wrong."""
    return of_others > _MOST_OF_OTHERS * cores


def read_profile(path: Path) -> Profile:
    """Raises PlanError for a file that is no profile or holds nonsense, OSError."""
    text = path.read_bytes()
    try:
        document = parse_object(text)
        if (kind := read_fields(_Kind, document).kind) != _KIND:
            raise ValueError(f"its `kind` is {kind}, not {_KIND}")
        del document["kind"]
        profile = read_fields(Profile, document, all_known=True)
        _check(profile)
    except ValueError as error:
        raise PlanError(
            f"{path} is no profile: {error}; `gradwire plan --model NAME --profile-out FILE` "
            "makes one"
        ) from error
    return profile


@dataclass(frozen=True)
class _Kind:
    kind: str


def _check(profile: Profile) -> None:
    """Raises ValueError."""
    if not profile.layers:
        raise ValueError("it has no layers")
    if profile.workers < 1:
        raise ValueError(f"`workers` is {profile.workers}, not a number from 1")
    for codec, speed in profile.codecs.items():
        if speed.bits == 0:
            raise ValueError(f"`bits` of codec {codec} is 0, and no codec takes none")
    for name, count in Counter(layer.name for layer in profile.layers).items():
        if count > 1:
            raise ValueError(f"two of its layers have the name {name}")
    parts: dict[str, Any] = {f" of layer {layer.name}": layer for layer in profile.layers}
    parts |= {f" of codec {codec}": speed for codec, speed in profile.codecs.items()}
    parts |= {" of transport": profile.transport, " of local": profile.local}
    for of, part in {"": profile, **parts}.items():
        for name, value in vars(part).items():
            if isinstance(value, int | float) and not 0 <= value <= sys.float_info.max:
                raise ValueError(f"`{name}`{of} is {value}, not a number from 0")
    if profile.compute_seconds <= 0:
        raise ValueError("a step takes no time")
    for layer in profile.layers:
        if not all(dim > 0 for dim in layer.dims):
            raise ValueError(
                f"`dims` of layer {layer.name} is {list(layer.dims)}, not a list of numbers from 1"
            )
