"""The hook over a ring keeps the sharded exchange's contract, with other bytes and bits."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradwire.torch
import jobs
import runs
from cluster import Cluster
from gradwire._core import scale_growth
from gradwire.torch.errors import GrowingScalesWarning
from runs import Case
from training import Options, Trained
from ways import CUT_ONCE, Way

CODECS = ("raw", "3lc:s=1.0", "onebit")
RUNS = [Options(state={"codec": codec, "exchange": "ring"}) for codec in CODECS]


@pytest.fixture(scope="module", params=(2, 3, 4))
def trained(request: pytest.FixtureRequest, cluster: Cluster) -> list[list[Trained]]:
    """By rank: a ring with each codec, then sharded with the first."""
    sharded = Options(state={"codec": CODECS[0]})
    return cluster.run(request.param, jobs.train_each, [*RUNS, sharded])


def test_all_ranks_hold_the_same_parameters(trained: list[list[Trained]]) -> None:
    for run in range(len(CODECS)):
        assert len({rank[run].digest for rank in trained}) == 1


def test_raw_around_a_ring_is_raw_in_shards_but_for_rounding(trained: list[list[Trained]]) -> None:
    ring, sharded = trained[0][0], trained[0][len(CODECS)]
    for name, values in ring.parameters.items():
        np.testing.assert_allclose(values, sharded.parameters[name], rtol=1e-4, atol=1e-6)
    # Three or more summands are added in another order.
    assert (ring.digest == sharded.digest) == (len(trained) < 3)


def test_a_ring_sends_as_many_bytes_as_shards_do(trained: list[list[Trained]]) -> None:
    def sent(run: int) -> int:
        stats = [rank[run].stats for rank in trained]
        return sum(rank["push_bytes"] + rank["pull_bytes"] for rank in stats)

    assert sent(0) == sent(len(CODECS))
    assert sent(0) > 0


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    state = {"codec": "3lc:s=1.0", "exchange": "ring"}
    ranks = cluster.run(
        3, jobs.train_each, [Options(7, state, CUT_ONCE), Options(4, state, CUT_ONCE)]
    )
    residuals = [rank[1].residuals for rank in ranks]
    weights = ranks[0][1].weights
    rest = Options(3, state, CUT_ONCE, start=4, residuals=residuals, weights=weights)
    for (continued,) in cluster.run(3, jobs.train_each, [rest]):
        assert continued.digest == ranks[0][0].digest


def test_a_ring_and_shards_cannot_exchange(fragile_cluster: Cluster) -> None:
    kinds = ["ring", "sharded", "ring"]
    fragile_cluster.start(
        3, jobs.train_unlike, [Options(state={"exchange": kind}) for kind in kinds]
    )
    answers = fragile_cluster.collect(range(3))
    for answer in answers.values():
        assert "PeerMismatchError" in answer.message, answer.trace
        assert re.search("rank . has 'exchange (ring|sharded)'", answer.message)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="'star' is no exchange; valid ones are: sharded, ring"):
        gradwire.torch.GradwireState(exchange="star")


@pytest.mark.parametrize(
    ("world_size", "codec", "exchange", "said"),
    [
        (3, "3lc:s=1.75", "ring", "grow 14 times in each hop and 196 times .* Take codec='int8'"),
        (3, "3lc:s=1.0", "ring", None),
        (2, "3lc:s=1.75", "ring", None),
        (3, "3lc:s=1.75", "sharded", None),
    ],
)
def test_growing_scales_are_warned_of_once(
    world_size: int, codec: str, exchange: str, said: str | None
) -> None:
    way = Way("hook", {"codec": codec, "exchange": exchange})
    for run in runs.run_one(world_size, Case(way, steps=4)):
        warned = run.said(GrowingScalesWarning)
        assert len(warned) == (said is not None)
        assert said is None or re.search(said, warned[0])


def test_a_codec_tells_how_its_scale_grows() -> None:
    assert scale_growth("3lc:s=1.75,coder=rice") == 14.0
    assert scale_growth("3lc") == 2.0, "the residual grows up to the input"
    assert scale_growth("3lc:s=1.75,ef=off") == 1.75
    assert scale_growth("topk:ratio=0.05") == scale_growth("int8") == 1.0
