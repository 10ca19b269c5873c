"""Gradients of 16 bits: bfloat16 and float16 models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import jobs
import jobs_half
import scaled_jobs
from cluster import Cluster
from owed import total_owed
from training import Options, Trained, load
from ways import CUT_ONCE

DTYPES = (torch.bfloat16, torch.float16)
CODECS = ("raw", "bf16", "3lc:s=1.0", "terngrad")
WORLD = 2
STEPS = 20


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def trained(request: pytest.FixtureRequest, cluster: Cluster) -> list[list[Trained]]:
    runs = [Options(STEPS, {"codec": codec}, dtype=request.param) for codec in CODECS]
    runs.append(Options(STEPS, None, dtype=request.param))
    return cluster.run(WORLD, jobs.train_each, runs)


def test_replicas_are_equal_and_the_loss_falls(trained: list[list[Trained]]) -> None:
    for codec, first, second in zip((*CODECS, "DDP"), *trained, strict=True):
        assert first.digest == second.digest, codec
        assert np.isfinite(first.losses).all(), codec
    raw, plain = trained[0][0], trained[0][-1]
    np.testing.assert_allclose(raw.losses, plain.losses, rtol=0.05)
    digests = dict(zip(CODECS, (run.digest for run in trained[0]), strict=False))
    is_bfloat16 = raw.stats["dtypes"] == ("bfloat16",)
    assert (digests["raw"] == digests["bf16"]) == is_bfloat16
    assert len(set(digests.values())) == len(CODECS) - is_bfloat16


def test_raw_costs_16_bits_a_value(trained: list[list[Trained]]) -> None:
    for run in trained[0][:-1]:
        raw_step = run.last_steps[0]
        assert raw_step["raw"]
        for bits in (raw_step["push_bits_per_value"], raw_step["pull_bits_per_value"]):
            assert 16 <= bits < 16.5
    raw, _, compressed, _ = (run.stats for run in trained[0][:-1])
    assert 16 <= raw["bits_per_value_push"] < 16.5
    assert 0.9 < raw["ratio"] < 1
    assert compressed["ratio"] > 2
    assert f"({raw['dtypes'][0]})" in trained[0][0].report
    # Tensors that go raw are listed as usual, though their codec has another name.
    assert {t["reason"] for t in compressed["raw_tensors"]} >= {"fewer than two dimensions"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_average_is_rounded_once(cluster: Cluster, dtype: torch.dtype) -> None:
    """Raw in 16 bits: the float32 mean, rounded half to even, on owner and receiver alike."""
    for codec in ("raw", "3lc"):  # 3lc in its first, raw iterations
        ranks = cluster.run(WORLD, jobs_half.average_given, dtype, "noise", {"codec": codec})
        mean = (ranks[0].own.float() + ranks[1].own.float()) / 2
        expected = mean.to(dtype).view(torch.int16)
        assert (expected.float() - mean).any()
        for rank in ranks:
            assert rank.averaged.dtype == dtype
            assert torch.equal(rank.averaged.view(torch.int16), expected)
            assert not rank.warnings


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster, dtype: torch.dtype) -> None:
    state = {"codec": "3lc:s=1.75"}
    runs = [Options(9, state, CUT_ONCE, dtype=dtype), Options(5, state, CUT_ONCE, dtype=dtype)]
    ranks = cluster.run(WORLD, jobs.train_each, runs)
    whole, stopped = ranks[0]
    residuals = [rank[1].residuals for rank in ranks]
    assert residuals[0] is not None
    saved = load(residuals[0])["residuals"]
    assert saved
    assert all(entry["values"].dtype == torch.float32 for entry in saved)
    rest = Options(
        4, state, CUT_ONCE, start=5, residuals=residuals, weights=stopped.weights, dtype=dtype
    )
    for (continued,) in cluster.run(WORLD, jobs.train_each, [rest]):
        assert continued.digest == whole.digest


def test_an_average_beyond_float16_skips_the_step(cluster: Cluster) -> None:
    """3LC sends 1.75 times the largest gradient, which is beyond float16; no gradient is lost."""
    options = {"codec": "3lc:s=1.75", "start_iter": 0}
    ranks = cluster.run(WORLD, jobs_half.average_given, torch.float16, "large", options)
    for rank in ranks:
        assert rank.averaged.isinf().all()
        assert rank.skipped
        assert len(rank.warnings) == 1
        assert "is not finite" in rank.warnings[0]
    owed = total_owed([rank.owed for rank in ranks])
    np.testing.assert_allclose(owed["weight"], 60000.0, rtol=1e-6)


def test_a_gradient_scaler_works_on_float16(cluster: Cluster) -> None:
    """A float16 model; the optimizer works on float32 copies of its weights."""
    first, second = cluster.run(WORLD, scaled_jobs.scale_float16, {"codec": "3lc:s=1.0"})
    assert first.digests == second.digests
    assert first.skipped == second.skipped
    assert any(first.skipped), "the first scale is beyond float16"
    assert not all(first.skipped)
    assert first.scales[-1] < first.scales[0]
    assert np.mean(first.losses[-5:]) < 0.8 * np.mean(first.losses[:5])


@pytest.mark.parametrize("start_iter", [0, 2])
def test_gradients_of_other_dtypes_are_named_by_every_rank(
    fragile_cluster: Cluster, start_iter: int
) -> None:
    """This holds even if nothing goes raw, so that all ranks encode alike."""
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    fragile_cluster.start(3, jobs_half.average_unlike, dtypes, {"start_iter": start_iter})
    for answer in fragile_cluster.collect(range(3), seconds=60).values():
        assert "PeerMismatchError" in answer.message, answer.trace
        assert "rank 1 has 'gradients torch.bfloat16'" in answer.message
        assert "has 'gradients torch.float32'" in answer.message
