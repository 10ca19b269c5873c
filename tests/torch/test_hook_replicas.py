"""Replicas stay bit-identical, and `raw` is plain DDP."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire
import jobs
from cluster import Cluster
from training import Options, Trained

CODECS = ("raw", "bf16", "3lc:s=1.0", "3lc:s=1.75")
WORLDS = (1, 2, 3, 4, 7)


@pytest.fixture(scope="module", params=WORLDS)
def trained(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[int, list[list[Trained]]]:
    """By rank: a training with each codec, then one of DDP without the hook."""
    runs = [Options(state={"codec": codec}) for codec in CODECS] + [Options(state=None)]
    return request.param, cluster.run(request.param, jobs.train_each, runs)


@pytest.mark.parametrize("run", range(len(CODECS)), ids=CODECS)
def test_all_ranks_hold_the_same_parameters(
    trained: tuple[int, list[list[Trained]]], run: int
) -> None:
    world_size, ranks = trained
    assert len({rank[run].digest for rank in ranks}) == 1
    assert len(ranks) == world_size
    assert len(ranks[0][run].buckets[-1]) > 1, "the model must fill several buckets"


def test_codecs_train_differently(trained: tuple[int, list[list[Trained]]]) -> None:
    world_size, ranks = trained
    digests = {run.digest for run in ranks[0][:-1]}
    # A lone rank sends nothing, so nothing is quantized.
    assert len(digests) == (1 if world_size == 1 else len(CODECS))


def test_raw_equals_plain_ddp_up_to_the_order_of_sums(
    trained: tuple[int, list[list[Trained]]],
) -> None:
    raw, plain = trained[1][0][0], trained[1][0][-1]
    for name, expected in plain.parameters.items():
        np.testing.assert_allclose(raw.parameters[name], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(raw.losses, plain.losses, rtol=1e-4)


EVERY_CODEC = [entry["name"] for entry in gradwire.codecs()]
OTHERS = ["3lc:coder=rice", "terngrad:pack=trits5,coder=rice", "qsgd:bits=2,coder=elias"]


def test_every_codec_trains_with_equal_replicas(cluster: Cluster) -> None:
    codecs = EVERY_CODEC + OTHERS
    runs = [Options(state={"codec": codec}) for codec in codecs]
    first, *others = cluster.run(3, jobs.train_each, runs)
    for codec, mine, *theirs in zip(codecs, first, *others, strict=True):
        assert [run.digest for run in theirs] == [mine.digest] * 2, codec
        assert all(np.isfinite(mine.losses)), codec
    # Coders change the bytes but not the values.
    by_codec = dict(zip(codecs, first, strict=True))
    assert by_codec["3lc:coder=rice"].digest == by_codec["3lc"].digest


def test_codecs_that_draw_are_repeated_by_their_seed(cluster: Cluster) -> None:
    runs = [Options(state={"codec": "terngrad", "seed": seed}) for seed in (1, 1, 2)]
    one, again, other = cluster.run(2, jobs.train_each, runs)[0]
    assert one.digest == again.digest
    assert one.digest != other.digest
