"""A rank that is gone before gradwire connects: the others name it, and soon."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster import Cluster, Died, Failed
from ways import Way, build

WAYS = {
    "hook": Way("hook"),
    "sharded": Way("sharded"),
    "local steps": Way("local"),
    "servers": Way("server", servers=1),
}


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    outputs: torch.Tensor = module(torch.ones(4, 8))
    return outputs.sum()


def connect_without(way: str, victim: int, how: str, timeout: float) -> tuple[str, float]:
    """The error of a rank that connects while the victim does not, and the seconds it took."""
    make = partial(build, WAYS[way], nn.Linear(8, 4), timeout=timeout)
    connected_by_ddp = make() if way == "hook" else None
    dist.barrier()
    if dist.get_rank() == victim:
        if how == "raises":
            raise ValueError("the data cannot be read")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start = time.monotonic()
    try:
        (connected_by_ddp or make()).run(1, loss)
    except RuntimeError as error:
        said = error if connected_by_ddp is None else connected_by_ddp.source.explain(error)
        return f"{type(said).__name__}: {said}", time.monotonic() - start
    return "it connected", time.monotonic() - start


def connect_late(seconds: float) -> str:
    """Rank 1 comes after the others have looked for it many times."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
    for _ in range(2):  # the second one has keys of its own in the store
        training = build(WAYS["servers"], nn.Linear(8, 4), timeout=20.0)
        training.optimizer.connect()
        dist.barrier()  # a server that is dropped closes connections from which others still read
    return "connected"


def make_outside(way: str) -> str:
    """The error of rank 0, which is not in the group."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        return ""
    try:
        build(WAYS[way], nn.Linear(8, 4), process_group=group)
    except RuntimeError as error:
        return str(error)
    return "it connected"


@pytest.mark.parametrize("way", ["sharded", "local steps", "servers"])
def test_a_rank_that_is_not_in_the_group_is_told_so(cluster: Cluster, way: str) -> None:
    assert "this rank is not in the process group" in cluster.run(2, make_outside, way)[0]


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
    fragile_cluster.start(WORLD, connect_without, way, victim, how, TIMEOUT)
    answers = fragile_cluster.collect(range(WORLD), seconds=60)
    assert isinstance(answers.pop(victim), Failed if how == "raises" else Died)
    for text, seconds in answers.values():
        assert f"PeerLostError: rank {victim} is gone" in text
        assert seconds < SOON


@pytest.mark.parametrize(("way", "victim"), [("hook", 1), ("servers", 2)])
def test_a_rank_that_is_stopped_is_named_after_the_timeout(
    fragile_cluster: Cluster, way: str, victim: int
) -> None:
    fragile_cluster.start(WORLD, connect_without, way, victim, "stopped", 3.0)
    others = [rank for rank in range(WORLD) if rank != victim]
    for text, seconds in fragile_cluster.collect(others, seconds=60).values():
        assert f"PeerSilentError: rank {victim} sent nothing" in text
        assert 2.9 < seconds < SOON


def test_a_store_that_does_not_answer_is_no_fault_of_the_others(fragile_cluster: Cluster) -> None:
    """Rank 0 hosts it, and is stopped."""
    fragile_cluster.start(WORLD, connect_without, "hook", 0, "stopped", 3.0)
    for text, seconds in fragile_cluster.collect([1, 2], seconds=60).values():
        assert "StoreLostError: the store where the ranks meet, hosted by rank 0" in text
        assert 2.9 < seconds < SOON


def test_a_late_rank_is_awaited(fragile_cluster: Cluster) -> None:
    assert fragile_cluster.run(WORLD, connect_late, 2.0) == ["connected"] * WORLD
