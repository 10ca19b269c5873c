"""The model that a state belongs to, copies of both, and parameters that lie in any order."""

from __future__ import annotations

import copy
import gc
import io
import pickle  # pickle: of the test's own objects
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from cluster import Cluster
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.options import grouped
from owed import Owed, gradients, owed, total_owed
from training import batch, make_model
from ways import CUT_ONCE

CODEC = "3lc:s=1.5"


def hooked(model: nn.Module, state: GradwireState) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **CUT_ONCE)
    ddp.register_comm_hook(state, gradwire_hook)
    return ddp


def step(ddp: nn.Module, number: int = 0) -> None:
    ddp.zero_grad()
    inputs, labels = batch(dist.get_rank(), number)
    nn.functional.cross_entropy(ddp(inputs), labels).backward()


def same_owed(one: Owed, other: Owed) -> bool:
    return one.keys() == other.keys() and all(
        one[kind].keys() == other[kind].keys()
        and all(np.array_equal(one[kind][name], other[kind][name]) for name in one[kind])
        for kind in one
    )


# Which model -----------------------------------------------------------------------------------


def fold_after_fold() -> str:
    """What the second model of one state says."""
    state = GradwireState(CODEC)
    ddp = hooked(make_model(), state)
    step(ddp)
    del ddp
    gc.collect()
    ddp = hooked(make_model(), state)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        step(ddp)
    return str(raised.value)


def wrap_again() -> bool:
    """Whether a state whose model gets another DDP owes as one whose model keeps its own."""
    found = []
    for rewraps in (False, True):
        model, state = make_model(), GradwireState(CODEC, start_iter=0)
        ddp = hooked(model, state)
        for number in range(4):
            if number == 2 and rewraps:
                ddp = hooked(model, state)
            step(ddp, number)
        found.append(owed(state))
    return same_owed(*found)


def name_parameters(wraps: bool, freezes: bool, given: bool) -> list[str]:
    """The names of the tensors that a step has sent."""
    ddp = DistributedDataParallel(make_model(), **CUT_ONCE)
    state = GradwireState("int8", start_iter=0, model=ddp if given else None)

    def around(nothing, bucket):  # type: ignore[no-untyped-def] # DDP wants none or evaluated ones
        return gradwire_hook(state, bucket)

    if wraps:
        ddp.register_comm_hook(None, around)
    else:
        ddp.register_comm_hook(state, gradwire_hook)
    if freezes:
        gc.freeze()
    try:
        step(ddp)
    finally:
        gc.unfreeze()
    return [tensor.name for tensor in state.stats().tensors]


def say_why_not(what: str) -> str:
    def attempt() -> None:
        model: nn.Module = nn.Linear(16, 16)
        if what == "not in DDP":
            GradwireState(model=model)
        other = DistributedDataParallel(nn.Linear(16, 16))
        state = GradwireState(model=other if what == "another" else None)
        reducer = "python_reducer" if what == "python_reducer" else True
        with mock.patch("torch._dynamo.config.optimize_ddp", reducer):
            ddp = hooked(model, state)
        ddp(torch.ones(2, 16)).sum().backward()

    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        attempt()
    return str(raised.value)


# Copies ----------------------------------------------------------------------------------------


def _through_file(ddp: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # pickle: of the test's own objects


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": _through_file,
    "AveragedModel": lambda ddp: AveragedModel(ddp).module,
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
}


@dataclass
class Copied:
    """What a copy has before its first step, and whether its next steps are the original's."""

    stats: dict[str, Any]
    original_stats: dict[str, Any]
    same_residuals: bool
    residuals: int
    report: str
    same_gradients: bool
    same_counts: bool


def copy_and_go_on(how: str, steps: int) -> Copied:
    """Copies DDP, with the hook, after so many steps."""
    state = GradwireState(CODEC, start_iter=1)
    ddp = hooked(make_model(), state)
    for number in range(steps):
        step(ddp, number)
    other_ddp = COPIES[how](ddp)
    ((_, other),) = other_ddp._comm_hooks
    stats, report = other.stats().as_dict(), other.stats().report()
    same_residuals = same_owed(owed(state), owed(other))
    count = len(other.state_dict()["residuals"])
    original = state.stats().as_dict()
    other_ddp.register_comm_hook(other, gradwire_hook)
    same = True
    for number in range(steps, steps + 3):
        step(ddp, number)
        step(other_ddp, number)
        ours, its = gradients(ddp), gradients(other_ddp)
        same &= all(np.array_equal(ours[name], its[name]) for name in ours)
    keys = ("steps", "raw_steps", "push_bytes", "pull_bytes", "values")
    counts = [[one.stats().as_dict()[key] for key in keys] for one in (state, other)]
    return Copied(stats, original, same_residuals, count, report, same, counts[0] == counts[1])


# How parameters lie ----------------------------------------------------------------------------


class Given(nn.Module):
    """Its gradients are those that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Parameter(torch.zeros(6, 4, 3, 2, 5))
        self.picture = nn.Parameter(torch.zeros(16, 8, 3, 3))
        self.matrix = nn.Parameter(torch.zeros(24, 40))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        named = self.named_parameters()
        return torch.stack([(parameter * wanted[name]).sum() for name, parameter in named]).sum()

    def lie(self, in_rows: bool) -> None:
        formats = (torch.channels_last_3d, torch.channels_last)
        for parameter, other in zip((self.volume, self.picture), formats, strict=True):
            order = torch.contiguous_format if in_rows else other
            parameter.data = parameter.data.contiguous(memory_format=order)
        matrix = self.matrix.data.contiguous()
        self.matrix.data = matrix if in_rows else matrix.t().contiguous().t()


@dataclass
class Step:
    """A step of one rank. said: the error that ended the training."""

    said: str
    before: Owed
    own: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]
    after: Owed


def turn_memory(
    in_rows: bool, how: str, at: int, ddp_options: dict[str, Any], state_options: dict[str, Any]
) -> list[Step]:
    """Steps of a model of which the parameters come to lie in another order before step `at`. how:
    "in place", "wrapped" in another DDP, or "restarted" with the saved state."""
    model = Given()
    model.lie(in_rows)

    def wrap(state: GradwireState) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **ddp_options)
        ddp.register_comm_hook(state, gradwire_hook)
        return ddp

    state = GradwireState(start_iter=0, **grouped({"min_numel": 16, **state_options}))
    ddp = wrap(state)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps = []
    for number in range(at + 3):
        if number == at:
            model.lie(not in_rows)
            if how == "restarted":
                saved = state.state_dict()
                state = GradwireState(start_iter=0, **grouped({"min_numel": 16, **state_options}))
                state.load_state_dict(saved)
            if how != "in place":
                ddp = wrap(state)
        named = list(model.named_parameters())
        wanted = {name: torch.randn(p.shape, generator=generator) for name, p in named}
        before = owed(state)
        model.zero_grad()
        said = ""
        try:
            ddp(wanted).backward()
        except RuntimeError as error:
            said = str(error)
        own = {name: values.flatten().numpy() for name, values in wanted.items()}
        steps.append(Step(said, before, own, gradients(model), owed(state)))
        if said:
            break
    return steps


def average_complex(codec: str) -> tuple[list[bool], list[str]]:
    """Whether the averages are those of DDP alone, up to the codec's error; and what was sent."""
    torch.manual_seed(3)
    matrix = torch.randn(32, 24, dtype=torch.complex64)
    model = nn.ParameterList([matrix, torch.zeros(24, dtype=torch.complex64), torch.ones(24, 32)])
    alone = copy.deepcopy(model)
    state = GradwireState(codec, start_iter=0)

    class Loss(nn.Module):
        def __init__(self, values: nn.ParameterList) -> None:
            super().__init__()
            self.values = values

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, bias, second = self.values
            return ((x @ first + bias).abs() @ second).sum()

    ddp = DistributedDataParallel(Loss(model))
    ddp.register_comm_hook(state, gradwire_hook)
    inputs = torch.randn(5, 32, dtype=torch.complex64) + dist.get_rank()
    for one in (ddp, DistributedDataParallel(Loss(alone))):
        one(inputs).backward()
    close = []
    for parameter, expected in zip(model, alone, strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        largest = float(expected.grad.abs().max())
        close.append(bool((parameter.grad - expected.grad).abs().max() <= 0.02 * largest))
    return close, [tensor.name for tensor in state.stats().raw_tensors]


NAMES = [name for name, _ in make_model().named_parameters()]


def test_a_state_is_of_one_model(cluster: Cluster) -> None:
    for said in cluster.run(2, fold_after_fold):
        assert "this GradwireState averages another model" in said
        assert "give each model a GradwireState of its own" in said


def test_a_state_goes_on_where_its_model_gets_another_ddp(cluster: Cluster) -> None:
    assert cluster.run(2, wrap_again) == [True, True]


@pytest.mark.parametrize(
    ("wraps", "freezes", "given"),
    [(True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_the_model_is_found_by_its_parameters(
    cluster: Cluster, wraps: bool, freezes: bool, given: bool
) -> None:
    """Under a hook around the hook, and where gc.freeze() hides it."""
    (found,) = cluster.run(1, name_parameters, wraps, freezes, given)
    assert sorted(found) == sorted(NAMES)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "not in DDP",
            "the DistributedDataParallel module whose hook gets this state; this is",
        ),
        ("another", "the module that GradwireState(model=) was given does not have the parameters"),
        ("python_reducer", "optimize_ddp='python_reducer' gives hooks single gradients"),
    ],
)
def test_what_can_not_be_is_said(cluster: Cluster, what: str, message: str) -> None:
    (said,) = cluster.run(1, say_why_not, what)
    assert message in said


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_as_the_original(cluster: Cluster, how: str) -> None:
    for copied in cluster.run(2, copy_and_go_on, how, 3):
        assert copied.stats.pop("remarks")[-1].startswith(
            "this is a copy that has not averaged yet"
        )
        copied.original_stats.pop("remarks")
        assert copied.stats == copied.original_stats
        assert copied.same_residuals
        assert copied.residuals > 0
        assert copied.same_gradients
        assert copied.same_counts


def test_a_copy_of_a_state_that_has_not_begun_is_a_new_one(cluster: Cluster) -> None:
    for copied in cluster.run(2, copy_and_go_on, "deepcopy", 0):
        assert copied.same_gradients
        assert copied.same_counts
        assert "copy" not in copied.report


@pytest.mark.parametrize("how", ["in place", "wrapped", "restarted"])
@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_residuals_stay_with_their_elements(
    cluster: Cluster, how: str, in_rows: bool, at: int
) -> None:
    """In channels_last and transposed, from one step to the next: what was owed and the mean
    gradient are what is owed now and what was applied. Where DDP itself would mix up elements, the
    step is refused."""
    for ddp in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        options = {"codec": "3lc:s=1.5"}
        ranks = cluster.run(3, turn_memory, in_rows, how, at, ddp, options)
        is_mixed = how == "in place" and "gradient_as_bucket_view" not in ddp
        if is_mixed and (at != 1 or ddp):  # DDP makes new buckets after the first step
            for rank in ranks:
                *_, last = rank
                assert len(rank) == at + 1
                assert "lies in memory in another order than when Distributed" in last.said
            continue
        for number, steps in enumerate(zip(*ranks, strict=True)):
            assert not any(step.said for step in steps)
            before = total_owed([step.before for step in steps])
            after = total_owed([step.after for step in steps])
            for name, applied in steps[0].averaged.items():
                mean = np.mean([step.own[name].astype(np.float64) for step in steps], axis=0)
                found, expected = after[name] + applied, before.get(name, 0.0) + mean
                np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"{number} {name}")


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_complex_gradients_are_averaged_as_pairs(cluster: Cluster, codec: str) -> None:
    for close, raw in cluster.run(2, average_complex, codec):
        assert close == [True, True, True]
        assert raw == ([] if codec == "raw" else ["values.1"])
