"""Ranks that publish together: an error of one reaches the others at once."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from folders import FaultyFolder
from gradwire.torch import GroupFolder, loopback
from gradwire.weights import (
    Folder,
    Publisher,
    Shard,
    Subscriber,
    WeightsError,
    prune,
)
from states import assert_same, state_of

State = dict[str, Any]
NAMES = (["weight"], ["bias", "step"])  # which rank 0 and rank 1 publish
PATIENCE = 60.0


def shards_of(rank: int, version: int) -> State:
    return {name: state_of(version)[name] for name in NAMES[rank]}


def publish_all(publishers: list[Publisher], states: list[Any]) -> list[Exception | int]:
    """Each rank's error or version. No rank waits long for another one."""

    def publish(rank: int) -> Exception | int:
        try:
            return publishers[rank].publish(states[rank]).version
        except Exception as error:
            return error

    begin = time.monotonic()
    with ThreadPoolExecutor(len(states)) as pool:
        found = list(pool.map(publish, range(len(states))))
    assert time.monotonic() - begin < PATIENCE / 4
    return found


def make(store: Path | Folder, ranks: int = 2, run: str = "one", **options: Any) -> list[Publisher]:
    return [
        Publisher(store, rank=rank, ranks=ranks, run=run, patience=PATIENCE, **options)
        for rank in range(ranks)
    ]


def half(values: torch.Tensor, at: int, whole: int = 6) -> Shard:
    return Shard(values, (at,), (whole,))


WRONG: dict[str, tuple[list[State], int, str]] = {
    "shards in conflict": (
        [{"w": half(torch.ones(4), 0)}, {"w": half(torch.ones(3), 3)}],
        0,
        "WeightsError: tensor 'w': the parts at .* have elements in common",
    ),
    "what is no tensor": (
        [shards_of(0, 1), {"bias": "x"}],
        1,
        "WeightsError: 'bias' is of type str",
    ),
    "a number that is too large": (
        [shards_of(0, 1), {"bias": torch.tensor([1e30])}],
        1,
        "WeightsError: tensor 'bias': 1 of its 1 values are too large",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_error_of_a_rank_ends_the_waits_of_the_others(tmp_path: Path, kind: str) -> None:
    """And the next version can be published."""
    states, culprit, said = WRONG[kind]
    publishers = make(tmp_path, dtype="float16")
    errors = publish_all(publishers, states)
    assert isinstance(errors[culprit], WeightsError)
    other = errors[1 - culprit]
    assert isinstance(other, WeightsError)
    wanted = f"v000001 was not published, because rank {culprit} got a {said}"
    assert re.match(wanted, str(other)), other
    assert Subscriber(tmp_path).fetch() is None
    assert publish_all(publishers, [shards_of(0, 2), shards_of(1, 2)]) == [1, 1]
    assert [name for name in prune(tmp_path, keep=1) if "failed" in name]
    target: State = {}
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(target)
    assert sorted(target) == ["bias", "step", "weight"]


def test_a_tensor_of_all_ranks_may_be_tied_on_one_of_them(tmp_path: Path) -> None:
    """Its values were said to differ."""
    publishers, target = make(tmp_path), State()
    for version in (1, 2):
        values = torch.arange(4.0) + version
        tied: list[Any] = [{"embed": values, "head": values}, {"head": values.clone()}]
        order = tied if version == 1 else tied[::-1]
        assert publish_all(publishers, order) == [version, version]
        subscriber = Subscriber(tmp_path)
        subscriber.fetch()
        subscriber.apply_(target)
        assert_same(target, tied[0])
    errors = publish_all(publishers, [tied[0], {"head": values + 1}])
    assert "'head' is whole for several ranks, and its values differ" in str(errors[0])


@pytest.mark.parametrize("empty_one", [0, 1])
def test_a_rank_may_hold_nothing_of_a_tensor(tmp_path: Path, empty_one: int) -> None:
    """Its part begins where that of another rank does, whose values were not published."""
    values, nothing = torch.arange(6.0), torch.empty(0, 3)
    states = [{"w": half(values, 0), "zero": Shard(nothing, (0, 0), (0, 3))}] * 2
    states[empty_one] = states[0] | {"w": half(values[:0], 0)}
    assert publish_all(make(tmp_path), states) == [1, 1]
    target = State()
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, {"w": values, "zero": nothing})


def test_a_full_disk_of_a_rank_is_named_by_the_others() -> None:
    class FullFolder(FaultyFolder):
        def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
            if "1of2.safetensors" in name:
                raise OSError(28, "No space left on device", name)
            super().write(name, pieces, only_new)

    first, second = publish_all(make(FullFolder()), [shards_of(0, 1), shards_of(1, 1)])
    assert isinstance(second, OSError)
    with pytest.raises(WeightsError, match=r"rank 1 got a OSError: .*No space left"):
        raise first if isinstance(first, Exception) else AssertionError


@pytest.mark.parametrize("kind", ["folder", "group"])
def test_several_ranks_of_one_process_publish(tmp_path: Path, kind: str) -> None:
    """One thread runs at a time: a rank that waits lets the others write their parts."""

    def run(rank: int) -> None:
        store = tmp_path if kind == "folder" else GroupFolder(source=[0, 1])
        publisher = Publisher(store, rank=min(rank, 1), ranks=2, run="one", patience=5.0)
        subscriber, target = Subscriber(store), State()
        for version in range(1, 4):
            if rank < 2:
                assert publisher.publish(shards_of(rank, version)).version == version
            dist.barrier()
            subscriber.fetch()
            subscriber.apply_(target)
            assert_same(target, state_of(version))
            dist.barrier()
        if isinstance(store, GroupFolder):
            store.close()

    loopback.run(3, run)


def test_errors_of_ranks_of_one_process_are_told() -> None:
    def run(rank: int) -> str:
        with GroupFolder(source=[0, 1]) as store:
            publisher = Publisher(store, rank=rank, ranks=2, run="one", patience=PATIENCE)
            with pytest.raises(WeightsError) as caught:
                publisher.publish({"w": half(torch.ones(4), 2 * rank)})
            return str(caught.value)

    begin = time.monotonic()
    first, second = loopback.run(2, run)
    assert time.monotonic() - begin < PATIENCE / 4
    assert first in second


def test_a_run_that_an_earlier_start_had_is_refused(tmp_path: Path) -> None:
    """A part that is left of its failed attempts could be taken for one of this start."""
    assert publish_all(make(tmp_path), [shards_of(0, 1), shards_of(1, 1)]) == [1, 1]
    for error in publish_all(make(tmp_path), [shards_of(0, 2), shards_of(1, 2)]):
        with pytest.raises(
            WeightsError, match="version 1 is of an earlier start with the same run"
        ):
            raise error if isinstance(error, Exception) else AssertionError
    again = make(tmp_path, run="two")
    assert publish_all(again, [shards_of(0, 2), shards_of(1, 2)]) == [2, 2]
