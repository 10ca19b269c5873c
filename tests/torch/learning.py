"""A task that a training by LocalSteps can learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import runs
from ways import Way

WIDTH, CLASSES = 16, 5


def make_student() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()),
        *(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, CLASSES)),
    )


def learn(steps: int, **options: Any) -> tuple[float, int]:
    """The loss on data of no rank, after a training of two ranks on what a fixed network says; the
    bytes that rank 0 has pushed and pulled. options: of LocalSteps."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def loss_on(model: nn.Module, seed: int, samples: int) -> torch.Tensor:
        inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            labels = teacher(inputs).argmax(dim=1)
        return nn.functional.cross_entropy(model(inputs), labels)

    case = runs.Case(
        way=Way("local", options),
        inner=partial(AdamW, lr=3e-3),
        steps=steps,
        after={steps: runs.settle},
        loss=lambda model, rank, step: loss_on(model, 1000 * (1 + rank) + step, 32),
        model=make_student,
    )
    run = runs.run_one(2, case)[0]
    sent = run.stats["push_bytes"] + run.stats["pull_bytes"]
    return loss_on(run.training.model, 7, 2048).item(), sent
