"""What error feedback owes stays within the bounds of docs/results/error_feedback.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

import error_feedback
import gradwire
import lockstep
from gradwire._core import Exchange, Layout


def test_every_codec_with_feedback_is_measured() -> None:
    takes = {info["name"] for info in gradwire.codecs() if info["error_feedback"]}
    assert takes <= {codec.partition(":")[0] for codec in error_feedback.CODECS}


@pytest.mark.parametrize("gradients", ["constant", "drifting", "heavy", "all", "few"])
def test_what_is_owed_stays_within_the_bound(gradients: str) -> None:
    for codec in error_feedback.CODECS:
        error_feedback.check(error_feedback.measure(codec, "compressor", gradients, 100))
    for way in ("sharded", "ring", "broadcast", "hierarchical", "server"):
        for codec in ("3lc:s=1.75", "onebit", "int8:residual=bf16"):
            error_feedback.check(error_feedback.measure(codec, way, gradients, 30))


def test_a_bound_that_is_exceeded_is_an_error() -> None:
    row = error_feedback.measure("3lc:s=1.75", "compressor", "all", 50)
    with pytest.raises(error_feedback.ExceededError, match="largest"):
        error_feedback.check(row._replace(bound=row.largest / 2))
    with pytest.raises(error_feedback.ExceededError, match="lost"):
        error_feedback.check(row._replace(lost=1))


def test_bounds_follow_from_the_contraction() -> None:
    assert math.isclose(error_feedback.bound_of("3lc:s=1", "compressor"), 1, rel_tol=1e-5)
    assert math.isclose(error_feedback.bound_of("3lc:s=1.75", "compressor"), 7, rel_tol=1e-4)
    assert math.isclose(error_feedback.bound_of("int8", "compressor"), 1 / 253, rel_tol=1e-3)
    assert error_feedback.bound_of("onebit", "sharded") == math.inf


def test_adversaries_add_to_what_is_owed() -> None:
    owed = np.array([3, -1, 0, -4], np.float32)
    sizes = np.array([1, -2, 3, 4], np.float32)
    np.testing.assert_array_equal(error_feedback.raise_debt(owed, sizes, 4), [1, -2, 3, -4])
    np.testing.assert_array_equal(error_feedback.raise_debt(owed, sizes, 1), [0, 0, 0, -4])


def test_a_ring_whose_residuals_grow_is_reported() -> None:
    assert error_feedback.measure("3lc:s=1.75", "ring", "all", 150).reported
    assert not error_feedback.measure("3lc:s=1.75", "sharded", "all", 150).reported


@pytest.mark.parametrize(("codec", "reported"), [("onebit", True), ("onebit:bucket=64", False)])
def test_onebit_with_one_pair_of_means_is_reported(codec: str, reported: bool) -> None:
    """The gradient does not change and has a heavy tail."""
    random = np.random.default_rng(1)
    gradient = random.standard_normal(16384) * np.exp(random.standard_normal(16384))
    layout = Layout([("w", [128, 128])], 2, codec)
    ranks = [Exchange(layout, rank, "sharded") for rank in range(2)]
    for step in range(400):
        lockstep.average(ranks, [gradient.astype(np.float32) for _ in ranks], step)
    found = [one for rank in ranks for one in rank.outgrown_residuals]
    assert bool(found) == reported
    assert all(one["name"] == "w" and one["factor"] > one["limit"] == 100 for one in found)
