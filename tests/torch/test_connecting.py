"""A rank that is gone before gradwire connects: the others name it, and soon."""

from __future__ import annotations

import pytest

import connecting_jobs
from cluster import Cluster, Died, Failed

WORLD = 3
SOON = 25.0  # seconds, on a loaded machine; the timeout is ten times as long
TIMEOUT = 250.0


@pytest.mark.parametrize(
    ("way", "victim", "how"),
    [
        ("hook", 1, "killed"),
        ("hook", 0, "killed"),  # it hosts the store
        ("sharded", 2, "raises"),
        ("local steps", 1, "killed"),
        ("servers", 2, "killed"),
    ],
)
def test_a_rank_that_ended_is_named_at_once(
    fragile_cluster: Cluster, way: str, victim: int, how: str
) -> None:
    fragile_cluster.start(WORLD, connecting_jobs.connect_without, way, victim, how, TIMEOUT)
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    assert isinstance(answers.pop(victim), Failed if how == "raises" else Died)
    for text, seconds in answers.values():
        assert f"PeerLostError: rank {victim} is gone" in text
        assert seconds < SOON


@pytest.mark.parametrize(("way", "victim"), [("hook", 1), ("servers", 2)])
def test_a_rank_that_is_stopped_is_named_after_the_timeout(
    fragile_cluster: Cluster, way: str, victim: int
) -> None:
    fragile_cluster.start(WORLD, connecting_jobs.connect_without, way, victim, "stopped", 3.0)
    others = [rank for rank in range(WORLD) if rank != victim]
    for text, seconds in fragile_cluster.collect(others, seconds=60).values():
        assert f"PeerSilentError: rank {victim} sent nothing" in text
        assert 2.9 < seconds < SOON


def test_a_store_that_does_not_answer_is_no_fault_of_the_others(fragile_cluster: Cluster) -> None:
    """Rank 0 hosts it, and is stopped."""
    fragile_cluster.start(WORLD, connecting_jobs.connect_without, "hook", 0, "stopped", 3.0)
    for text, seconds in fragile_cluster.collect([1, 2], seconds=60).values():
        assert "StoreLostError: the store where the ranks meet, hosted by rank 0" in text
        assert 2.9 < seconds < SOON


def test_a_late_rank_is_awaited(fragile_cluster: Cluster) -> None:
    assert fragile_cluster.run(WORLD, connecting_jobs.connect_late, 2.0) == ["connected"] * WORLD
