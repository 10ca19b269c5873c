"""A training in which one rank's gradient takes values at the edge of float32."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jobs
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.errors import NonFiniteStepWarning
from on_host import device_kernels
from training import batch, make_model

NAME = "second.weight"
STEPS = 5
SPOILT = 2  # the step with the special gradient

# What some elements of the last rank's gradient become, in a step.
SPECIAL: dict[str, dict[int, dict[int, float]]] = {
    "nan": {SPOILT: {3: math.nan}},
    "infinite": {SPOILT: {3: -math.inf}},
    # Step 1 leaves 1.6e38 of element 3 in the residual, which step 2 adds to 3e38.
    "overflow": {1: {0: 3.4e38, 1: -3.4e38, 3: 1.6e38}, SPOILT: {3: 3e38}},
    "large": {SPOILT: {0: 1e38, 1: -1e38, 3: 4e37}},
    "denormal": {SPOILT: dict.fromkeys(range(1000), 1e-41)},
}


@dataclass
class Edge:
    """Seen from one rank; lists have an entry for each step."""

    averaged: list[np.ndarray]  # the average of NAME
    owed: list[jobs.Owed]  # residuals after the step
    skipped: list[bool]
    scales: list[float]  # of the loss, after the step; empty without a gradient scaler
    warnings: list[str]


def train_at_the_edge(special: str, codec: str, scaled: bool, on_device: bool) -> Edge:
    with device_kernels() if on_device else contextlib.nullcontext():
        return _train(special, codec, scaled)


def _train(special: str, codec: str, scaled: bool) -> Edge:
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0)  # huge gradients do not spoil the model
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    ddp = DistributedDataParallel(model)
    state = GradwireState(codec, start_iter=0, scaler=scaler if scaled else None)
    ddp.register_comm_hook(state, gradwire_hook)
    result = Edge([], [], [], [], [])

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        values = SPECIAL[special].get(step, {})
        if rank == dist.get_world_size() - 1 and values:
            gradient = gradient.clone()
            for element, value in values.items():
                gradient.view(-1)[element] = value
        return gradient

    spoilt = model.get_parameter(NAME)
    spoilt.register_hook(spoil)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            inputs, labels = batch(rank, step)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(ddp(inputs), labels)).backward()
            result.averaged.append(jobs.gradients(model)[NAME])
            result.skipped.append(state.last_step()["skipped"])
            if scaled or not result.skipped[-1]:
                scaler.step(optimizer)
            scaler.update()
            result.owed.append(jobs.owed(state))
            if scaled:
                result.scales.append(scaler.get_scale())
    result.warnings = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    return result
