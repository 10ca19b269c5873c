"""The functions that the ranks of test_live.py run: trainings that log to a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
)
from training import batch, make_model, make_optimizer

STEPS = 5


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


@dataclass
class Logged:
    """What one rank logged. before: `scalars()` before the first step. last: after the last one."""

    written: list[tuple[str, float, int]]
    before: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def log_hook(every: int) -> Logged:
    model, writer = DistributedDataParallel(make_model()), Writer()
    state = GradwireState(codec="3lc", start_iter=1)
    model.register_comm_hook(state, gradwire_hook)
    state.log_to(writer, every=every)
    before = state.scalars()
    take_steps(model, make_optimizer(model))
    state.close()
    return Logged(writer.written, before, state.scalars(), state.stats().as_dict())


def log_sharded() -> Logged:
    model, writer = make_model(), Writer()
    optimizer = ShardedOptimizer(make_optimizer(model), model, codec="int8")
    optimizer.log_to(writer, every=1)
    take_steps(model, optimizer)
    return Logged(writer.written, {}, optimizer.scalars(), optimizer.stats().as_dict())


def log_local_steps(log_every: int) -> Logged:
    model, writer = make_model(), Writer()
    optimizer = LocalSteps(make_optimizer(model), model, codec="int8", every=2)
    optimizer.log_to(writer, every=log_every)
    take_steps(model, optimizer)
    return Logged(writer.written, {}, optimizer.scalars(), optimizer.stats().as_dict())


def log_server() -> Logged:
    model, writer = make_model(), Writer()
    named = model.named_parameters()
    optimizer = ServerOptimizer(make_optimizer(model), codec="int8", named_parameters=named)
    optimizer.log_to(writer, every=1)
    optimizer.connect()
    before = optimizer.scalars()
    if optimizer.is_server:
        optimizer.serve()
    else:
        take_steps(model, optimizer)
        optimizer.close()
    return Logged(writer.written, before, optimizer.scalars(), optimizer.stats().as_dict())


def log_fully_shard() -> Logged:
    model, writer = make_model(), Writer()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    comm = FullyShardComm(model, weights="bf16", start_iter=0)
    comm.log_to(writer, every=1)
    take_steps(model, make_optimizer(model))
    weights = comm.weights_stats()
    assert weights is not None
    stats = comm.stats().as_dict() | {"weights": weights.as_dict()}
    return Logged(writer.written, {}, comm.scalars(), stats)
