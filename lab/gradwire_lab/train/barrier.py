"""Where the workers of a run wait for each other, outside of what is measured."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_NEVER = 2**31
_PATIENCE = timedelta(seconds=0.5)  # between two looks at who is gone


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

    def __init__(self, store: Store, lost: set[int], rank: int, workers: int) -> None:
        """store: of this run alone. lost: the ranks that are gone. Another thread adds them, after
        all that they wrote."""
        self._store, self._lost = store, lost
        self._rank, self._ranks = rank, range(workers)
        self._meetings = 0

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
