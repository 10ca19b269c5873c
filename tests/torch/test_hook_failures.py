"""Ranks that die, fall silent or are set up differently: an error on every other rank, no hang."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

import jobs
from cluster import Cluster, Died, Failed
from training import Options

WORLD = 3


@pytest.mark.parametrize("victim", range(WORLD))
def test_a_killed_rank_is_named_by_all_others(fragile_cluster: Cluster, victim: int) -> None:
    """Rank 0 also hosts the store in which the others look for the rank that failed."""
    options = Options(steps=1000, state={})
    fragile_cluster.start(WORLD, jobs.train_and_signal, options, victim, 5, signal.SIGKILL)
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    died = time.monotonic()
    assert isinstance(answers[victim], Died)
    for rank, answer in answers.items():
        if rank == victim:
            continue
        assert isinstance(answer, Failed)
        assert f"rank {victim} is gone" in answer.message, answer.trace
        assert "PeerLostError" in answer.message
        assert died - answer.at < 30
    codes = fragile_cluster.close()
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0, 0]


def test_in_a_part_of_the_world_a_rank_keeps_its_name(fragile_cluster: Cluster) -> None:
    """Rank 2 of the world is the group's rank 1."""
    fragile_cluster.start(WORLD, jobs.lose_a_rank_of_a_part, [0, 2], 2, "killed")
    answer = fragile_cluster.collect(range(WORLD), seconds=60)[0]
    assert isinstance(answer, Failed)
    assert "PeerLostError: rank 2 is gone; rank 0, step 4" in answer.message, answer.trace


def test_what_ranks_of_a_part_of_the_world_differ_in_says_which_ranks_they_are(
    fragile_cluster: Cluster,
) -> None:
    fragile_cluster.start(WORLD, jobs.lose_a_rank_of_a_part, [0, 2], 2, "codec")
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    for rank, pair in ((0, "ranks 0 and 2"), (2, "ranks 2 and 0")):
        answer = answers[rank]
        assert isinstance(answer, Failed)
        assert f"PeerMismatchError: {pair} can't exchange" in answer.message, answer.trace


def test_a_warning_of_a_part_of_the_world_says_which_rank_it_is(cluster: Cluster) -> None:
    for rank, warned in enumerate(cluster.run(3, jobs.lose_a_rank_of_a_part, [0, 2], 2, "nan")):
        assert all("the gradient of rank 2 is not finite" in text for text in warned)
        assert len(warned) == (0 if rank == 1 else 1)


def test_a_rank_lost_between_two_steps_is_named(fragile_cluster: Cluster) -> None:
    """Either DDP's broadcast of buffers or the hook notices the loss first."""
    fragile_cluster.start(WORLD, jobs.train_with_buffers_and_lose_a_rank, 1, 4)
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    for rank in (0, 2):
        assert isinstance(answers[rank], Failed)
        assert "rank 1 is gone" in answers[rank].message, answers[rank].trace


def test_a_rank_that_is_about_to_be_gone_is_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(WORLD, jobs.see_pytorchs_error_before_a_rank_is_gone, 1)
    for answer in fragile_cluster.collect([0, 2], seconds=60).values():
        assert "rank 1 is gone" in answer


@pytest.mark.parametrize("victim", [0, 2])
def test_a_silent_rank_is_named(fragile_cluster: Cluster, victim: int) -> None:
    """The rank is stopped, not dead. If it is rank 0, the store does not answer either."""
    options = Options(steps=1000, state={"timeout": 2.0})
    fragile_cluster.start(WORLD, jobs.train_and_signal, options, victim, 5, signal.SIGSTOP)
    others = [rank for rank in range(WORLD) if rank != victim]
    for answer in fragile_cluster.collect(others, seconds=60).values():
        assert isinstance(answer, Failed)
        assert f"rank {victim} sent nothing" in answer.message, answer.trace


def test_a_rank_for_which_the_program_itself_waited_is_named(fragile_cluster: Cluster) -> None:
    """Gloo's timeout names no rank; the ranks that stopped because of it were blamed."""
    fragile_cluster.start(WORLD, jobs.wait_elsewhere_for_a_stopped_rank, 1, 3.0)
    for answer in fragile_cluster.collect([0, 2], seconds=60).values():
        assert isinstance(answer, Failed)
        assert "PeerSilentError: rank 1 sent nothing" in answer.message, answer.trace
        assert "Timed out waiting" in answer.message


SHOWS_ITS_BUCKETS = {"find_unused_parameters": True}  # otherwise rank 0 decides for all
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "codec": ({"codec": "3lc:s=1.75"}, {}, "'codec push 3lc:s=1.75", "'codec push 3lc:s=1.5"),
    "rules": (
        {"codec": "3lc:s=1.5", "exclude": ["conv.*"]},
        {},
        "exclude ['conv.*']",
        "exclude []",
    ),
    "min_numel": ({"codec": "3lc:s=1.5", "min_numel": 9}, {}, "'min_numel 9'", "'min_numel 256'"),
    "exclude_last": ({"codec": "3lc:s=1.5", "exclude_last": 1}, {}, "last 1'", "exclude_last 0'"),
    "start_iter": ({"codec": "3lc:s=1.5", "start_iter": 0}, {}, "'start_iter 0'", "'start_iter 2'"),
    "seed": ({"codec": "3lc:s=1.5", "seed": 1}, {}, "'seed 0'", "'seed 1'"),
    "buckets": ({"codec": "3lc:s=1.5"}, {"bucket_cap_mb": 25}, "'values ", "'values "),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_named(fragile_cluster: Cluster, what: str) -> None:
    """In the first step, which goes raw."""
    state, ddp, *words = DIFFERENT[what]
    usual = Options(
        steps=1, state={"codec": "3lc:s=1.5"}, ddp={"bucket_cap_mb": 0.05} | SHOWS_ITS_BUCKETS
    )
    other = Options(steps=1, state=state, ddp=usual.ddp | ddp)
    fragile_cluster.start(WORLD, jobs.train_unlike, [usual, other, usual])
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    for rank, answer in answers.items():
        assert isinstance(answer, Failed)
        pair = "ranks 1 and 0" if rank == 1 else f"ranks {rank} and 1"
        assert f"PeerMismatchError: {pair} can't exchange" in answer.message, answer.trace
        for word in words:
            assert word in answer.message, (rank, answer.message)
    assert fragile_cluster.close() == [0, 0, 0]
