"""SparseLoCo: LocalSteps with sparse 2-bit changes and residuals that decay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import streaming_jobs
from cluster import Cluster
from gradwire.torch import sparse_loco
from optimizer_jobs import INFINITE_NAME
from streaming_jobs import Streamed

CODEC = {"codec": "topk2bit:density=0.05", "exchange": "broadcast"}


@pytest.mark.parametrize("streams", [{}, {"every": 4, "fragments": 2, "delay": 3}])
def test_the_exchanges_are_the_algorithm_written_down(
    cluster: Cluster, streams: dict[str, int]
) -> None:
    """With fragments, the turns of the parameters and the delay are those of streaming."""
    options = {"every": 2, "residual_decay": 0.5, **CODEC, **streams}
    run = Streamed(options, outer="sgd", steps=9)
    trained = cluster.run(3, streaming_jobs.train_each, [run])
    (expected,) = cluster.run(1, streaming_jobs.sparse_loco_by_hand, run, 3)
    for rank, (course,) in enumerate(trained):
        for name, values in course.parameters.items():
            np.testing.assert_allclose(values, expected[rank][name], rtol=1e-4, atol=1e-5)


def test_a_skipped_exchange_does_not_let_residuals_decay(cluster: Cluster) -> None:
    """The second exchange is skipped, because the last rank's gradient of a tensor is infinite: it
    sends nothing of this tensor, whose residual stays as it was."""
    options = {"every": 2, "residual_decay": 0.5, **CODEC}
    runs = [Streamed(options, steps=4, infinite_step=3), Streamed(options, steps=2)]
    skipped, before = cluster.run(2, streaming_jobs.train_each, runs)[1]
    assert skipped.stats["skipped_steps"] == 1
    left, usual = (
        [r["values"] for r in streaming_jobs.residuals(course.saved) if r["name"] == INFINITE_NAME]
        for course in (skipped, before)
    )
    assert len(left) == len(usual) == 1
    assert usual[0].any()
    assert torch.equal(left[0], usual[0])


def test_a_decay_needs_a_codec_with_a_residual(cluster: Cluster) -> None:
    (said,) = cluster.run(
        1,
        streaming_jobs.refusals,
        [
            {"codec": "raw", "residual_decay": 0.9},
            {"codec": "topk2bit", "residual_decay": 0.0},
            {"codec": "topk2bit:ef=off", "residual_decay": 0.9},
        ],
    )
    assert "raw keeps no residual that residual_decay could multiply: take a codec with" in said[0]
    assert "residual_decay is 0.0; a factor above 0, and at most 1, is needed" in said[1]
    assert "topk2bit:ef=off keeps no residual" in said[2]


def test_sparse_loco_learns_as_diloco_does(cluster: Cluster) -> None:
    """It may end with a loss that is 25 % higher. Of the bytes, raw biases and headers
    included, less than a tenth is left."""
    every = {"every": 8}
    first, _ = cluster.run(2, streaming_jobs.learn, "diloco", {**every, "codec": "raw"}, 0)[0]
    usual, raw_bytes = cluster.run(
        2, streaming_jobs.learn, "diloco", {**every, "codec": "raw"}, 400
    )[0]
    loss, sent_bytes = cluster.run(2, streaming_jobs.learn_sparsely, 0.05, 400)[0]
    assert usual < 0.6 * first
    assert loss < 1.25 * usual
    assert 10 * sent_bytes < raw_bytes


def test_the_arguments_are_those_of_the_paper() -> None:
    chosen = sparse_loco(density=0.01, decay=0.9)
    assert chosen["codec"] == "topk2bit:density=0.01"
    assert (chosen["exchange"], chosen["residual_decay"]) == ("broadcast", 0.9)
