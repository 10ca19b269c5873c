"""What LocalSteps computes, written down for all ranks in one place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import gradwire
from gradwire.torch.optimizers.fragment import deal_layers
from runs import Case
from training import make_model

Parameters = dict[str, torch.Tensor]
# Of a parameter's name, the changes of all ranks, and the anchor.
Average = Callable[[str, list[torch.Tensor], torch.Tensor], torch.Tensor]
Outer = Callable[[str, torch.Tensor], torch.Tensor]


def mean(name: str, changes: list[torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
    return torch.stack(changes).mean(0)


def unchanged(name: str, change: torch.Tensor) -> torch.Tensor:
    return change


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> Outer:
    """The momentum of DiLoCo by its formula."""
    velocity: Parameters = {}

    def outer(name: str, change: torch.Tensor) -> torch.Tensor:
        velocity[name] = momentum * velocity.get(name, torch.zeros_like(change)) + change
        return lr * (change + momentum * velocity[name])

    return outer


def decaying(codec: str, decay: float) -> Average:
    """Every rank's changes go through the codec, with a residual that decays (arXiv:2508.15706)."""
    owed: dict[tuple[str, int], np.ndarray] = {}

    def average(name: str, changes: list[torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
        decoded = []
        for rank, change in enumerate(changes):
            values = change.numpy().ravel()
            if change.dim() > 1:  # others go raw
                values = values + owed.get((name, rank), 0.0)
                sent = gradwire.decode(
                    gradwire.encode(values.astype(np.float32), f"{codec},ef=off")
                )
                owed[name, rank] = decay * (values - sent)
                values = sent
            decoded.append(torch.tensor(values).view_as(change))
        return torch.stack(decoded).mean(0)

    return average


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of the float32 bits, rounded half to even."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def gated(decay: float = 1.0, shares: list[float] | None = None) -> Average:
    """The ranks send what alters the anchor's rounding to bfloat16 (arXiv:2602.03839).

    Args:
        decay: by which the rest is multiplied.
        shares: gets the share of the values that a rank sends.
    """
    owed: dict[tuple[str, int], np.ndarray] = {}

    def average(name: str, changes: list[torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
        old, total = anchor.numpy(), np.zeros_like(anchor.numpy())
        for rank, change in enumerate(changes):
            values = change.numpy() + owed.get((name, rank), np.float32(0))
            is_sent = to_bfloat16(old) != to_bfloat16(old - values)
            total += np.where(is_sent, values, np.float32(0))
            owed[name, rank] = np.where(is_sent, np.float32(0), values) * np.float32(decay)
            if shares is not None:
                shares.append(is_sent.mean())
        return torch.from_numpy(total / np.float32(len(changes)))

    return average


@torch.no_grad()
def train_by_hand(
    case: Case, world_size: int, average: Average = mean, outer: Outer = unchanged
) -> list[Parameters]:
    """Streaming DiLoCo (arXiv:2501.18512, algorithm 2) in one process. The parameters of each rank
    at the end.

    Args:
        case: what the ranks do.
        world_size: the number of ranks.
        average: of the ranks' changes of a parameter.
        outer: what is subtracted from a parameter's anchor, given the average.
    """
    options = case.way.options
    every, delay, mix = options["every"], options.get("delay", 0), options.get("mix", 0.0)
    models = [make_model() for _ in range(world_size)]
    optimizers = [case.inner(list(model.parameters())) for model in models]
    named = list(models[0].named_parameters())
    dealt = deal_layers(named, options.get("fragments", 1))
    fragments = [[named[place][0] for place in places] for places in dealt]
    anchor = {name: values.detach().clone() for name, values in named}
    under_way: dict[int, list[tuple[str, torch.Tensor]]] = {}  # by the step that applies them
    for step in range(1, case.steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            with torch.enable_grad():
                case.loss(model, rank, step - 1).backward()
            optimizer.step()
        for index, names in enumerate(fragments):
            if (step + delay) % every == (index + 1) * every // len(fragments) % every:
                under_way[step + delay] = [
                    (name, average(name, [old - m.get_parameter(name) for m in models], old))
                    for name in names
                    for old in [anchor[name]]
                ]
        for name, change in under_way.pop(step, []):
            anchor[name] -= outer(name, change)
            for model in models:
                mine = model.get_parameter(name)
                mine.copy_(mix * mine + (1 - mix) * anchor[name])
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models]
