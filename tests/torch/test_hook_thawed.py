"""A parameter that DistributedDataParallel does not average is named when it is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import GradwireState
from test_hook_models import hooked, step
from training import make_model


def thaw(after: int, deed: str) -> tuple[int, str]:
    """The steps that are taken, and the error. Thaws a layer after so many steps."""
    model, state = make_model(), GradwireState("int8", start_iter=0)
    model.second.requires_grad_(False)
    if deed == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["second.weight", "second.bias"]
        )

    def change(ddp: DistributedDataParallel) -> DistributedDataParallel:
        model.second.requires_grad_(True)
        return hooked(model, state) if deed == "wrapped again" else ddp

    return steps_with(hooked(model, state), after, change)


def steps_with(
    ddp: DistributedDataParallel,
    after: int,
    change: Callable[[DistributedDataParallel], DistributedDataParallel],
) -> tuple[int, str]:
    """The steps of four that are taken, and the error. The change comes after so many."""
    for number in range(4):
        if number == after:
            ddp = change(ddp)
        try:
            step(ddp, number)
        except RuntimeError as error:
            return number, str(error)
    return 4, ""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_parameter_that_is_thawed_later_is_named(cluster: Cluster, after: int) -> None:
    for steps, said in cluster.run(2, thaw, after, "thawed"):
        assert steps == after
        assert "second.weight was frozen, or not there, when DistributedDataParallel" in said
    for deed in ("wrapped again", "ignored"):
        assert cluster.run(2, thaw, after, deed) == [(4, "")] * 2


def put_in(after: int, deed: str) -> tuple[int, str]:
    """The steps that are taken, and the error. Puts a layer in after so many steps."""
    model, state = make_model(), GradwireState("int8", start_iter=0)

    def change(ddp: DistributedDataParallel) -> DistributedDataParallel:
        torch.manual_seed(1)
        if deed == "replaced":
            model.last = nn.Linear(168, 5)
        else:
            model.add_module("last", nn.Sequential(model.last, nn.Linear(5, 5)))
        return ddp

    return steps_with(hooked(model, state), after, change)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("deed", ["replaced", "added"])
def test_a_layer_that_is_put_in_later_is_named(cluster: Cluster, after: int, deed: str) -> None:
    for steps, said in cluster.run(2, put_in, after, deed):
        assert steps == after
        if deed == "replaced" and after == 0:
            assert "that has left the model since" in said
        else:
            assert "or not there, when DistributedDataParallel" in said
        assert "wrap" in said
