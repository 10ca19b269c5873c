"""A gradient scaler and a gradient that is not finite."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import GradwireState, gradwire_hook
from owed import total_owed
from runs import threads
from scaled_jobs import Scaled, check_nothing_is_lost, train_scaled
from training import loss_of, make_model

WORLD = 3
STEPS = 10
INFINITE = 5
NAME = "second.weight"


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> list[Scaled]:
    options = {"codec": "3lc:s=1.75", "start_iter": 2}
    return cluster.run(WORLD, train_scaled, STEPS, INFINITE, NAME, options)


def test_every_rank_skips_the_same_step(ranks: list[Scaled]) -> None:
    for rank in ranks:
        changed = [a != b for a, b in zip(rank.digests, rank.digests[1:], strict=False)]
        assert changed == [step != INFINITE for step in range(1, STEPS)]
        assert rank.digests == ranks[0].digests
        assert rank.scales[INFINITE + 1] == rank.scales[INFINITE] / 2
        assert rank.skipped == [step == INFINITE for step in range(STEPS)]
        assert rank.skipped_steps == 1


def test_the_bucket_is_nan_on_every_rank(ranks: list[Scaled]) -> None:
    for rank in ranks:
        assert np.isnan(rank.averaged[INFINITE][NAME]).all()
        finite = [name for name, g in rank.averaged[INFINITE].items() if np.isfinite(g).all()]
        assert finite, "other buckets are not touched"
        for name in finite:
            np.testing.assert_array_equal(
                rank.averaged[INFINITE][name], ranks[0].averaged[INFINITE][name]
            )


def test_every_rank_warns_once_and_names_the_element(ranks: list[Scaled]) -> None:
    for rank in ranks:
        assert len(rank.warnings) == 1
        assert f"step {INFINITE}: the gradient of rank {WORLD - 1}" in rank.warnings[0]
        assert f"element 3 of {NAME}" in rank.warnings[0]


def test_what_was_sent_in_the_skipped_step_is_owed_again(ranks: list[Scaled]) -> None:
    """No rank applied the step, so the residuals must hold all its finite gradients, once."""
    before = total_owed([rank.owed[INFINITE] for rank in ranks])
    after = total_owed([rank.owed[INFINITE + 1] for rank in ranks])
    checked = 0
    for name in before:
        if np.isnan(ranks[0].averaged[INFINITE][name]).any():
            continue
        checked += 1
        mean = np.mean([rank.own[INFINITE][name].astype(np.float64) for rank in ranks], axis=0)
        expected = before[name] + mean
        np.testing.assert_allclose(
            after[name], expected, rtol=1e-4, atol=1e-4 * abs(expected).max()
        )
    assert checked


def test_the_residuals_of_the_non_finite_bucket_are_kept(ranks: list[Scaled]) -> None:
    for rank in ranks[:-1]:  # their finite gradients are added to their residuals
        before, after = rank.owed[INFINITE]["push"], rank.owed[INFINITE + 1]["push"]
        place = before[NAME] != 0
        assert place.any()
        expected = (before[NAME] + rank.own[INFINITE][NAME][: before[NAME].size])[place]
        np.testing.assert_allclose(
            after[NAME][place], expected, rtol=1e-4, atol=1e-4 * abs(expected).max()
        )
    last = ranks[-1]
    np.testing.assert_array_equal(
        last.owed[INFINITE]["push"][NAME], last.owed[INFINITE + 1]["push"][NAME]
    )
    for rank in ranks:
        if NAME in rank.owed[INFINITE]["pull"]:
            np.testing.assert_array_equal(
                rank.owed[INFINITE]["pull"][NAME], rank.owed[INFINITE + 1]["pull"][NAME]
            )


def test_residuals_follow_the_scale(ranks: list[Scaled]) -> None:
    grown = 0
    for step in range(2, STEPS):
        if step == INFINITE:
            continue
        grown += ranks[0].scales[step] > ranks[0].scales[step - 1]
        check_nothing_is_lost(ranks, step)
    assert grown, "the scale must have grown at least once"


@pytest.mark.parametrize(("saved", "loaded"), [(1024.0, None), (None, 1024.0), (1024.0, 4.0)])
def test_residuals_of_a_state_follow_the_scale(saved: float | None, loaded: float | None) -> None:
    """Where one of the trainings had no scaler, they were taken as they were."""

    def train(scale: float | None, state: dict[str, Any] | None = None) -> list[Any]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", scale) if scale else None
        hooked = GradwireState("3lc:s=1.75", start_iter=0, scaler=scaler)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        ddp.register_comm_hook(hooked, gradwire_hook)
        if state is not None:
            hooked.load_state_dict(state)
        factor = scale or 1.0
        for step in range(3):
            model.zero_grad()
            (loss_of(ddp, dist.get_rank(), step) * factor).backward()
        last = [p.grad / factor for p in model.parameters() if p.grad is not None]
        return [hooked.state_dict(), last]

    def go_on(rank: int) -> None:
        state, _ = train(saved)
        (_, same), (_, other) = train(saved, state), train(loaded, state)
        for one, another in zip(same, other, strict=True):
            torch.testing.assert_close(one, another)

    threads(2, go_on)


def test_a_copy_follows_the_scaler_of_the_program() -> None:
    def scale_later(rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", 1024.0)
        state = GradwireState("3lc", start_iter=0, scaler=scaler)
        copied = copy.deepcopy({"states": [state, state]})["states"]
        assert copied[0] is copied[1]
        ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
        ddp.register_comm_hook(copied[0], gradwire_hook)
        scaler.scale(loss_of(ddp, rank, 0))
        scaler.update(512.0)
        scaler.scale(loss_of(ddp, rank, 0)).backward()
        assert copied[0].state_dict()["loss_scale"] == 512.0

    threads(2, scale_later)


def test_a_bucket_without_residuals_skips_the_step_too(cluster: Cluster) -> None:
    """NaN passes through a raw bucket; values of other buckets still go back into residuals."""
    options = {"codec": "3lc:s=1.75", "start_iter": 2, "exclude": [NAME]}
    ranks: list[Scaled] = cluster.run(WORLD, train_scaled, STEPS, INFINITE, NAME, options)
    for rank in ranks:
        assert rank.skipped_steps == 1
        assert len(rank.warnings) == 1
        assert NAME in rank.warnings[0]
    before = total_owed([rank.owed[INFINITE] for rank in ranks])
    after = total_owed([rank.owed[INFINITE + 1] for rank in ranks])
    assert any(np.abs(after[name]).sum() > np.abs(before[name]).sum() for name in before)
