"""The hook over TernGrad's exchange: shared scales, sums of trits that nobody decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradwire.torch
import jobs
import jobs_half
import scaled_jobs
from cluster import Cluster
from gradwire._core import Layout
from gradwire.torch.options import grouped
from runs import threads
from training import Options, Trained
from ways import CUT_ONCE

WORLD = 4
TERNGRAD: dict[str, Any] = {"exchange": "terngrad"}
SEGMENTS = Layout([("weight", [96, 96])], WORLD, "terngrad").segments


@pytest.fixture(scope="module")
def averaged(cluster: Cluster) -> list[jobs_half.Averaged]:
    """One bucket of 96 x 96 normal values."""
    options = TERNGRAD | {"start_iter": 0, "seed": 3}
    return cluster.run(WORLD, jobs_half.average_given, torch.float32, "noise", options)


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> list[list[Trained]]:
    """By rank: with the default codec, raw, sharded raw, and with gradients of 16 bits."""
    runs = [
        Options(20, TERNGRAD),
        Options(20, TERNGRAD | {"codec": "raw"}),
        Options(20, {"codec": "raw"}),
        Options(20, TERNGRAD, dtype=torch.bfloat16),
    ]
    return cluster.run(WORLD, jobs.train_each, runs)


def test_the_mean_is_that_of_the_clipped_gradients(averaged: list[jobs_half.Averaged]) -> None:
    result = averaged[0].averaged.numpy().reshape(-1)
    for rank in averaged:
        assert rank.averaged.numpy().tobytes() == result.tobytes()
    for segment in SEGMENTS:
        begin = segment["bucket_offset"]
        place = slice(begin, begin + segment["numel"])
        # Each tensor is clipped, and has its scale, as a whole.
        own = [rank.own.numpy().reshape(-1).astype(np.float64) for rank in averaged]
        whole = [np.clip(x, -2.5 * x.std(), 2.5 * x.std()) for x in own]
        scale = max(np.abs(x).max() for x in whole)
        clipped = [x[place] for x in whole]
        sums = result[place] / (scale / WORLD)
        np.testing.assert_allclose(sums, np.round(sums), atol=0.02)
        assert WORLD < len(np.unique(np.round(sums))) <= 2 * WORLD + 1
        errors = result[place] - np.mean(clipped, axis=0)
        assert np.abs(errors).max() < scale
        variance = np.mean([np.abs(x) * (scale - np.abs(x)) for x in clipped]) / WORLD
        assert abs(errors.mean()) < 4 * np.sqrt(variance / errors.size)
        np.testing.assert_allclose(errors.var(), variance, rtol=0.15)


def test_bytes_are_those_of_the_formula(averaged: list[jobs_half.Averaged]) -> None:
    others = WORLD - 1
    empty = 32  # a packet's header; a shard without values has a packet, too
    frame = 8 + 1 + 2 + 2 + 4  # with two lengths of two bytes and a scale
    scales = empty + 8 + 1 + 1 + 1 + 4 * len(SEGMENTS)
    bits = int(np.ceil(np.log2(2 * WORLD + 1)))
    for rank, own in enumerate(averaged):
        pushed = [s["numel"] for s in SEGMENTS if s["owner"] != rank]
        pulled = [s["numel"] for s in SEGMENTS if s["owner"] == rank]
        push = others * (scales + empty) + sum(frame + n * 2 // 8 for n in pushed)
        pull = others * (empty + sum(frame + n * bits // 8 for n in pulled))
        assert (own.stats["push_bytes"], own.stats["pull_bytes"]) == (push, pull)
        assert own.stats["codec"] == "terngrad"


def test_all_ranks_hold_the_same_parameters_and_learn(trained: list[list[Trained]]) -> None:
    for runs in zip(*trained, strict=True):
        assert len({run.digest for run in runs}) == 1
        losses = np.mean([run.losses for run in runs], axis=0)
        assert losses[-5:].mean() < losses[:5].mean()


def test_raw_is_that_of_the_sharded_exchange(trained: list[list[Trained]]) -> None:
    terngrad, raw, sharded, _ = trained[0]
    assert raw.digest == sharded.digest != terngrad.digest


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    ranks = cluster.run(
        WORLD, jobs.train_each, [Options(7, TERNGRAD, CUT_ONCE), Options(4, TERNGRAD, CUT_ONCE)]
    )
    residuals = [rank[1].residuals for rank in ranks]
    weights = ranks[0][1].weights
    rest = Options(3, TERNGRAD, CUT_ONCE, start=4, residuals=residuals, weights=weights)
    reseeded = Options(3, TERNGRAD | {"seed": 1}, CUT_ONCE, 1, 1, 4, residuals, weights)
    for continued, other in cluster.run(WORLD, jobs.train_each, [rest, reseeded]):
        assert continued.digest == ranks[0][0].digest != other.digest


def test_what_is_not_finite_is_skipped_by_all(cluster: Cluster) -> None:
    ranks = cluster.run(2, scaled_jobs.train_scaled, 5, 3, "second.weight", TERNGRAD)
    for rank in ranks:
        assert rank.skipped == [False, False, False, True, False]
        assert rank.digests == ranks[0].digests
        assert rank.digests[3] == rank.digests[2]
        assert "gradient of rank 1 is not finite at element 3 of second.weight" in rank.warnings[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"codec": "3lc:s=1.75"}, "codec is '3lc:s=1.75', valid are raw and terngrad"),
    ({"codec": "qsgd"}, "codec is 'qsgd', valid are raw and terngrad"),
    ({"codec": "terngrad:ef=on"}, "ef=on is refused"),
    ({"rules": [("head.*", "qsgd:ef=on")]}, "no residual is kept.* add ef=off"),
    ({"rules": [("head.*", "onebit")]}, "'head.*', push onebit.* no residual is kept"),
    ({"ranks_per_machine": 2}, "ranks_per_machine goes with exchange='hierarchical' alone"),
]
WRONG_IN_A_WORLD: list[tuple[dict[str, Any], str]] = [
    (
        {"pull_codec": "qsgd:levels=3"},
        "pulled by the same codec or by qsgd with levels=2",
    ),
    (
        {"rules": [("a", "bf16", "pull")]},
        "'a', push terngrad, pull bf16",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradwire.torch.GradwireState(**grouped({**TERNGRAD, **arguments}))


def test_in_a_world_more_is_known_at_once() -> None:
    def refuse(rank: int) -> None:
        for right in (
            {"rules": [("head.*", "bf16")]},
            {"pull_codec": "qsgd:levels=2,bucket=1000000"},
        ):
            gradwire.torch.GradwireState(**grouped(TERNGRAD | right))
        for wrong, said in WRONG_IN_A_WORLD:
            with pytest.raises(ValueError, match=said):
                gradwire.torch.GradwireState(**grouped(TERNGRAD | wrong))

    threads(2, refuse)
