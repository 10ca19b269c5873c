"""What LocalSteps computes, written down for all ranks in one place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import gradwire
from gradwire.torch.optimizers.fragment import deal_layers
from runs import Case
from training import loss_of, make_model

Parameters = dict[str, torch.Tensor]
Average = Callable[[str, list[torch.Tensor]], torch.Tensor]
Outer = Callable[[str, torch.Tensor], torch.Tensor]


def mean(name: str, changes: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(changes).mean(0)


def unchanged(name: str, change: torch.Tensor) -> torch.Tensor:
    return change


def nesterov() -> Outer:
    """The momentum of DiLoCo by its formula."""
    velocity: Parameters = {}

    def outer(name: str, change: torch.Tensor) -> torch.Tensor:
        velocity[name] = 0.9 * velocity.get(name, torch.zeros_like(change)) + change
        return 0.7 * (change + 0.9 * velocity[name])

    return outer


def decaying(codec: str, decay: float) -> Average:
    """Every rank's changes go through the codec, with a residual that decays (arXiv:2508.15706)."""
    owed: dict[tuple[str, int], np.ndarray] = {}

    def average(name: str, changes: list[torch.Tensor]) -> torch.Tensor:
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
                loss_of(model, rank, step - 1).backward()
            optimizer.step()
        for index, names in enumerate(fragments):
            if step % every == (index + 1) * every // len(fragments) % every:
                under_way[step + delay] = [
                    (name, average(name, [anchor[name] - m.get_parameter(name) for m in models]))
                    for name in names
                ]
        for name, change in under_way.pop(step, []):
            anchor[name] -= outer(name, change)
            for model in models:
                mine = model.get_parameter(name)
                mine.copy_(mix * mine + (1 - mix) * anchor[name])
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models]
