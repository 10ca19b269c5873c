"""The hook in processes that share a GPU; for machines that have one."""

from __future__ import annotations

import pytest
import torch

import jobs
from cluster import Cluster
from gradwire.torch import Overlap
from training import Options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_replicas_stay_the_same_and_overlap_changes_nothing(cluster: Cluster) -> None:
    state = {"codec": "3lc:s=1.5,coder=rice"}
    runs = [
        Options(8, {**state, "overlap": overlap}, device="cuda:0")
        for overlap in (Overlap.ON, Overlap.OFF)
    ]
    ranks = cluster.run(3, jobs.train_each, runs)
    assert len({run.digest for rank in ranks for run in rank}) == 1
    assert ranks[0][0].losses[-1] < ranks[0][0].losses[0]
    assert ranks[0][0].stats["push_bytes"] > 0


def test_raw_averages_are_those_of_ddp_but_for_rounding(cluster: Cluster) -> None:
    runs = [Options(5, {"codec": "raw"}, device="cuda:0"), Options(5, None, device="cuda:0")]
    raw, plain = cluster.run(2, jobs.train_each, runs)[0]
    for name, values in raw.parameters.items():
        torch.testing.assert_close(
            torch.from_numpy(values), torch.from_numpy(plain.parameters[name]), rtol=1e-4, atol=1e-5
        )
