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
from gradwire.option_record import OptionRecord
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.meeting import require_group
from gradwire.torch.options import Compression, Execution, Members
from gradwire.torch.parameters import NamedTensor, shapes_of
from gradwire.torch.wrapping_optimizer import finer_codec

# What workers pull: the changes of the servers' model, or the averages of their gradients.
UPDATES, GRADIENTS = PULLS = ("updates", "gradients")
# Whose pushes a version counts: one of each worker, or also further ones of a worker.
OWN, ANY = TURNS = ("own", "any")
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
class BackupWorkers(OptionRecord):
    """For `ServerOptimizer(backup_workers=)`: each version is finished without `number` pushes.

    turns: Whose pushes it counts. "own": one of each worker. "any": a worker that is done also
        takes the turn of one that is behind, and pushes another gradient for the same version, as
        with TensorFlow's SyncReplicasOptimizer (3LC, section 2.1). It needs staleness=0.
    """

    number: int
    turns: str = OWN


@dataclass(frozen=True)
class ServerSettings(ExchangeSettings):
    """The options have the names that they have in ServerOptimizer."""

    servers: int = 1
    backup_workers: int = 0
    turns: str = OWN
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
        if execution.memory not in ("", "host"):
            raise ValueError(
                f"memory='{execution.memory}', but a ServerOptimizer keeps residuals in the host's "
                "memory: leave out memory"
            )
        check_members(members, own["pulls"])
        finer = partial(finer_codec, optimizer)
        settings = cls.of(compression, members, execution, finer=finer)
        backup = own["backup_workers"]
        if not isinstance(backup, BackupWorkers):
            backup = BackupWorkers(backup)
        own |= {"backup_workers": backup.number, "turns": backup.turns}
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

    @property
    def depends_on_speed(self) -> bool:
        """Whether the versions depend on which workers are fast."""
        return self.backup_workers > 0 or self.staleness > 0

    def describe(self) -> list[str]:
        terms = (
            f"servers with barrier {self.barrier}, backup workers {self.backup_workers}, turns "
            f"{self.turns}, staleness {self.staleness}, pulls of {self.pulls}, "
            f"on_lost {self.on_lost}"
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
            "turns": self.turns,
            "staleness": self.staleness,
            "history": self.history,
            "threads": self.threads,
            "target": self.target,
            "seed": self.seed,
        }

    def check_world(self, model: nn.Module | None) -> None:
        """Raises ValueError for settings that do not suit each other, the world or the model, and
        CommunicationError for a process group where the ranks can't meet."""
        if self.store is None:
            require_group(self.process_group)
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
        if self.turns not in TURNS:
            raise ValueError(f"turns is {self.turns!r}; valid ones are {' and '.join(TURNS)}")
        if self.turns == ANY and (self.backup_workers < 1 or self.staleness):
            raise ValueError(
                "turns='any' gives the turns of late workers to others, which wait otherwise: the "
                f"number of backup workers is {self.backup_workers} and must be 1 or more, "
                f"staleness is {self.staleness} and must be 0"
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
