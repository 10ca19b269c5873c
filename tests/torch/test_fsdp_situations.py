"""FullyShardComm gives the bits of FSDP2 without it where steps leave parameters out."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsdp_situations import (
    BEFORE,
    SITUATIONS,
    WIDTH,
    Situation,
    Trained,
    by_rank,
    make_after,
    make_towers,
    owed_over_unused_steps,
    shard,
    train,
)
from gradwire.torch import FullyShardComm
from runs import said_by, threads

FSDP = list(SITUATIONS)
HSDP = [
    "unused output",
    "unused tower, step in backward",
    "unused tower, bfloat16",
    "accumulated",
    "accumulated in part",
    "non-root",
    "thawing",
    "divided by the shards",
    "divided by the program",
    "hook",
    "hook of one step",
    "late hook",
]


@pytest.mark.parametrize(("world", "names"), [(2, FSDP), (4, HSDP)], ids=["fsdp", "hsdp"])
def test_gradients_are_missing_where_fsdp2_has_none(world: int, names: list[str]) -> None:
    """raw gives the bits of FSDP2 without gradwire, and int8 learns alike."""

    def train_each(name: str, rank: int) -> list[Trained]:
        return [train(SITUATIONS[name], codec, world == 4) for codec in (None, "raw", "int8")]

    for name in names:
        for theirs, raw, int8 in threads(world, partial(train_each, name)):
            assert raw.gradients == theirs.gradients, name
            assert raw.losses == theirs.losses, name
            assert raw.shards == theirs.shards, name
            assert int8.gradients == theirs.gradients, name
            assert int8.losses == pytest.approx(theirs.losses, rel=0.1), name


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_gradient_of_some_ranks_is_zeros_on_the_others(hybrid: bool) -> None:
    def train_each(rank: int) -> list[Trained]:
        """Without gradwire, FSDP2 takes ranks with different gradients only if zeros are asked
        for."""
        theirs = train(Situation(by_rank, zeros=True), None, hybrid)
        return [theirs, *(train(Situation(by_rank), codec, hybrid) for codec in ("raw", "int8"))]

    for theirs, raw, int8 in threads(4, train_each):
        assert raw.gradients == int8.gradients
        for step, names in enumerate(raw.gradients):
            assert ("spare.weight" in names) == (step % 2 == 1)
        # There, zeros move a parameter that no rank uses.
        assert raw.losses[:3] == pytest.approx(theirs.losses[:3], rel=1e-3)
        assert int8.losses == pytest.approx(raw.losses, rel=0.1)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_owed_waits_while_no_rank_has_a_gradient(hybrid: bool) -> None:
    for first, second, third in threads(4, lambda rank: owed_over_unused_steps(hybrid)):
        unused = [name for name in first if name.startswith(("right", "head"))]
        assert any(any(first[name]) for name in unused)
        for name in first:
            assert (first[name] == second[name]) == (name in unused), name
        assert third == second, "a skipped step changes nothing"


MADE = [(before, reshard) for before in BEFORE for reshard in (True, False, 2)]


def test_it_may_be_made_whatever_the_model_did_before() -> None:
    for before, reshard in MADE:
        for theirs, raw, int8 in threads(2, partial(make_after, before, reshard)):
            names = "scale, embedding.weight"
            names += "" if before == "replaced" else ", tower.weight, tower.bias"
            assert raw[0].startswith(names), before
            assert raw[1] == theirs[1], before
            assert int8[1] == pytest.approx(theirs[1], rel=0.02), before


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_second_one_is_refused(hybrid: bool) -> None:
    def make_twice(rank: int) -> str:
        model = shard(make_towers(), hybrid)
        FullyShardComm(model)
        return said_by(lambda: FullyShardComm(model))

    for message in threads(2, make_twice):
        assert message.startswith("ValueError: the model has a FullyShardComm already")


def test_an_evaluation_does_not_count_into_the_step_after_it() -> None:
    """Each forward pass without gradients is a step of the weights."""

    def evaluate_between(rank: int) -> list[tuple[int, int]]:
        model = shard(make_towers(), hybrid=False)
        comm = FullyShardComm(model, "raw", weights="raw", start_iter=0)
        x, noted = torch.ones(6, WIDTH), [(0, 0)]
        for passes in (0, 1, 20):
            with torch.no_grad():
                for _ in range(passes):
                    model(x)
            noted.append(gathered_by(comm))
            model(x)[0].sum().backward()
            noted.append(gathered_by(comm))
        comm.close()
        return noted

    for noted in threads(2, evaluate_between):
        assert [steps for steps, _ in noted] == [0, 0, 1, 2, 3, 23, 24]
        _, _, _, before, after, before_last, last = [sent for _, sent in noted]
        assert last - before_last == after - before


def gathered_by(comm: FullyShardComm) -> tuple[int, int]:
    """Steps of the weights, and bytes of them."""
    stats = comm.weights_stats()
    assert stats is not None
    return stats.steps, stats.pull_bytes
