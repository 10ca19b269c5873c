"""The options of a ServerOptimizer, and which of them go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire._core import Layout
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import NamedTensor, shapes_of
from gradwire.torch.wrapping_optimizer import is_adaptive

# What workers pull: the changes of the servers' model, or the averages of their gradients.
UPDATES, GRADIENTS = PULLS = ("updates", "gradients")
INSTEAD = "barrier='step' exchanges after the backward pass instead"


def exchange_text(pulls: str) -> str:
    """The exchange of states, as `gradwire train --exchange` has it."""
    return f"server:pulls={pulls}"


def check_members(members: Members, pulls: str) -> None:
    """Raises ValueError for settings with which workers can't come and go, if they shall, and for
    those of other ways to train."""
    if members.goes_on and pulls == GRADIENTS:
        raise ValueError(
            "on_lost='continue' needs pulls='updates': with pulls='gradients' every version is "
            "the average of all workers"
        )
    if members.store is not None and members.role is None:
        raise ValueError("with store= each process says what it is: role= 'worker' or 'server'")
    if members.ranks_per_machine is not None:
        raise ValueError(
            "ranks_per_machine is for exchange='hierarchical', and ServerOptimizer has none"
        )
    if members.min_ranks != 1:
        raise ValueError(
            f"min_ranks={members.min_ranks} is for LocalSteps: versions of ServerOptimizer go on "
            "until no worker is left; leave it out"
        )


@dataclass(frozen=True)
class ServerSettings(ExchangeSettings):
    """The options have the names that they have in ServerOptimizer."""

    servers: int = 1
    backup_workers: int = 0
    staleness: int = 0
    history: int = 64
    pulls: str = UPDATES
    barrier: str = "step"

    @classmethod
    def make(
        cls,
        compression: Compression,
        members: Members,
        execution: Execution,
        optimizer: Optimizer,
        **own: Any,
    ) -> Self:
        """See ExchangeSettings.of. own: the options that are no other way's."""
        compression.require_sharded()
        check_members(members, own["pulls"])
        adaptive = partial(is_adaptive, optimizer)
        settings = cls.of(compression, members, execution, adaptive=adaptive)
        return replace(settings, chosen=None, **own)  # nothing chooses codecs

    @cached_property
    def world_size(self) -> int:
        """The number of workers and servers."""
        return dist.get_world_size(self.process_group) if self.ranks is None else self.ranks

    @property
    def workers(self) -> int:
        return self.world_size - self.servers

    @property
    def pulls_gradients(self) -> bool:
        return self.pulls == GRADIENTS

    @property
    def is_tensorwise(self) -> bool:
        return self.barrier == "tensor"

    def describe(self) -> list[str]:
        terms = (
            f"servers with barrier {self.barrier}, backup workers {self.backup_workers}, staleness "
            f"{self.staleness}, pulls of {self.pulls}, on_lost {self.on_lost}"
        )
        return [terms, *super().describe()]

    def patience(self, is_server: bool) -> float:
        """Seconds that a rank waits for another one. Where the servers go on without a silent
        worker, the others must not give up before."""
        return self.timeout * (2.0 if self.goes_on and not is_server else 1.0)

    def layout_of(self, named: Sequence[NamedTensor], owner: int | None = None) -> Layout:
        """owner: the rank of the server that has all the tensors; None: they are divided."""
        return self.layout(shapes_of(named), self.world_size, servers=self.servers, owner=owner)

    def of_exchange(self) -> dict[str, Any]:
        """The arguments of both sides' exchanges."""
        return {
            "pulls": self.pulls,
            "backup": self.backup_workers,
            "staleness": self.staleness,
            "history": self.history,
            "threads": self.threads,
            "target": self.target,
            "seed": self.seed,
        }

    def check_world(self, model: nn.Module | None) -> None:
        """Raises ValueError for settings that do not suit each other, the world or the model."""
        if not 1 <= self.servers < self.world_size:
            raise ValueError(
                f"servers is {self.servers}; a world of {self.world_size} ranks has 1 to "
                f"{self.world_size - 1} servers, the others are workers"
            )
        if self.barrier not in ("step", "tensor"):
            raise ValueError(f"barrier is {self.barrier!r}; valid ones are 'step' and 'tensor'")
        if self.is_tensorwise and model is None:
            raise ValueError(
                "barrier='tensor' needs model=, whose forward pass waits for the tensors"
            )
        if self.is_tensorwise and (self.backup_workers or self.staleness):
            raise ValueError(
                "barrier='tensor' takes the pushes of all workers for each tensor of a version; "
                f"backup_workers is {self.backup_workers} and staleness is {self.staleness}, and "
                "both must be 0"
            )
        who = "" if self.store is not None else f"rank {dist.get_rank(self.process_group)}: "
        if self.pulls not in PULLS:
            raise ValueError(f"{who}pulls is {self.pulls!r}; valid ones are {' and '.join(PULLS)}")
        for name, valid in ("backup_workers", 0), ("staleness", 0), ("barrier", "step"):
            if self.pulls_gradients and getattr(self, name) != valid:
                raise ValueError(
                    f"{who}pulls='gradients' averages the pushes of all workers in each version; "
                    f"{name} is {getattr(self, name)!r}, valid is {valid!r}"
                )
