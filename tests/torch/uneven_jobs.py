"""Ranks that do not step equally often, in every way to train.

Each job returns what this rank was told (None: no error), and the digest of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import AdamW

from gradwire.torch import outer_nesterov
from training import digest, loss_of, make_model
from ways import Way, build

Told = tuple[str | None, str]
SECONDS = 60.0  # timeout of a rank that waits in vain
OPTIONS: dict[str, Any] = {"codec": "int8", "timeout": SECONDS}


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
        outer = {"outer": outer_nesterov()} if options.get("outer") else {}
        way = Way("local", options | outer)
        training = build(way, model, lambda p: AdamW(p, lr=1e-2), **OPTIONS)
        try:
            for step in range(steps[rank]):
                training.step(loss_of)
                if step == 2 and rank in extra:
                    training.settle()
            training.settle()
        finally:
            training.close()

    return told(run)


def load_unlike(way: str) -> Told:
    """Rank 0 goes on from its state of step 4, rank 1 from its state of step 6."""

    def run(model: nn.Module) -> None:
        options = OPTIONS | ({"every": 3} if way == "LocalSteps" else {})
        training = build(way, model, **options)
        try:
            training.run((4, 6)[dist.get_rank()], loss_of)
            saved = training.source.state_dict()
            training.run((2, 0)[dist.get_rank()], loss_of)
            training.source.load_state_dict(saved)
            training.run(6, loss_of)
        finally:
            training.close()

    return told(run)


def leave_early(way: str) -> Told:
    """Rank 1 closes after 4 steps, and the others go on."""

    def run(model: nn.Module) -> None:
        options: dict[str, Any] = {} if way == "QSVRG" else {"codec": "int8"}
        training = build(way, model, timeout=SECONDS, **options)
        training.run(4 if dist.get_rank() == 1 else 6, loss_of)
        training.close()

    return told(run)


def join(steps: list[int]) -> Told:
    """DDP's context for ranks with unequal batches."""

    def run(model: nn.Module) -> None:
        training = build("hook", model, start_iter=0, **OPTIONS)
        with Join([training.module]):
            training.run(steps[dist.get_rank()], loss_of)
        training.close()

    return told(run)
