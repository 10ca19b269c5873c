"""Ranks in one process end with the bits of ranks that are processes, in every way to train."""

from __future__ import annotations

import hashlib
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from cluster import Cluster
from gradwire.torch import loopback, register_backend
from gradwire.torch.errors import CommunicationError, PeerLostError
from ways import Training, Way, build

STEPS = 12
Result = tuple[str, int]  # a digest of the parameters, and the bytes of pushes and pulls
THREE_LC = "3lc:s=1.00,coder=rice"


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(16, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 120), nn.Linear(120, 4)
        )


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(8, 16, generator=draws)
    return functional.cross_entropy(model(inputs), torch.randint(4, (8,), generator=draws))


SHARDED = Way("sharded", {"codec": THREE_LC})
WAYS = {
    "hook": Way("hook", {"codec": THREE_LC}),
    "hook, ring": Way("hook", {"exchange": "ring"}),
    "hook, broadcast of draws": Way("hook", {"exchange": "broadcast", "codec": "qsgd:bits=4"}),
    "hook, terngrad": Way("hook", {"exchange": "terngrad"}),
    "hook, auto": Way("hook", {"codec": "auto:bits=1,every=3", "start_iter": 0}),
    "sharded optimizer": SHARDED,
    "local steps": Way("local", {"codec": THREE_LC}, adam=True),
    "local steps, streaming": Way(
        "local", {"every": 4, "fragments": 2, "delay": 2, "codec": "int8"}, adam=True
    ),
    "servers": Way("server", {"codec": THREE_LC}, servers=2),
    "servers, by tensors": Way("server", {"codec": THREE_LC, "barrier": "tensor"}, servers=1),
    "servers, averages": Way("server", {"codec": "terngrad", "pulls": "gradients"}, servers=1),
    "fsdp": Way("fsdp"),
}


def train(training: Training) -> Result:
    torch.manual_seed(training.rank)  # of dropout: each rank draws for itself
    training.run(STEPS, loss)
    training.settle()
    training.close()
    values = b"".join(value.numpy().tobytes() for value in training.values().values())
    return hashlib.sha256(values).hexdigest(), training.sent_bytes()


def run_way(name: str) -> Result:
    torch.set_num_threads(1)
    return train(build(WAYS[name], Model()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_ranks_in_one_process_end_with_the_bits_of_processes(name: str, cluster: Cluster) -> None:
    apart = cluster.run(4, run_way, name)
    assert loopback.run(4, lambda rank: run_way(name)) == apart
    assert all(sent > 0 for _, sent in apart)


def test_each_rank_has_its_own_draws_and_the_caller_keeps_its_own() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)

    def draw(rank: int) -> list[float]:
        torch.manual_seed(rank)
        drawn = [float(torch.rand(1))]
        dist.barrier()
        return [*drawn, float(torch.rand(1))]

    torch.manual_seed(5)
    runs = loopback.run(3, draw)
    assert torch.equal(torch.rand(3), wanted)
    for rank, drawn in enumerate(runs):
        torch.manual_seed(rank)
        assert drawn == torch.rand(2).tolist()


def train_in_pairs() -> Result:
    """Ranks 0 and 2 train a model, and ranks 1 and 3 another one."""
    pairs = [[0, 2], [1, 3]]
    groups = [dist.new_group(pair) for pair in pairs]
    return train(build(SHARDED, Model(), process_group=groups[dist.get_rank() % 2]))


def test_some_ranks_are_a_group(cluster: Cluster) -> None:
    here = loopback.run(4, lambda rank: train_in_pairs())
    assert here == cluster.run(4, train_in_pairs)
    assert here[0][0] == here[2][0] != here[1][0] == here[3][0]


def sum_over_the_backend() -> list[float]:
    if not hasattr(dist.Backend, "SUMMED"):
        register_backend(min_numel=1, name="summed")
    group = dist.new_group(backend="summed")
    values = torch.randn(300, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(values, group=group)
    dist.barrier(group)
    listed: list[float] = values.tolist()
    return listed


def test_the_backend_sums_in_one_process(cluster: Cluster) -> None:
    here = loopback.run(3, lambda rank: sum_over_the_backend())
    assert here == cluster.run(3, sum_over_the_backend)
    assert here[0] == here[1] == here[2]


def test_a_rank_that_fails_ends_all() -> None:
    said: list[Exception] = []

    def fail(rank: int) -> None:
        training = build(SHARDED, Model())
        if rank == 1:
            raise ZeroDivisionError("rank 1 is at fault")
        try:
            train(training)
        except CommunicationError as error:
            said.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="rank 1 is at fault"):
        loopback.run(3, fail)
    assert len(said) == 2
    assert all(isinstance(error, PeerLostError) and error.ranks == (1,) for error in said)


def test_an_interrupt_ends_all_ranks() -> None:
    """They went on in the background, and changed the caller's draws."""
    taken, main = [0, 0], threading.main_thread().ident
    assert main is not None

    def train_on(rank: int) -> None:
        training = build(SHARDED, Model())
        while taken[rank] < 2000:
            training.step(loss)
            taken[rank] += 1
            if taken == [2, 2]:
                signal.pthread_kill(main, signal.SIGINT)

    # Of a process that a shell has started in the background it is another.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loopback.run(2, train_on)
    finally:
        signal.signal(signal.SIGINT, handler)
    before = list(taken)
    time.sleep(0.1)
    assert taken == before
    assert max(taken) < 2000


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def wait(rank: int) -> None:
        dist.broadcast(torch.zeros(1), src=0) if rank else None

    with pytest.raises(dist.DistBackendError, match=r"ranks \[0\] do not take part"):
        loopback.run(2, wait)
    assert not dist.is_initialized()
