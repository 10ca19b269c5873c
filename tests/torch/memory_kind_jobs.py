"""Tensors that are not simply what lies in their memory, in all ways to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch
from gradwire.torch import GradwireState, LocalSteps, ServerOptimizer, ShardedOptimizer

STEPS = 4


class Negated(nn.Module):
    """Its gradient comes with PyTorch's negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(1)
        return torch.complex(ones, self.w).conj().resolve_conj().conj().imag * x


def gradient_is_negative(x: float) -> bool:
    model = Negated()
    model(torch.tensor([x])).sum().backward()
    assert model.w.grad is not None
    return model.w.grad.is_neg()


def weights_of(way: str) -> list[float]:
    """After each step with the codec raw, from ranks whose gradients are 1 and 2."""
    model = Negated()
    if way == "fsdp":
        fully_shard(model)
        gradwire.torch.FullyShardComm(model, codec="raw", start_iter=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    call: Callable[[torch.Tensor], torch.Tensor] = model
    optimizer: Any = sgd
    if way == "hook":
        call = ddp = DistributedDataParallel(model)
        state = GradwireState("raw", start_iter=0)
        ddp.register_comm_hook(state, gradwire.torch.gradwire_hook)
    elif way == "local":
        optimizer = LocalSteps(sgd, model, every=1, codec="raw")
    elif way == "sharded":
        optimizer = ShardedOptimizer(sgd, model, "raw")
    elif way == "server":
        optimizer = ServerOptimizer(sgd, model=model, codec="raw")
        if optimizer.is_server:
            optimizer.serve()
            return []
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        call(torch.tensor([1.0 + dist.get_rank()])).sum().backward()
        optimizer.step()
        weight: Any = model.w
        found.append(float(weight.full_tensor() if way == "fsdp" else weight))
    if optimizer is not sgd:
        optimizer.close()
    return found


def odd_parameters() -> dict[str, nn.Module]:
    freed = nn.Linear(8, 8)
    freed.weight.data.untyped_storage().resize_(0)
    halved = nn.Linear(8, 8)
    halved.weight.data.untyped_storage().resize_(128)
    with FakeTensorMode():
        fake = nn.Linear(8, 8)
    negative = nn.Linear(8, 8)
    negative.weight = nn.Parameter(torch._neg_view(torch.ones(8, 8)))
    return {"freed": freed, "halved": halved, "fake": fake, "negative": negative}


def odd_buffers() -> dict[str, nn.Module]:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    models: dict[str, nn.Module] = {}
    for kind, buffer in {"freed": freed, "negative": torch._neg_view(torch.ones(8))}.items():
        models[f"buffer {kind}"] = nn.Linear(8, 8)
        models[f"buffer {kind}"].register_buffer("counts", buffer)
    return models


def refusals() -> dict[str, str]:
    """What each optimizer says of each odd parameter or buffer."""
    ways: dict[str, Callable[[Any, nn.Module], object]] = {
        "LocalSteps": LocalSteps,
        "ShardedOptimizer": ShardedOptimizer,
        "ServerOptimizer": lambda inner, model: ServerOptimizer(inner, model=model),
    }
    said = {}
    for kind, model in (odd_parameters() | odd_buffers()).items():
        for way, make in ways.items():
            if way == "ServerOptimizer" and "buffer" in kind:
                continue  # it takes none over here
            try:
                make(torch.optim.SGD(model.parameters(), lr=0.1), model)
                said[f"{way}, {kind}"] = "taken"
            except TypeError as error:
                said[f"{way}, {kind}"] = str(error)
    return said
