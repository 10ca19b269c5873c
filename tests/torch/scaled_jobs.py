"""Trainings with a gradient scaler, which the ranks of a test cluster run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.errors import NonFiniteStepWarning
from gradwire.torch.options import grouped
from gradwire.torch.stats import ChosenCodec
from owed import Owed, gradients, owed, total_owed
from training import batch, digest, loss_of, make_model, make_optimizer


@dataclass
class Scaled:
    """A training with a gradient scaler, seen from one rank. Lists have an entry for each step."""

    digests: list[str]  # parameters after the step
    scales: list[float]  # of the loss
    own: list[dict[str, np.ndarray]]  # this rank's scaled gradient
    averaged: list[dict[str, np.ndarray]]  # the average that the hook returned
    owed: list[Owed]  # residuals before the step; one more entry after the last
    skipped: list[bool]  # from last_step()
    skipped_steps: int
    warnings: list[str]
    losses: list[float] = field(default_factory=list)
    chosen: list[tuple[ChosenCodec, ...]] = field(default_factory=list)  # before the step


def train_scaled(
    steps: int, infinite_step: int, infinite_name: str, state_options: dict[str, Any]
) -> Scaled:
    """In one step the last rank has an infinite gradient for one parameter."""
    rank = dist.get_rank()
    model = make_model()
    alone = make_model()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = GradwireState(scaler=scaler, **grouped(state_options))
    ddp.register_comm_hook(state, gradwire_hook)
    result = Scaled([], [], [], [], [], [], 0, [])

    def make_infinite(gradient: torch.Tensor) -> torch.Tensor:
        if step == infinite_step and rank == dist.get_world_size() - 1:
            gradient = gradient.clone()
            gradient.view(-1)[3] = float("inf")
        return gradient

    model.get_parameter(infinite_name).register_hook(make_infinite)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            result.scales.append(scaler.get_scale())
            result.owed.append(owed(state))
            result.chosen.append(state.stats().chosen)
            alone.load_state_dict(model.state_dict())
            alone.zero_grad()
            scaler.scale(loss_of(alone, rank, step)).backward()
            result.own.append(gradients(alone))
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, rank, step)).backward()
            result.averaged.append(gradients(model))
            scaler.step(optimizer)
            scaler.update()
            result.digests.append(digest(model))
            result.skipped.append(state.last_step()["skipped"])
        result.owed.append(owed(state))
    result.skipped_steps = state.stats().skipped_steps
    result.warnings = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    return result


def check_nothing_is_lost(ranks: list[Scaled], step: int) -> None:
    """Owed before + mean gradient = owed after + applied, all at one scale."""
    # `owed` was read before the hook noticed the new scale.
    factor = ranks[0].scales[step] / ranks[0].scales[step - 1]
    before = total_owed([rank.owed[step] for rank in ranks])
    after = total_owed([rank.owed[step + 1] for rank in ranks])
    for name, value in before.items():
        mean = np.mean([rank.own[step][name].astype(np.float64) for rank in ranks], axis=0)
        expected = value * factor + mean
        found = after[name] + ranks[0].averaged[step][name]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * abs(expected).max())


def scale_float16(state_options: dict[str, Any]) -> Scaled:
    """A float16 model and a gradient scaler; the optimizer works on float32 copies of its weights.

    Every step uses the same batch, so that the loss falls soon.
    """
    model, master = make_model(torch.float16), make_model()
    optimizer = make_optimizer(master)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = GradwireState(scaler=scaler, **grouped(state_options))
    ddp.register_comm_hook(state, gradwire_hook)
    result = Scaled([], [], [], [], [], [], 0, [])
    inputs, labels = batch(dist.get_rank(), 0)
    for _ in range(60):
        result.scales.append(scaler.get_scale())
        model.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs.half()).float(), labels)
        scaler.scale(loss).backward()
        for wide, narrow in zip(master.parameters(), model.parameters(), strict=True):
            assert narrow.grad is not None
            wide.grad = narrow.grad.float()
        scaler.step(optimizer)
        scaler.update()
        model.load_state_dict(master.state_dict())
        result.losses.append(loss.item())
        result.digests.append(digest(model))
        result.skipped.append(state.last_step()["skipped"])
    return result
