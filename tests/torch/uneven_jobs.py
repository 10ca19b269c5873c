"""Ranks that do not step equally often, in every way to train.

Each job returns what this rank was told (None: no error), and the digest of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import finite_sums
from fsdp_jobs import Sharded as ShardedCase
from fsdp_jobs import shard
from gradwire.torch import (
    Execution,
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    outer_nesterov,
)
from gradwire.torch.records.options import grouped
from training import batch, digest, make_model

Told = tuple[str | None, str]
SECONDS = 60.0  # timeout of a rank that waits in vain


def told(run: Callable[[nn.Module], Any]) -> Told:
    model = make_model()
    said = None
    try:
        run(model)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    return said, digest(model) if plain else ""


def local_steps(steps: list[int], extra: list[int], options: dict[str, Any]) -> Told:
    """Each rank takes so many steps, and then synchronizes; one in `extra` also after 3 steps."""
    rank = dist.get_rank()

    def run(model: nn.Module) -> None:
        given: dict[str, Any] = {"outer": outer_nesterov()} if options.get("outer") else {}
        if options.get("on_lost"):
            store = PrefixStore("uneven", _get_default_store())
            given |= {"store": store, "ranks": dist.get_world_size()}
        optimizer = LocalSteps(
            AdamW(model.parameters(), lr=1e-2),
            model,
            codec="int8",
            **grouped({"timeout": SECONDS, **options | given}),
        )
        try:
            for step in range(steps[rank]):
                _step(model, optimizer, step)
                if step == 2 and rank in extra:
                    optimizer.synchronize()
            optimizer.synchronize()
        finally:
            optimizer.close()

    return told(run)


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    inputs, labels = batch(dist.get_rank(), step)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def load_unlike(way: str) -> Told:
    """Rank 0 goes on from its state of step 4, rank 1 from its state of step 6."""
    rank = dist.get_rank()

    def run(model: Any) -> None:
        state: Any
        optimizer: Any
        forward: Any = model
        local = SGD(model.parameters(), lr=0.05)
        if way == "hook":
            forward = DistributedDataParallel(model)
            state, optimizer = GradwireState("int8", execution=Execution(timeout=SECONDS)), local
            forward.register_comm_hook(state, gradwire_hook)
        elif way == "FSDP2":
            forward = shard(model, ShardedCase())
            optimizer = SGD(model.parameters(), lr=0.05)
            state = FullyShardComm(forward, "int8", execution=Execution(timeout=SECONDS))
        elif way == "sharded":
            state = optimizer = ShardedOptimizer(
                local, model, "int8", execution=Execution(timeout=SECONDS)
            )
        else:
            state = optimizer = LocalSteps(
                local, model, every=3, codec="int8", execution=Execution(timeout=SECONDS)
            )
        try:
            saved = None
            for step in range(6):
                _step(forward, optimizer, step)
                if step == (3, 5)[rank]:
                    saved = state.state_dict()
            state.load_state_dict(saved)
            for step in range(6):
                _step(forward, optimizer, step)
        finally:
            state.close()

    return told(run)


def leave_early(way: str) -> Told:
    """Rank 1 closes after 4 steps, and the others go on."""
    rank = dist.get_rank()
    steps = 4 if rank == 1 else 6

    def run(model: nn.Module) -> None:
        local = SGD(model.parameters(), lr=0.05)
        optimizer: Any
        if way == "server":
            optimizer = ServerOptimizer(local, codec="int8", execution=Execution(timeout=SECONDS))
            optimizer.connect()
            if optimizer.is_server:
                optimizer.serve()
                return
        elif way == "QSVRG":
            _qsvrg(steps // 2)
            return
        else:
            make: Any = ShardedOptimizer if way == "sharded" else LocalSteps
            optimizer = make(local, model, codec="int8", execution=Execution(timeout=SECONDS))
        for step in range(steps):
            _step(model, optimizer, step)
        optimizer.close()

    return told(run)


def _qsvrg(epochs: int) -> None:
    chosen = finite_sums.least_squares()
    weight = nn.Parameter(torch.zeros(finite_sums.N))
    optimizer = chosen.optimizer(weight, steps=2, timeout=SECONDS)
    for _ in range(epochs):
        optimizer.epoch()
    optimizer.close()


def join(steps: list[int]) -> Told:
    """DDP's context for ranks with unequal batches."""

    def run(model: nn.Module) -> None:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
        state = GradwireState("int8", start_iter=0, execution=Execution(timeout=SECONDS))
        ddp.register_comm_hook(state, gradwire_hook)
        optimizer = SGD(model.parameters(), lr=0.05)
        with Join([ddp]):
            for step in range(steps[dist.get_rank()]):
                _step(ddp, optimizer, step)
        state.close()

    return told(run)
