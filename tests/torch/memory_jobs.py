"""Measures how much memory a way to train takes, beside the same training without gradwire."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    gradwire_hook,
)
from gradwire.torch.buckets.reduction import ExchangeWork, write_shard
from gradwire.torch.fsdp.legs import ReplacedCollective
from gradwire.torch.fsdp.units import find_units
from gradwire.torch.options import grouped
from processes import status_of
from ways import Program, Training, Way, build

TENSORS, ROWS, COLUMNS = 6, 3072, 1000
VALUES = TENSORS * ROWS * COLUMNS
BUCKET_MB = 16
LARGEST_BUCKET = VALUES // 3  # of DDP: two tensors
_MMAP_THRESHOLD = -3  # of mallopt

Taken = TypeVar("Taken")


class Layer(nn.Module):
    """Adds to a scalar. The gradient of its weights is a constant."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, COLUMNS))
        self.slope = torch.randn(rows, COLUMNS)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        return before + torch.vdot(self.weight.view(-1), self.slope.view(-1))


class Weights(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(rows) for _ in range(TENSORS)))

    def forward(self) -> torch.Tensor:
        total: torch.Tensor = self.layers(torch.zeros((), requires_grad=True))
        return total


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes in memory while `work` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is there now
    work()
    return 1024 * status_of("self", "VmHWM")


def measure(job: Callable[..., Taken], *args: Any) -> Taken:
    """What the job returns, as the bytes that it takes. It runs with a small model before, which
    loads all code."""
    _stay_on_one_processor()
    # Whatever is freed goes back to the system at once, so that it is not there for later use.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)
    torch.manual_seed(7)
    job(Weights(8), *args)
    return job(Weights(ROWS), *args)


def _stay_on_one_processor() -> None:
    """Linux adds up the pages of a process from counts of each processor, and while it looks for
    the peak it leaves out what each of them has not reported yet: up to 31 pages (with more than 16
    processors, up to twice their number). On one processor it leaves out that once."""
    processors = sorted(os.sched_getaffinity(0))
    processor = processors[dist.get_rank() % len(processors)]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {processor})


def _train(forward: Callable[[], torch.Tensor], optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()


def _done(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(values)
    return future


def train_with_hook(
    model: Weights, codec: str, exchange: str, settings: dict[str, Any]
) -> tuple[int, float]:
    """The bytes that the hook takes, and the bytes of a value in the last step's pushes."""
    optimizer = _sgd(list(model.parameters()))

    def train(hook: Any, state: Any) -> None:
        # Without this flag DDP begins with one bucket, and makes new ones later.
        ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, find_unused_parameters=True)
        ddp.register_comm_hook(state, hook)
        _train(ddp, optimizer, 5)

    # Gloo's all-reduce takes memory of its own, so without gradwire nothing is averaged.
    without = peak_of(lambda: train(lambda _, bucket: _done(bucket.buffer()), None))
    state = GradwireState(codec, exchange=exchange, **grouped(settings))
    beyond = peak_of(lambda: train(gradwire_hook, state)) - without
    sent = state.last_step()["push_bits_per_value"] / 8
    dist.barrier()
    state.close()
    return beyond, sent


def train_with(model: Weights, way: Way, steps: int) -> int:
    """The bytes that a way to train takes whose model is a usual one."""

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        value: torch.Tensor = module()
        return value

    alone = Training(Way("alone"), model, _sgd, Program())
    without = peak_of(lambda: alone.run(2, loss))
    alone.optimizer.zero_grad()
    kept = []

    def train() -> None:
        kept.append(build(way, model, _sgd))
        kept[0].run(steps, loss)
        if way.servers:  # one serves until all workers have closed
            kept[0].optimizer.zero_grad()
            kept[0].close()

    beyond = peak_of(train) - without
    dist.barrier()
    kept[0].close()
    return beyond


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def train_fully_sharded(model: Weights, replicas: int, codec: str, settings: dict[str, Any]) -> int:
    """Each layer is a unit, sharded among world_size / replicas ranks."""

    def train(sharded: Weights) -> None:
        _train(sharded, _sgd(list(sharded.parameters())), 2)

    def train_without() -> int:
        plain = _shard(model, replicas)
        _exchange_nothing(plain, gathers="weights" in settings)
        return peak_of(lambda: train(plain))

    without = train_without()
    sharded = _shard(model, replicas)
    comms = []

    def train_with_comm() -> None:
        comms.append(FullyShardComm(sharded, codec, **grouped(settings)))
        train(sharded)

    beyond = peak_of(train_with_comm) - without
    dist.barrier()
    comms[0].close()
    return beyond


def _shard(model: Weights, replicas: int) -> Weights:
    """A copy that fully_shard has sharded."""
    gc.collect()  # the copy before is in cycles
    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))
    if replicas == 1:
        mesh = mesh["shards"]
    sharded = copy.deepcopy(model)
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded


def _exchange_nothing(model: Weights, gathers: bool) -> None:
    """Replaces what FullyShardComm replaces: each rank keeps its own part of a gradient. gathers:
    the all-gather of weights too, which are 0 then."""
    for unit in find_units(model):
        if gathers:
            unit.module.set_custom_all_gather(ReplacedCollective(_gather_nothing))
        if unit.replicas is not None:
            unit.reduce_inside()
            unit.module.set_all_reduce_hook(lambda reduced: None)
            continue
        write = partial(_write_own, unit.shards.rank(), unit.shards.size())
        unit.module.set_custom_reduce_scatter(ReplacedCollective(write))


def _write_own(
    rank: int, size: int, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any
) -> None:
    write_shard(input_tensor, output_tensor, rank, size)


def _gather_nothing(output_tensor: torch.Tensor, **_: Any) -> ExchangeWork:
    return ExchangeWork(_done(output_tensor.zero_()), [output_tensor])
