"""The hook with NaN, infinities, denormals and values whose sum with a residual overflows.

With and without a gradient scaler, on the CPU and with the GPU's kernels on the host.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.errors import NonFiniteStepWarning
from on_host import device_kernels
from owed import Owed, gradients, owed
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
    owed: list[Owed]  # residuals after the step
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
            result.averaged.append(gradients(model)[NAME])
            result.skipped.append(state.last_step()["skipped"])
            if scaled or not result.skipped[-1]:
                scaler.step(optimizer)
            scaler.update()
            result.owed.append(owed(state))
            if scaled:
                result.scales.append(scaler.get_scale())
    result.warnings = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    return result


CODECS = ["3lc", "3lc:residual=bf16", "onebit:bucket=64"]
REFUSED = ["nan", "infinite", "overflow"]


def run(cluster: Cluster, special: str, codec: str, scaled: bool, on_device: bool) -> list[Edge]:
    return cluster.run(2, train_at_the_edge, special, codec, scaled, on_device)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("special", list(SPECIAL))
def test_every_rank_skips_what_cannot_be_encoded_and_goes_on(
    cluster: Cluster, special: str, codec: str, scaled: bool
) -> None:
    if special == "overflow" and codec.startswith("onebit"):
        pytest.skip("onebit leaves too little of the value for a sum that overflows")
    ranks = run(cluster, special, codec, scaled, on_device=False)
    refused = special in REFUSED
    for rank in ranks:
        assert rank.skipped == [refused and step == SPOILT for step in range(STEPS)]
        for step in range(STEPS):
            is_nan = np.isnan(rank.averaged[step])
            assert is_nan.all() if rank.skipped[step] else not is_nan.any()
            np.testing.assert_array_equal(rank.averaged[step], ranks[0].averaged[step])
            for kept in (*rank.owed[step]["push"].values(), *rank.owed[step]["pull"].values()):
                assert np.isfinite(kept).all()
        if refused:
            (warning,) = rank.warnings
            assert f"step {SPOILT}: the gradient of rank 1" in warning
            assert f"element 3 of {NAME}" in warning
        else:
            assert rank.warnings == []
        if scaled:
            assert rank.scales == [
                4.0 if refused and step >= SPOILT else 8.0 for step in range(STEPS)
            ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("special", list(SPECIAL))
def test_the_kernels_of_a_gpu_do_the_same(cluster: Cluster, special: str, scaled: bool) -> None:
    for codec in CODECS[:2]:
        on_cpu, on_device = (
            run(cluster, special, codec, scaled, device) for device in (False, True)
        )
        for cpu, device in zip(on_cpu, on_device, strict=True):
            assert (cpu.skipped, cpu.scales) == (device.skipped, device.scales)
            assert cpu.warnings == device.warnings
            # docs/reference/gpu.md: residuals may differ where x + residual overflows.
            same = STEPS if special != "overflow" else SPOILT
            for step in range(same):
                np.testing.assert_array_equal(cpu.averaged[step], device.averaged[step])
                assert cpu.owed[step].keys() == device.owed[step].keys()
                for kind in ("push", "pull"):
                    for name, values in cpu.owed[step][kind].items():
                        np.testing.assert_array_equal(values, device.owed[step][kind][name])
