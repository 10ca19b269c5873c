"""FullyShardComm gives the bits of FSDP2 without it where steps leave parameters out."""

from __future__ import annotations

import pytest

import fsdp_situations
from cluster import Cluster
from fsdp_situations import SITUATIONS

FSDP = list(SITUATIONS)
HSDP = [
    "unused output",
    "unused tower, step in backward",
    "unused tower, bfloat16",
    "accumulated",
    "accumulated in part",
    "non-root",
    "thawing",
]


@pytest.mark.parametrize(("world", "names"), [(2, FSDP), (4, HSDP)], ids=["fsdp", "hsdp"])
def test_gradients_are_missing_where_fsdp2_has_none(
    cluster: Cluster, world: int, names: list[str]
) -> None:
    """raw gives the bits of FSDP2 without gradwire, and int8 learns alike."""
    codecs = [None, "raw", "int8"]
    for rank in cluster.run(world, fsdp_situations.train_each, names, codecs, world == 4):
        for name, (theirs, raw, int8) in zip(names, rank, strict=True):
            assert raw.gradients == theirs.gradients, name
            assert raw.losses == theirs.losses, name
            assert raw.shards == theirs.shards, name
            assert int8.gradients == theirs.gradients, name
            assert int8.losses == pytest.approx(theirs.losses, rel=0.1), name


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_gradient_of_some_ranks_is_zeros_on_the_others(cluster: Cluster, hybrid: bool) -> None:
    for theirs, raw, int8 in cluster.run(4, fsdp_situations.by_rank_each, hybrid):
        assert raw.gradients == int8.gradients
        for step, names in enumerate(raw.gradients):
            assert ("spare.weight" in names) == (step % 2 == 1)
        # There, zeros move a parameter that no rank uses.
        assert raw.losses[:3] == pytest.approx(theirs.losses[:3], rel=1e-3)
        assert int8.losses == pytest.approx(raw.losses, rel=0.1)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_owed_waits_while_no_rank_has_a_gradient(cluster: Cluster, hybrid: bool) -> None:
    for first, second, third in cluster.run(4, fsdp_situations.owed_over_unused_steps, hybrid):
        unused = [name for name in first if name.startswith(("right", "head"))]
        assert any(any(first[name]) for name in unused)
        for name in first:
            assert (first[name] == second[name]) == (name in unused), name
        assert third == second, "a skipped step changes nothing"


MADE = [(before, reshard) for before in fsdp_situations.BEFORE for reshard in (True, False, 2)]


def test_it_may_be_made_whatever_the_model_did_before(cluster: Cluster) -> None:
    for rank in cluster.run(2, fsdp_situations.make_after_each, MADE):
        for (before, _), (theirs, raw, int8) in zip(MADE, rank, strict=True):
            names = "scale, embedding.weight"
            names += "" if before == "replaced" else ", tower.weight, tower.bias"
            assert raw[0].startswith(names), before
            assert raw[1] == theirs[1], before
            assert int8[1] == pytest.approx(theirs[1], rel=0.02), before


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_second_one_is_refused(cluster: Cluster, hybrid: bool) -> None:
    for message in cluster.run(2, fsdp_situations.make_twice, hybrid):
        assert message.startswith("ValueError: the model has a FullyShardComm already")
