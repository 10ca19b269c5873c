"""A training whose model uses tensors of modules that it does not call."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.torch import Execution, ServerOptimizer
from gradwire.torch.server.barrier import PartTimes
from runs import adam
from training import digest
from ways import Inner


class Attention(nn.Module):
    """Uses tensors of modules that it does not call, a tied tensor, and a checkpointed module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(16, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 64, bias=False)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.spare = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + checkpoint(self.wide, x, use_reentrant=False)
        x = torch.relu(self.head(x)) + self.frozen(x)
        return self.tied(x).square().mean()


@dataclass(frozen=True)
class Way:
    """How `train_attention` trains. pause: seconds that a worker waits before each step, by rank.
    arguments: further ones of ServerOptimizer."""

    barrier: str = "tensor"
    steps: int = 6
    codec: str = "3lc:s=1.5,coder=rice"
    inner: Inner = adam
    micro_batches: int = 1
    servers: int = 1
    mistake: Callable[[nn.Module, ServerOptimizer], None] | None = None  # after backward
    victim: int = -1  # a worker that dies in the backward pass of step 3
    pause: dict[int, float] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    final: str = ""
    timeline: list[PartTimes] = field(default_factory=list)


def train_attention(way: Way) -> Trained:
    model, trained = Attention(), Trained()
    optimizer = ServerOptimizer(
        way.inner(list(model.parameters())),
        model=model,
        codec=way.codec,
        servers=way.servers,
        barrier=way.barrier,
        execution=Execution(timeout=20.0),
        **way.arguments,
    )
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return trained
    if optimizer.rank == way.victim:
        _die_in_backward(model, at=4)
    while optimizer.version < way.steps:
        time.sleep(way.pause.get(optimizer.rank, 0.0))
        optimizer.zero_grad()
        total = 0.0
        for micro in range(way.micro_batches):
            generator = torch.Generator().manual_seed(
                100 * optimizer.version + 10 * optimizer.rank + micro
            )
            last = micro == way.micro_batches - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                loss = model(torch.randn(8, 12, 16, generator=generator))
                loss.backward()
            total += loss.item()
        if way.mistake is not None:
            way.mistake(model, optimizer)
        optimizer.step()
        trained.losses.append(total)
    trained.timeline = list(optimizer.stats().timeline)
    optimizer.close()
    trained.final = digest(model)
    return trained


def _die_in_backward(model: Attention, at: int) -> None:
    calls: list[None] = []

    def count(gradient: torch.Tensor) -> None:
        calls.append(None)
        if len(calls) == at:
            signal.raise_signal(signal.SIGKILL)

    model.embed.weight.register_hook(count)
