"""The hook under DDP's own options, compared with the simulation or with plain DDP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import jobs
from cluster import Cluster
from simulate import simulate
from training import Options

WORLD = 3
LAYOUT = {"codec": "3lc:s=1.75"}
MODES: dict[str, Options] = {
    "accumulation": Options(steps=5, micro_batches=3, state=LAYOUT),
    "views": Options(
        steps=5, state=LAYOUT, ddp={"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True}
    ),
    "views-and-accumulation": Options(
        steps=5,
        micro_batches=2,
        state=LAYOUT,
        ddp={"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True},
    ),
    "static-graph": Options(
        steps=5, state=LAYOUT, ddp={"bucket_cap_mb": 0.05, "static_graph": True}
    ),
    "one-bucket": Options(steps=5, state=LAYOUT, ddp={}),
    "threads": Options(steps=5, state={**LAYOUT, "threads": 2}),
}


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> list[Any]:
    torch.set_num_threads(1)
    return cluster.run(WORLD, jobs.train_each, list(MODES.values()))


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_simulation(trained: list[Any], mode: str) -> None:
    run = list(MODES).index(mode)
    buckets = trained[0][run].buckets
    expected = simulate(WORLD, MODES[mode], LAYOUT, 2, buckets)
    for rank in trained:
        for name, values in expected.items():
            np.testing.assert_array_equal(rank[run].parameters[name], values, err_msg=name)


def test_no_sync_talks_once_a_step(trained: list[Any]) -> None:
    accumulated = trained[0][list(MODES).index("accumulation")]
    plain = trained[0][list(MODES).index("views")]
    assert accumulated.stats["steps"] == 5
    assert accumulated.stats["values"] == plain.stats["values"]


def test_parameters_without_gradient(cluster: Cluster) -> None:
    """A branch that is used in every second step only, by all ranks."""
    ddp = {"bucket_cap_mb": 0.05, "find_unused_parameters": True}
    state = {"codec": "3lc:s=1.75"}
    runs = [
        Options(steps=6, branch_every=2, ddp=ddp, state=state),
        Options(steps=6, branch_every=2, ddp=ddp | {"gradient_as_bucket_view": True}, state=state),
        Options(steps=6, branch_every=2, ddp=ddp, state={"codec": "raw"}),
        Options(steps=6, branch_every=2, ddp=ddp, state=None),
    ]
    ranks = cluster.run(WORLD, jobs.train_each, runs)
    for run in range(len(runs)):
        assert len({rank[run].digest for rank in ranks}) == 1
    assert ranks[0][0].digest == ranks[0][1].digest
    for name, expected in ranks[0][3].parameters.items():
        np.testing.assert_allclose(ranks[0][2].parameters[name], expected, rtol=1e-4, atol=1e-6)
