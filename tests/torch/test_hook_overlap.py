"""Buckets are exchanged while backward still runs."""

from __future__ import annotations

import pytest

import jobs
from cluster import Cluster
from gradwire.torch import Overlap
from jobs import Timed

LATE = 0.5
SLOW = 1.0


@pytest.fixture(scope="module")
def timed(cluster: Cluster) -> dict[Overlap, list[Timed]]:
    """By rank. Rank 1 begins its step half a second after rank 0."""
    return {
        overlap: cluster.run(2, jobs.time_buckets, overlap, 1, LATE, SLOW)
        for overlap in (Overlap.ON, Overlap.OFF)
    }


def test_buckets_are_done_before_backward_ends(timed: dict[Overlap, list[Timed]]) -> None:
    for rank in timed[Overlap.ON]:
        assert len(rank.done) >= 3
        assert sum(at < rank.backward_ended - SLOW / 4 for at in rank.done) >= 2


def test_the_hook_does_not_wait_for_a_late_rank(timed: dict[Overlap, list[Timed]]) -> None:
    early = timed[Overlap.ON][0]
    assert early.done[0] > LATE / 2, "the first bucket cannot be done before rank 1 has begun"
    assert early.hook_returned[0] < LATE / 2


def test_without_overlap_the_hook_waits(timed: dict[Overlap, list[Timed]]) -> None:
    early = timed[Overlap.OFF][0]
    assert early.hook_returned[0] > LATE / 2
    for done, returned in zip(early.done, early.hook_returned, strict=True):
        assert done <= returned
