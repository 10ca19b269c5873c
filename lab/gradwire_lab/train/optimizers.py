"""The optimizer of a training, of real parameters or of views of flat vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradwire_lab.train.settings import ADAM, BETAS, TrainSettings
from gradwire_lab.train.settings import SGD as SGD_NAME


def build(
    settings: TrainSettings, matrices: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Optimizer:
    """matrices, vectors: the parameters of two or more dimensions, and of one. AdamW leaves vectors
    undecayed, as is usual for biases and normalisation."""
    rate, decay = settings.learning_rate, settings.weight_decay
    everything = [*matrices, *vectors]
    if settings.optimizer == SGD_NAME:
        return SGD(everything, rate, settings.momentum, weight_decay=decay)
    if settings.optimizer == ADAM:
        return Adam(everything, rate, BETAS, weight_decay=decay)
    groups: list[dict[str, Any]] = [
        {"params": list(matrices)},
        {"params": list(vectors), "weight_decay": 0.0},
    ]
    return AdamW(groups, rate, BETAS, weight_decay=decay)


def clip(gradients: Iterable[Tensor], norm: float, most: float) -> None:
    """Scales the gradients, whose joint norm is `norm`, to a norm of at most `most`; 0: no limit.
    A norm that is not finite changes nothing."""
    if 0.0 < most < norm < torch.inf:
        for gradient in gradients:
            gradient.mul_(most / norm)
