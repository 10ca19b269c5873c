"""Trainings whose steps leave a part of the model out, in each way that averages gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    outer_nesterov,
)
from gradwire.torch.records.options import grouped
from training import batch, load, make_model, save

PART = "branch."  # of the parameters' names
USED, BY_ONE, BY_NONE = "used", "by one rank", "by none"


@dataclass(frozen=True)
class Way:
    """hook, sharded, local, or plain: DDP alone."""

    make: str
    options: dict[str, Any] = field(default_factory=dict)
    outer: bool = False
    adamw: bool = True
    resumed_at: int | None = None  # the state is saved and loaded before this step


@dataclass
class Ended:
    """The part's values, what is owed to it, and other values, of a rank after each step."""

    part: list[bytes]
    owed: list[bytes]
    others: list[bytes]
    losses: list[float]


def train(way: Way, steps: list[str]) -> Ended:
    rank = dist.get_rank()
    model: Any = make_model()
    local: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01
    )
    if way.adamw:
        local = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    forward, optimizer = model, local
    state: Any = None
    if way.make in ("hook", "plain"):
        forward = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.05)
    if way.make == "hook":
        state = GradwireState(start_iter=0, **grouped(way.options))
        forward.register_comm_hook(state, gradwire_hook)
    elif way.make != "plain":
        state, optimizer = _wrap(way, local, model)
    ended = Ended([], [], [], [])
    for step, use in enumerate(steps):
        if step == way.resumed_at:
            saved = load(save(state.state_dict()))
            state.load_state_dict(saved)
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        outputs = forward(inputs, use == USED or (use == BY_ONE and rank == 0))
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        ended.losses.append(loss.item())
        named = list(model.named_parameters())
        ended.part.append(_bytes([p for name, p in named if name.startswith(PART)]))
        ended.others.append(_bytes([p for name, p in named if not name.startswith(PART)]))
        residuals = [] if state is None else state.state_dict()["residuals"]
        owed = [r["values"] for r in residuals if r["name"].startswith(PART)]
        ended.owed.append(_bytes(owed))
    if state is not None:
        state.close()
    return ended


def _wrap(way: Way, local: torch.optim.Optimizer, model: nn.Module) -> tuple[Any, Any]:
    if way.make == "sharded":
        optimizer: Any = ShardedOptimizer(local, model, **grouped(way.options))
    else:
        outer = outer_nesterov() if way.outer else None
        optimizer = LocalSteps(local, model, outer=outer, **grouped(way.options))
    return optimizer, optimizer


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def train_each(ways: list[Way], steps: list[str]) -> list[Ended]:
    return [train(way, steps) for way in ways]


def serve_each(ways: list[dict[str, Any]], steps: list[str]) -> list[Ended]:
    return [serve(options, steps) for options in ways]


def serve(options: dict[str, Any], steps: list[str]) -> Ended:
    """ServerOptimizer; on a server, the results are empty but for the last model."""
    model: Any = make_model()
    local = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    optimizer = ServerOptimizer(
        local,
        named_parameters=model.named_parameters(),
        model=model,
        **grouped({"timeout": 60.0, **options}),
    )
    ended = Ended([], [], [], [])
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return ended
    while optimizer.version < len(steps):  # with backup workers, a slow one skips versions
        step = optimizer.version
        inputs, labels = batch(optimizer.rank, step)
        optimizer.zero_grad()
        outputs = model(
            inputs, steps[step] == USED or (steps[step] == BY_ONE and optimizer.rank == 0)
        )
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        optimizer.synchronize()
        named = list(model.named_parameters())
        ended.part.append(_bytes([p for name, p in named if name.startswith(PART)]))
        ended.others.append(_bytes([p for name, p in named if not name.startswith(PART)]))
        residuals = optimizer.state_dict()["gradwire"]["residuals"]
        owed = [r["values"] for r in residuals if r["name"].startswith(PART)]
        ended.owed.append(_bytes(owed))
    optimizer.close()
    return ended
