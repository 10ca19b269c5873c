"""A store that others prune, or a publisher that others share, meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.weights import Publisher, Subscriber, fold, prune
from gradwire.weights.folder import MemoryFolder
from states import assert_same, state_of

State = dict[str, Any]


class WatchedFolder(MemoryFolder):
    """written, reading: called with the name of each file after and before that."""

    written: Callable[[str], object] = staticmethod(lambda name: None)
    reading: Callable[[str], object] = staticmethod(lambda name: None)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        self.reading(name)
        return super().read(name, begin, end)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        super().write(name, pieces, only_new)
        self.written(name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_anchor_under_way_is_not_pruned(ranks: int) -> None:
    """The publisher waited for its part."""
    store = WatchedFolder()
    publishers = [
        Publisher(store, rank=rank, ranks=ranks, run="one", anchor_every=2, patience=2)
        for rank in range(ranks)
    ]
    removed: list[str] = []

    def tidy(name: str) -> None:
        if name == "v000004.json":
            removed.extend(prune(store, 1))

    store.written = tidy
    with ThreadPoolExecutor(ranks) as pool:
        for time in range(1, 5):
            state = list(state_of(time).items())
            shares = [dict(state[rank::ranks]) for rank in range(ranks)]
            done = pool.map(lambda one, share: one.publish(share), publishers, shares)
            assert [one.version for one in done] == [time] * ranks
    assert "v000001.json" in removed
    target: State = {}
    subscriber = Subscriber(store, patience=0)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state_of(4))
