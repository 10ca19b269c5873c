"""Ranks that do not step equally often end with equal models, or with errors that say so."""

from __future__ import annotations

from typing import Any

import pytest

import uneven_jobs
from cluster import Cluster
from ways import WAYS

PLAIN: dict[str, Any] = {"every": 4}


@pytest.mark.parametrize(
    ("steps", "early", "options"),
    [
        ([10, 9], [], PLAIN),
        ([9, 8], [], PLAIN),  # rank 1 has nothing to send
        ([12, 11], [], PLAIN),  # rank 0 exchanges by itself
        ([9, 10, 11], [], PLAIN),  # the average is that of rank 1
        ([10, 10], [0], PLAIN),
        ([10, 9], [], {"every": 4, "fragments": 2, "delay": 1}),
        ([10, 9], [], {"every": 4, "delay": 4}),
        ([10, 9], [], {"every": 4, "outer": True}),
    ],
)
def test_local_steps_are_compared(
    cluster: Cluster, steps: list[int], early: list[int], options: dict[str, Any]
) -> None:
    ranks = cluster.run(len(steps), uneven_jobs.local_steps, steps, early, options)
    for (said, _), taken in zip(ranks, steps, strict=True):
        assert said is not None, "models differ"
        assert said.startswith("PeerMismatchError")
        assert f"after {3 if early else taken} local steps" in said
        assert "rank 0" in said
        assert "rank 1" in said or "rank 2" in said
    assert any("equally often on all ranks" in str(said) for said, _ in ranks)


def test_members_that_come_and_go_compare_steps_too(cluster: Cluster) -> None:
    options = {"every": 4, "on_lost": "continue"}
    for said, _ in cluster.run(3, uneven_jobs.local_steps, [9, 10, 11], [], options):
        assert said is not None, "models differ"
        assert "the average of all ranks is 2: call step, and synchronize, equally often" in said


def test_equal_steps_end_with_equal_models(cluster: Cluster) -> None:
    ranks = cluster.run(2, uneven_jobs.local_steps, [10, 10], [0, 1], PLAIN)
    assert [said for said, _ in ranks] == [None, None]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("way", ["hook", "FSDP2", "ShardedOptimizer", "LocalSteps"])
def test_states_of_different_steps_are_found(cluster: Cluster, way: str) -> None:
    for said, _ in cluster.run(2, uneven_jobs.load_unlike, way):
        assert said is not None, "they went on"
        assert "PeerMismatchError" in said
        after = ("step 1 after 6", "step 2 after 9")
        steps = after if way == "LocalSteps" else ("step 4", "step 6")
        assert all(f"has '{step}" in said for step in steps)


@pytest.mark.parametrize(
    "way",
    [
        *("ShardedOptimizer", "LocalSteps, every step", "QSVRG", "servers"),
        *("servers, gradients", "servers, by the tensor"),
    ],
)
def test_a_rank_that_leaves_early_is_named(cluster: Cluster, way: str) -> None:
    others = cluster.run(2 + WAYS[way].servers, uneven_jobs.leave_early, way)
    (said, _), (of_early, _), *_ = others
    assert of_early is None
    assert said is not None
    assert "rank 1 is gone" in said or "too few workers are left" in said


def test_the_join_context_of_ddp_ends_with_equal_models(cluster: Cluster) -> None:
    ranks = cluster.run(2, uneven_jobs.join, [5, 3])
    assert [said for said, _ in ranks] == [None, None]
    assert ranks[0] == ranks[1]
