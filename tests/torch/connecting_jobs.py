"""A rank that is gone before gradwire connects."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    Execution,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
)


def _hook(model: nn.Module, timeout: float) -> Callable[[], None]:
    ddp = DistributedDataParallel(model)
    state = GradwireState(execution=Execution(timeout=timeout))
    ddp.register_comm_hook(state, gradwire_hook)

    def connect() -> None:
        try:
            ddp(torch.ones(4, 8)).sum().backward()
        except RuntimeError as error:
            raise state.explain(error) from error

    return connect


def _sharded(model: nn.Module, timeout: float) -> Callable[[], None]:
    def connect() -> None:
        optimizer = ShardedOptimizer(_sgd(model), model, execution=Execution(timeout=timeout))
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    return connect


def _local_steps(model: nn.Module, timeout: float) -> Callable[[], None]:
    return lambda: LocalSteps(
        _sgd(model), model, every=1, execution=Execution(timeout=timeout)
    ).synchronize()


def _servers(model: nn.Module, timeout: float) -> Callable[[], None]:
    return lambda: ServerOptimizer(
        _sgd(model), model=model, execution=Execution(timeout=timeout)
    ).connect()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


WAYS = {"hook": _hook, "sharded": _sharded, "local steps": _local_steps, "servers": _servers}


def connect_without(way: str, victim: int, how: str, timeout: float) -> tuple[str, float]:
    """The error of a rank that connects while the victim does not, and the seconds it took."""
    connect = WAYS[way](nn.Linear(8, 4), timeout)
    dist.barrier()
    if dist.get_rank() == victim:
        if how == "raises":
            raise ValueError("the data cannot be read")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start = time.monotonic()
    try:
        connect()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "it connected", time.monotonic() - start


def connect_late(seconds: float) -> str:
    """Rank 1 comes after the others have looked for it many times."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
    for _ in range(2):  # the second one has keys of its own in the store
        model = nn.Linear(8, 4)
        optimizer = ServerOptimizer(_sgd(model), model=model, execution=Execution(timeout=20.0))
        optimizer.connect()
        dist.barrier()  # a server that is dropped closes connections from which others still read
    return "connected"
