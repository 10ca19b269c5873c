"""What is in the fragments of LocalSteps, and what of it is exchanged and applied when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.option_record import OptionRecord

# Sends what a gate lets through as it is, and where it stands.
GATED_CODEC = "topk:ratio=1,index=rice,ef=off"
# Beyond so many steps from one exchange to the next, losses ended higher with a codec that holds
# back as much as 3LC, and with the gain for noise (docs/results/evaluation/diloco.md, "Plain
# average").
_OFTEN = 4


@dataclass(frozen=True)
class Schedule(OptionRecord):
    """When local steps are exchanged, and what of them. Steps are counted from 1.

    Args:
        every: Steps from one exchange to the next.
        fragments: Parts of the model, each of whole layers. The exchanges of each are `every` steps
            apart, and those of different fragments are spread evenly over these steps.
        delay: An exchange begins this many steps before its turn, travels while they are computed,
            and is applied at its turn, in the same step on all ranks: 0 (at once) to `every`.
        mix: The share of a rank's own values in the parameters after an exchange, below 1; the rest
            are those on which all ranks agree. It needs a `delay` below `every`. 0: with such a
            `delay`, what a rank changed during the delay is dropped; with delay=every the next
            exchange takes it.
        gate: "bfloat16": of its changes a rank sends those alone that alter the model when it is
            rounded to bfloat16, and keeps the others until they do, as in PULSELoCo
            (docs/reference/local_steps.md). Empty: it sends all.

    Raises:
        ValueError: The options do not fit together.
    """

    every: int = 1
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    gate: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        every, fragments, delay, mix = self.every, self.fragments, self.delay, self.mix
        if every < 1:
            raise ValueError(f"every is {every}; an exchange every 1 step or more is needed")
        if fragments < 1:
            raise ValueError(f"fragments is {fragments}; 1 or more are needed")
        if fragments > every:
            raise ValueError(
                f"fragments is {fragments}, but each begins its exchange in a step of its own, and "
                f"every is {every}: take fragments={every} or fewer, or every={fragments} or more"
            )
        if not 0 <= delay <= every:
            raise ValueError(
                f"delay is {delay}; 0 to every={every} steps are possible, because the next "
                "exchange begins then"
            )
        if not 0 <= mix < 1:
            raise ValueError(f"mix is {mix}; a share from 0 to below 1 is needed")
        if mix > 0 and self.is_back_to_back:
            raise ValueError(
                f"mix={mix} with delay=every={every} would send some changes twice: take "
                f"delay={every - 1} or less, or mix=0"
            )

        if self.gate not in ("", "bfloat16"):
            raise ValueError(f"gate is '{self.gate}'; valid is 'bfloat16'")

    @property
    def is_seldom(self) -> bool:
        """Whether exchanges are so far apart that a codec should hold little back, and changes go
        without the gain for noise (gradient_noise.py)."""
        return self.every > _OFTEN

    @property
    def is_back_to_back(self) -> bool:
        """Whether a fragment's exchange ends when its next one begins."""
        return self.delay == self.every

    def begins(self, fragment: int, step: int) -> bool:
        """Whether the exchange of fragment 0, 1, ... begins after this step."""
        turn = (fragment + 1) * self.every // self.fragments
        return (step + self.delay - turn) % self.every == 0

    def describe(self) -> list[str]:
        return [
            f"local steps, exchanged every {self.every}",
            f"fragments {self.fragments}, applied {self.delay} steps later, mix {self.mix}",
            *([f"gate {self.gate}"] if self.gate else []),
        ]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another schedule."""
        for name, here in self.state_dict().items():
            saved = state.get(name, getattr(EVERY_STEP, name))  # earlier versions had fewer options
            if saved != here:
                raise ValueError(f"{name}: the state has {saved!r}, this rank has {here!r}")

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


EVERY_STEP = Schedule()  # no local steps


def deal_by_size(sizes: Sequence[tuple[str, int]], fragments: int) -> list[list[int]]:
    """The places of each fragment's parameters in `sizes`: their names and numbers of values.

    A layer is a module with parameters of its own. The largest layers are dealt first, each to the
    fragment with the fewest values so far. So fragments are about equally large; and where layers
    are, too, this is the strided pattern of Streaming DiLoCo.
    Raises ValueError if there are fewer layers than fragments.
    """
    layers: dict[str, list[int]] = {}
    for place, (name, _) in enumerate(sizes):
        layers.setdefault(name.rpartition(".")[0], []).append(place)
    most = max(len(layers), 1)  # a model without parameters is one fragment
    if fragments > most:
        raise ValueError(
            f"fragments is {fragments}, but the model has {len(layers)} layers, and a layer is not "
            f"cut: take fragments={most} or fewer"
        )
    sized = [(sum(sizes[place][1] for place in layer), layer) for layer in layers.values()]
    dealt: list[tuple[int, list[int]]] = [(0, [])] * fragments
    for numel, layer in sorted(sized, key=lambda each: -each[0]):
        fewest = min(range(fragments), key=lambda index: (dealt[index][0], len(dealt[index][1])))
        before, places = dealt[fewest]
        dealt[fewest] = (before + numel, sorted(places + layer))
    return [places for _, places in dealt]
