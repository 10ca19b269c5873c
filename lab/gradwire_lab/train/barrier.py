"""Where the workers of a run wait for each other, outside of what is measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

_NEVER = 2**31
_PATIENCE = timedelta(seconds=0.5)  # between two looks at who is gone


@dataclass
class Survivors:
    """What the workers share outside of a process group, so that some of them may be gone.

    lost: the ranks that are gone. Another thread adds them, after all that they wrote.
    """

    store: dist.FileStore  # type: ignore[name-defined]
    lost: set[int] = field(default_factory=set)


class Barrier:
    """Over a process group, of which no rank may be gone."""

    def __init__(self, workers: dist.ProcessGroup) -> None:
        self._workers = workers

    def wait(self) -> None:
        """Waits until all workers have come here."""
        self.first(None)

    def first(self, step: int | None) -> int | None:
        """The first of the workers' steps, on all of them. None: no step."""
        first = torch.tensor(_NEVER if step is None else step)
        dist.all_reduce(first, dist.ReduceOp.MIN, self._workers)
        return None if first.item() == _NEVER else int(first)


class BarrierOfSurvivors(Barrier):
    """Over a store, without the workers that are gone."""

    def __init__(self, survivors: Survivors, run: str, rank: int, workers: int) -> None:
        """run: its name, which no other run has."""
        self._store = dist.PrefixStore(run, survivors.store)  # type: ignore[attr-defined]
        self._rank, self._ranks = rank, range(workers)
        self._lost, self._meetings = survivors.lost, 0

    def first(self, step: int | None) -> int | None:
        place, self._meetings = f"meeting {self._meetings}", self._meetings + 1
        self._store.set(f"{place}/{self._rank}", str(_NEVER if step is None else step))
        said = []
        for rank in self._ranks:
            key = f"{place}/{rank}"
            gone = rank in self._lost  # before the look: what it wrote is there by then
            while not (written := self._store.check([key])) and not gone:
                with suppress(dist.DistStoreError):
                    self._store.wait([key], _PATIENCE)
                gone = rank in self._lost
            if written:
                said.append(int(self._store.get(key)))
        return None if min(said) == _NEVER else min(said)
