"""The model that a state belongs to, copies of both, and parameters that lie in any order."""

from __future__ import annotations

import numpy as np
import pytest

import hook_model_jobs as model_jobs
from cluster import Cluster
from jobs import total_owed
from training import make_model

NAMES = [name for name, _ in make_model().named_parameters()]


def test_a_state_is_of_one_model(cluster: Cluster) -> None:
    for said in cluster.run(2, model_jobs.fold_after_fold):
        assert "this GradwireState averages another model" in said
        assert "give each model a GradwireState of its own" in said


def test_a_state_goes_on_where_its_model_gets_another_ddp(cluster: Cluster) -> None:
    assert cluster.run(2, model_jobs.wrap_again) == [True, True]


@pytest.mark.parametrize(
    ("wraps", "freezes", "given"),
    [(True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_the_model_is_found_by_its_parameters(
    cluster: Cluster, wraps: bool, freezes: bool, given: bool
) -> None:
    """Under a hook around the hook, and where gc.freeze() hides it."""
    (found,) = cluster.run(1, model_jobs.name_parameters, wraps, freezes, given)
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
    (said,) = cluster.run(1, model_jobs.say_why_not, what)
    assert message in said


@pytest.mark.parametrize("how", model_jobs.COPIES)
def test_a_copy_goes_on_as_the_original(cluster: Cluster, how: str) -> None:
    for copy in cluster.run(2, model_jobs.copy_and_go_on, how, 3):
        assert copy.stats.pop("remarks")[-1].startswith("this is a copy that has not averaged yet")
        copy.original_stats.pop("remarks")
        assert copy.stats == copy.original_stats
        assert copy.same_residuals
        assert copy.residuals > 0
        assert copy.same_gradients
        assert copy.same_counts


def test_a_copy_of_a_state_that_has_not_begun_is_a_new_one(cluster: Cluster) -> None:
    for copy in cluster.run(2, model_jobs.copy_and_go_on, "deepcopy", 0):
        assert copy.same_gradients
        assert copy.same_counts
        assert "copy" not in copy.report


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
        ranks = cluster.run(3, model_jobs.turn_memory, in_rows, how, at, ddp, options)
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
    for close, raw in cluster.run(2, model_jobs.average_complex, codec):
        assert close == [True, True, True]
        assert raw == ([] if codec == "raw" else ["values.1"])
