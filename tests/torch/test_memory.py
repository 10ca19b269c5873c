"""The memory that docs/reference/exchanges.md says, beside a training without gradwire."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import memory_jobs as jobs
from cluster import Cluster
from ways import Way

RANKS = 3

pytestmark = [
    pytest.mark.without_sanitizers,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux counts"
    ),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    """Processes of their own: the jobs change how memory is allocated."""
    cluster = Cluster(RANKS)
    yield cluster
    cluster.close()


def rooms(values: float, size: float) -> float:
    """For the packets of all peers."""
    return (RANKS - 1) / RANKS * values * size


INT8 = {"codec": "int8"}
N, B, T = jobs.VALUES, jobs.LARGEST_BUCKET, jobs.VALUES // jobs.TENSORS
TERNGRAD = N * (0.25 * 2 + 0.375 + 0.25 + 1) / 3
# In a bucket of two tensors it owns a piece of each, and draws one after the other.
LESS_ON_RANK_1 = 5 / 6 * N * 0.25 / 3 / 2
A_PEER = 100e3  # bytes of its connection
FROM_THE_START = {"start_iter": 0}
# What a bucket's packets take is named last.
HOOKS: dict[str, Any] = {
    "sharded": ("int8", "sharded", FROM_THE_START, N * (4 + 1), rooms(B, 1)),
    "first iterations raw": ("int8", "sharded", {}, N * (4 + 1), rooms(B, 4)),
    "bfloat16 residual": (
        *("3lc:coder=none,residual=bf16", "sharded", FROM_THE_START),
        N * (2 + 0.2),
        rooms(B, 0.2),
    ),
    "no residual": ("qsgd:bits=4", "sharded", FROM_THE_START, N * 0.5, rooms(B, 0.5)),
    # Of every peer comes the whole bucket.
    "broadcast": ("int8", "broadcast", FROM_THE_START, N * (4 + 1), (RANKS - 1) * B),
    "ring": ("int8", "ring", FROM_THE_START, N * (4 + 1 + 1 / 3), B / 3),
    "terngrad": ("terngrad", "terngrad", FROM_THE_START, TERNGRAD, rooms(B, 0.375), LESS_ON_RANK_1),
    "hierarchical": (
        *("int8", "hierarchical:ranks=1", FROM_THE_START),
        N * (4 + 1),
        rooms(B, 1),
    ),
}


@pytest.mark.parametrize("way", HOOKS)
def test_the_hook(ranks: Cluster, way: str) -> None:
    codec, exchange, settings, own, room, *less = HOOKS[way]
    expected = own + room
    taken = ranks.run(RANKS, jobs.measure, jobs.train_with_hook, codec, exchange, settings)
    check([each for each, _ in taken], [expected, expected - sum(less), expected], 2 * room)


@pytest.mark.parametrize(
    ("codec", "residual"), [("3lc", 4), ("3lc:coder=rice", 4), ("qsgd:bits=4,coder=elias", 0)]
)
def test_a_packet_has_the_bytes_that_a_coder_sends(
    ranks: Cluster, codec: str, residual: int
) -> None:
    taken = ranks.run(RANKS, jobs.measure, jobs.train_with_hook, codec, "sharded", FROM_THE_START)
    expected = [N * (residual + b) + rooms(B, b) for _, b in taken]
    check([each for each, _ in taken], expected, 2 * max(rooms(B, b) for _, b in taken))


def test_sharded_optimizer(ranks: Cluster) -> None:
    taken = ranks.run(RANKS, jobs.measure, jobs.train_with, Way("sharded", INT8), 3)
    check(taken, [N * (4 + 4 + 1 + 8 / RANKS) + rooms(N, 1)] * RANKS)


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
LOCAL_STEPS: dict[str, Any] = {
    "plain": ({"every": 2}, N * (8 + 4 + 1) + rooms(N, 1)),
    "outer optimizer": ({"every": 2, "outer": NESTEROV}, N * (8 + 4 + 4 + 1) + rooms(N, 1) + 4 * T),
    "fragments": (
        {"every": 6, "fragments": 3, "delay": 1, "outer": NESTEROV},
        N * (8 + 4 + 4 + 1) + rooms(N / 3, 1) + 4 * T,
    ),
}


@pytest.mark.parametrize("way", LOCAL_STEPS)
def test_local_steps(ranks: Cluster, way: str) -> None:
    settings, expected = LOCAL_STEPS[way]
    chosen = Way("local", INT8 | settings)
    taken = ranks.run(RANKS, jobs.measure, jobs.train_with, chosen, 9)
    check(taken, [expected] * RANKS)


# A unit has one tensor. Of a second unit in flight the part of the others is beyond PyTorch's own.
FULLY_SHARDED = N * 4 + rooms(N, 1) + rooms(T, 1) + rooms(T, 4)
FULLY_SHARD: dict[str, Any] = {
    "fsdp": (1, {}, FULLY_SHARDED),
    "weights": (1, {"weights": "int8"}, FULLY_SHARDED + N / RANKS + rooms(T, 1)),
    "hsdp": (RANKS, {}, N * (4 + 1) + rooms(T, 1)),
}


@pytest.mark.parametrize("way", FULLY_SHARD)
def test_fully_shard_comm(ranks: Cluster, way: str) -> None:
    replicas, settings, expected = FULLY_SHARD[way]
    settings = FROM_THE_START | settings
    taken = ranks.run(RANKS, jobs.measure, jobs.train_fully_sharded, replicas, "int8", settings)
    # A rank that waits for the weights of the next unit has fewer bytes than the others.
    check([max(taken)], [expected])


def test_server_and_workers(ranks: Cluster) -> None:
    taken = ranks.run(RANKS, jobs.measure, jobs.train_with, Way("server", INT8, servers=1), 3)
    workers = RANKS - 1
    server = N * (8 + 4 + (3 + 2 * workers)) + 4 * N / jobs.TENSORS
    check(taken, [N * (4 + 4 + 4)] * workers + [server])


def check(taken: list[int], expected: list[float], ahead: float = 0.0) -> None:
    """Within 5 %. What does not grow with the model is small beside it. ahead: what peers may send
    of the next bucket takes so much more, if they do."""
    connections = (RANKS - 1) * A_PEER
    for one, least in zip(taken, expected, strict=True):
        most = least + ahead
        assert 0.95 * (least + connections) <= one <= 1.05 * (most + connections), (taken, expected)
