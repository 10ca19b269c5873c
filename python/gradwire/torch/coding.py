"""How tensors are encoded and exchanged: what all ways to train with gradwire are told alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradwire._core import Exchange, Layout
from gradwire.torch.names import NamedShape

RAW = "raw"
SHARDED = "sharded"
RING = "ring"
TERNGRAD = "terngrad"
HIERARCHICAL = "hierarchical"

# What stands for raw in buckets of each dtype. Pushes are exact; pulls are rounded as the bucket
# would be anyway.
RAW_CODECS = {torch.float32: RAW, torch.bfloat16: "bf16", torch.float16: "fp16"}

_DEFAULT_CODEC = "3lc:s=1.75"
_TRIT_CODECS = (TERNGRAD, RAW)  # of TernGrad's exchange; raw as what to compare with


@dataclass(frozen=True)
class Coding:
    """The arguments of GradwireState of the same names; `codec` is not None any more.

    `ranks_per_machine` (hierarchical alone): None until the ranks have agreed on it.
    `update` (sharded alone): called by each owner when the bucket holds its shard's averages, to
    turn them in place into what everyone gets.
    """

    codec: str
    pull_codec: str | None
    rules: tuple[tuple[str, ...], ...]
    exclude: tuple[str, ...]
    min_numel: int
    threads: int
    target: str
    seed: int
    exchange: str = SHARDED
    ranks_per_machine: int | None = None
    update: Callable[[], None] | None = None

    def check(self, world_size: int | None) -> None:
        """Raises GradwireError for what no bucket could be encoded with, ValueError for settings
        that do not go together. `world_size`: None where it is not known yet.
        """
        probe = replace(self, ranks_per_machine=1)
        probe.make_exchange(probe.layout([("probe", [1])], 1, RAW, raw=False), 0)
        self._check_machines(world_size)
        if self.exchange == TERNGRAD:
            self._check_trits(world_size)

    def check_on_device(self) -> None:
        """Raises ValueError for what is on the CPU alone."""
        if self.exchange != SHARDED:
            raise ValueError(
                f"gradients on a GPU are averaged by exchange='{SHARDED}' alone, not by "
                f"'{self.exchange}'"
            )

    def text(self) -> str:
        return self.codec if self.pull_codec is None else f"{self.codec}, pull {self.pull_codec}"

    def machines(self, world_size: int) -> int:
        """How many ranks exchange with each other: one a machine where it is hierarchical."""
        if self.exchange != HIERARCHICAL:
            return world_size
        assert self.ranks_per_machine is not None, "the ranks agree on it before the first bucket"
        return world_size // self.ranks_per_machine

    def layout(
        self, tensors: Sequence[NamedShape], world_size: int, raw_codec: str, raw: bool
    ) -> Layout:
        machines = self.machines(world_size)
        if raw:
            return Layout(tensors, machines, RAW, raw_codec=raw_codec)
        return Layout(
            tensors,
            machines,
            self.codec,
            pull_codec=self.pull_codec,
            rules=self.rules,
            exclude=self.exclude,
            min_numel=self.min_numel,
            raw_codec=raw_codec,
        )

    def make_exchange(self, layout: Layout, rank: int) -> Exchange:
        """`layout`: one of this coding's."""
        machine_of_rank = None
        if self.exchange == HIERARCHICAL:
            assert self.ranks_per_machine is not None, "its layout was made with it"
            world = range(layout.workers * self.ranks_per_machine)
            machine_of_rank = [r // self.ranks_per_machine for r in world]
        return Exchange(
            layout,
            rank,
            self.exchange,
            update=self.update,
            machine_of_rank=machine_of_rank,
            threads=self.threads,
            target=self.target,
            seed=self.seed,
        )

    def _check_machines(self, world_size: int | None) -> None:
        size = self.ranks_per_machine
        if size is None:
            return
        if self.exchange != HIERARCHICAL:
            raise ValueError(
                f"ranks_per_machine goes with exchange='{HIERARCHICAL}' alone, not with "
                f"'{self.exchange}'"
            )
        if world_size is None:
            world_size = max(size, 1)
        check_machines(size, world_size, "ranks_per_machine")

    def _check_trits(self, world_size: int | None) -> None:
        if self.codec.partition(":")[0] not in _TRIT_CODECS:
            raise ValueError(
                f"exchange='{TERNGRAD}' adds trits without decoding them: codec is '{self.codec}', "
                f"valid are {' and '.join(_TRIT_CODECS)} (rules= may name others without residual)"
            )
        # Every pattern matches a tensor of its own name, and nothing but a pattern is called "*".
        names = dict.fromkeys([*(rule[0] for rule in self.rules), "*"])
        tensors = [(name, [2, max(self.min_numel, 1)]) for name in names]
        # Without a world nobody knows how many levels the pulls have.
        probe = self if world_size is not None else replace(self, pull_codec=None)
        probe.make_exchange(probe.layout(tensors, world_size or 1, RAW, raw=False), 0)


def make_coding(
    process_group: dist.ProcessGroup | None,
    *,
    codec: str | None,
    pull_codec: str | None,
    rules: Iterable[tuple[str, ...]],
    exclude: Iterable[str],
    min_numel: int,
    threads: int,
    target: str,
    seed: int,
    exchange: str = SHARDED,
    ranks_per_machine: int | None = None,
    update: Callable[[], None] | None = None,
) -> Coding:
    """Checked, as far as the group is known. Raises what `Coding.check` raises."""
    if codec is None:
        codec = TERNGRAD if exchange == TERNGRAD else _DEFAULT_CODEC
    coding = Coding(
        codec,
        pull_codec,
        tuple(rules),
        tuple(exclude),
        min_numel,
        threads,
        target,
        seed,
        exchange,
        ranks_per_machine,
        update,
    )
    world_size = dist.get_world_size(process_group) if dist.is_initialized() else 0
    coding.check(world_size if world_size > 0 else None)
    return coding


def check_machines(ranks_per_machine: int, world_size: int, origin: str) -> None:
    """Raises ValueError unless so many ranks are a machine of that world. `origin`: who says so."""
    if ranks_per_machine < 1 or world_size % ranks_per_machine:
        raise ValueError(
            f"{origin} is {ranks_per_machine}; {world_size} ranks can be on machines of "
            f"{', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
        )


def sparsity_multiplier(codec: str) -> float:
    """The `s` of 3lc, by which a scale exceeds the largest magnitude; 1 for every other codec."""
    name, _, parameters = codec.partition(":")
    settings = dict(setting.partition("=")[::2] for setting in parameters.split(",") if setting)
    return float(settings.get("s", 1.0)) if name == "3lc" else 1.0
