"""What is shared with the user's optimizer and module is looked at again in each step: whatever the
user does to them is followed, or refused in words that name the parameter and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sharing_jobs
import wrapping_jobs
from cluster import Cluster
from gradwire.torch import loopback
from sharing_jobs import FOLLOWED, REFUSED, UNLIKE

# An error of a worker takes the server a second to notice, so they get a few of the deeds.
OF_SERVED = [
    *("nothing", "momentum cycled", "groups replaced", "parametrized", "edited", "frozen"),
    *("model loaded", "model loaded and back", "state loaded into the wrapped optimizer"),
    *("group added", "parameter replaced", "stepped itself", "gradients that have gradients"),
]
OF_REPLICAS = ["nothing", "model loaded", "edited", "scheduler of the wrapped optimizer"]
OF_ALL = [*FOLLOWED, *REFUSED]
DONE: dict[str, list[str]] = {
    "local": OF_ALL,
    "local, every 2": OF_REPLICAS,
    "local, outer": OF_REPLICAS,
    "local, fragments": OF_REPLICAS,
    "sharded": OF_ALL,
    "sharded, owed": OF_REPLICAS,
    "served": OF_SERVED,
    "served by the tensor": [
        *("nothing", "edited", "frozen", "group added", "parameter replaced", "model loaded"),
        *("model loaded and back", "gradients that have gradients"),
    ],
    "served gradients": [
        *("nothing", "edited", "model loaded", "group added", "gradients that have gradients"),
    ],
}


def refusal(way: str, deed: str) -> str | None:
    """Words of the error that must follow; None: there must be none."""
    if deed in REFUSED:
        return REFUSED[deed][1]
    kind = way if (way, deed) in UNLIKE else way.partition(",")[0]
    return UNLIKE.get((kind, deed)) if way != "served gradients" else None


@pytest.mark.parametrize("way", DONE)
def test_each_deed_is_followed_or_refused(cluster: Cluster, way: str) -> None:
    """As the steps are those of the optimizer alone, it shows what follows from a deed."""
    ranks = cluster.run(2, sharing_jobs.do_all, way, DONE[way])
    for deed in DONE[way]:
        for found in (rank[deed] for rank in ranks):
            if found is None:
                continue  # a server
            words = refusal(way, deed)
            if words is not None:
                assert isinstance(found, str), (deed, "nothing was said")
                assert words in found, deed
                continue
            assert not isinstance(found, str), (deed, found)
            expected: Any = sharing_jobs.do(None, deed)
            for mine, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-5, err_msg=deed)


@pytest.mark.parametrize("way", ["local", "sharded", "served"])
def test_a_way_is_not_copied_by_halves(cluster: Cluster, way: str) -> None:
    for rank in cluster.run(2, sharing_jobs.copy_everything, way):
        assert len(rank) == 5
        for name, said in rank.items():
            assert "can't be copied or pickled" in said, name
            assert "save its state_dict()" in said


WRAPPED = {
    ("local", "Sharp"): "nothing",
    ("local", "LBFGS"): "nothing",
    ("local", "ScheduleFree"): "ScheduleFree keeps weights in its state (which train() and eval()",
    ("local", "ASGD"): "ASGD keeps weights in its state ('ax')",
    ("local", "Lookahead"): "Lookahead keeps weights in its state ('slow')",
    ("sharded", "Sharp"): "Sharp computes several gradients in a step",
    ("sharded", "ScheduleFree"): "ScheduleFree keeps weights in its state",
    ("served", "Sharp"): "Sharp computes several gradients in a step",
    ("served", "LBFGS"): "LBFGS computes several gradients in a step",
    ("served", "ScheduleFree"): "ScheduleFree keeps weights in its state",
}


@pytest.mark.parametrize(("way", "optimizer"), WRAPPED)
def test_what_an_optimizer_keeps_or_asks_for_is_given_or_refused(
    cluster: Cluster, way: str, optimizer: str
) -> None:
    for said in cluster.run(2, wrapping_jobs.step_with, way, optimizer):
        assert WRAPPED[way, optimizer] in said


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_each_gradient_of_a_step_is_clipped(cluster: Cluster, clip_norm: float | None) -> None:
    ((wrapped, alone),) = cluster.run(1, wrapping_jobs.clip_sharply, clip_norm)
    for mine, other in zip(wrapped, alone, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_train_and_eval_are_those_of_the_wrapped_optimizer(cluster: Cluster) -> None:
    first, second, _ = cluster.run(3, wrapping_jobs.evaluate_schedule_free)
    for evaluated, other, trained in zip(first[0], second[0], first[1], strict=True):
        np.testing.assert_array_equal(evaluated, other)
        assert not np.array_equal(evaluated, trained)


def test_the_wrapped_adam_is_an_adam_during_and_after_local_steps(cluster: Cluster) -> None:
    (found,) = cluster.run(1, wrapping_jobs.leave_local_steps)
    for when in ("betas 0", "betas 1", "betas 2", "betas after"):
        assert found[when] == (0.9, 0.999), when
    assert "first.weight was changed between two steps" in found["edited"]
    assert found["modes"] == [False, False]


def test_an_outer_optimizer_has_the_anchors(cluster: Cluster) -> None:
    (said,) = cluster.run(1, wrapping_jobs.refusals_of_outer)
    assert "the outer SGD has other parameters than the list" in said[0]
    assert "outer= must return the optimizer that it makes, and returned None" in said[1]
    assert "the outer SGD has other parameters than the list" in said[2]


def test_a_thawed_layer_is_found(cluster: Cluster) -> None:
    said, _ = cluster.run(2, wrapping_jobs.thaw)
    assert "first.weight required no gradient in connect() and requires one now" in said


def test_qsvrg_goes_on_from_the_parameters_as_they_are() -> None:
    (moved, loaded), said = loopback.run(1, lambda rank: wrapping_jobs.move_qsvrg())[0]
    np.testing.assert_array_equal(moved, loaded)
    assert "a QSVRG can't be copied or pickled" in said
