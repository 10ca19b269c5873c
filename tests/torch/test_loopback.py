"""Ranks in one process end with the bits of ranks that are processes, in every way to train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    loopback,
    register_backend,
)
from gradwire.torch.errors import CommunicationError, PeerLostError
from gradwire.torch.options import grouped

STEPS = 12
Result = tuple[str, list[int]]  # a digest of the parameters, and the bytes of pushes and pulls
THREE_LC = "3lc:s=1.00,coder=rice"


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(16, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 120), nn.Linear(120, 4)
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # of dropout: each rank draws for itself
    draws = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(8, 16, generator=draws)
        targets = torch.randint(4, (8,), generator=draws)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def result(model: nn.Module, source: Any) -> Result:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().numpy().tobytes())
    stats = source.stats().as_dict()
    return digest.hexdigest(), [stats[name] for name in ("push_bytes", "pull_bytes")]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def hooked(**options: Any) -> Result:
    model = Model()
    forward = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = GradwireState(**grouped(options))
    forward.register_comm_hook(state, gradwire_hook)
    train(forward, sgd(model))
    state.close()
    return result(model, state)


def sharded(**options: Any) -> Result:
    model = Model()
    optimizer = ShardedOptimizer(sgd(model), model, **grouped(options))
    train(model, optimizer)
    optimizer.close()
    return result(model, optimizer)


def local(**options: Any) -> Result:
    model = Model()
    optimizer = LocalSteps(adamw(model), model, **grouped(options))
    train(model, optimizer)
    optimizer.synchronize()
    optimizer.close()
    stats = optimizer.stats()
    return result(model, stats if hasattr(stats, "stats") else optimizer)


def served(**options: Any) -> Result:
    model = Model()
    optimizer = ServerOptimizer(sgd(model), model=model, **grouped(options))
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
    else:
        train(model, optimizer)
        optimizer.close()
    return result(model, optimizer)


def fully_sharded(**options: Any) -> Result:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    comm = FullyShardComm(model, **grouped(options))
    train(model, sgd(model))
    comm.close()
    return result(model, comm)


WAYS: dict[str, tuple[Callable[..., Result], dict[str, Any]]] = {
    "hook": (hooked, {"codec": THREE_LC}),
    "hook, ring": (hooked, {"exchange": "ring"}),
    "hook, broadcast of draws": (hooked, {"exchange": "broadcast", "codec": "qsgd:bits=4"}),
    "hook, terngrad": (hooked, {"exchange": "terngrad"}),
    "hook, auto": (hooked, {"codec": "auto:bits=1,every=3", "start_iter": 0}),
    "sharded optimizer": (sharded, {"codec": THREE_LC}),
    "local steps": (local, {"codec": THREE_LC}),
    "local steps, streaming": (local, {"every": 4, "fragments": 2, "delay": 2, "codec": "int8"}),
    "servers": (served, {"codec": THREE_LC, "servers": 2}),
    "servers, by tensors": (served, {"codec": THREE_LC, "barrier": "tensor"}),
    "servers, averages": (served, {"codec": "terngrad", "pulls": "gradients"}),
    "fsdp": (fully_sharded, {}),
}


def run_way(name: str) -> Result:
    torch.set_num_threads(1)
    run, options = WAYS[name]
    return run(**options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_ranks_in_one_process_end_with_the_bits_of_processes(name: str, cluster: Cluster) -> None:
    apart = cluster.run(4, run_way, name)
    assert loopback.run(4, lambda rank: run_way(name)) == apart
    assert len({tuple(sent) for _, sent in apart}) > 0
    assert all(sum(sent) > 0 for _, sent in apart)


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
    return sharded(codec=THREE_LC, process_group=groups[dist.get_rank() % 2])


def test_some_ranks_are_a_group(cluster: Cluster) -> None:
    here = loopback.run(4, lambda rank: train_in_pairs())
    assert here == cluster.run(4, train_in_pairs)
    assert here[0][0] == here[2][0] != here[1][0] == here[3][0]


def sum_over_the_backend() -> list[float]:
    if not hasattr(dist.Backend, "GRADWIRE"):
        register_backend(min_numel=1)
    group = dist.new_group(backend="gradwire")
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
        model = Model()
        optimizer = ShardedOptimizer(sgd(model), model)
        if rank == 1:
            raise ZeroDivisionError("rank 1 is at fault")
        try:
            train(model, optimizer)
        except CommunicationError as error:
            said.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="rank 1 is at fault"):
        loopback.run(3, fail)
    assert len(said) == 2
    assert all(isinstance(error, PeerLostError) and error.ranks == (1,) for error in said)


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def wait(rank: int) -> None:
        dist.broadcast(torch.zeros(1), src=0) if rank else None

    with pytest.raises(dist.DistBackendError, match=r"ranks \[0\] do not take part"):
        loopback.run(2, wait)
    assert not dist.is_initialized()
