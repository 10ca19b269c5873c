"""Trainings whose steps leave a part of the model out, in each way that averages gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.torch import outer_nesterov
from training import batch, load, make_model, save
from ways import Way, build

PART = "branch."  # of the parameters' names
USED, BY_ONE, BY_NONE = "used", "by one rank", "by none"
Case = tuple[str, dict[str, Any]]  # kind of a way, options: some are of `train` alone


@dataclass
class Ended:
    """The part's values, what is owed to it, and other values, of a rank after each step; nothing
    on a server."""

    part: list[bytes]
    owed: list[bytes]
    others: list[bytes]
    losses: list[float]


def train_each(cases: list[Case], steps: list[str]) -> list[Ended]:
    return [train(kind, steps, **options) for kind, options in cases]


def train(
    kind: str,
    steps: list[str],
    resumed_at: int | None = None,
    outer: bool = False,
    inner: Callable[..., Optimizer] | None = None,
    **options: Any,
) -> Ended:
    """resumed_at: the state is saved and loaded before this step."""
    ended = Ended([], [], [], [])
    if outer:
        options["outer"] = outer_nesterov()
    if kind == "hook":
        options |= {"start_iter": 0}
    way = Way(kind, options, servers=options.get("servers", 1))
    training = build(way, make_model(), inner or _adamw)
    source = training.source

    def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, step)
        used = steps[step] == USED or (steps[step] == BY_ONE and rank == 0)
        loss = nn.functional.cross_entropy(module(inputs, used), labels)
        ended.losses.append(loss.item())
        return loss

    def note(taken: int) -> None:
        if kind == "server":
            if source.is_server:
                return
            source.synchronize()
        named = list(training.model.named_parameters())
        state = {"residuals": []} if source is None else source.state_dict()
        residuals = state.get("gradwire", state)["residuals"]
        ended.part.append(_bytes([p for name, p in named if name.startswith(PART)]))
        ended.others.append(_bytes([p for name, p in named if not name.startswith(PART)]))
        ended.owed.append(_bytes([r["values"] for r in residuals if r["name"].startswith(PART)]))
        if taken == resumed_at:
            source.load_state_dict(load(save(source.state_dict())))

    training.run(len(steps), loss_of, note)
    training.close()
    return ended


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=2e-3, weight_decay=0.1)


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
