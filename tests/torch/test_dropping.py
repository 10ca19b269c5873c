"""A model whose last reference is gone: its memory and its threads go, too, also after an error."""

from __future__ import annotations

import sys

import pytest

import drop_jobs
from cluster import Cluster
from selection import long


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["hook", "sharded", "server"])
def test_nothing_stays_of_a_model_that_is_dropped(
    fragile_cluster: Cluster, way: str, fails: bool
) -> None:
    assert fragile_cluster.run(2, drop_jobs.leftovers, way, fails) == [[], []]


@pytest.mark.without_sanitizers
@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc, of glibc")
@pytest.mark.parametrize("way", ["close", *long("drop", "error")])
def test_many_servers_in_one_process_hold_no_more_than_a_few(
    fragile_cluster: Cluster, way: str
) -> None:
    """A model takes 4 MB."""
    for held in fragile_cluster.run(2, drop_jobs.serve_many, way, 20):
        settled = held[9]
        assert held[-1].files <= settled.files, held
        assert held[-1].threads <= settled.threads, held
        early, late = (min(each.memory for each in part) for part in (held[5:10], held[15:]))
        # One model that stayed each time would be 40 MB. Arenas grow by a few models, and stop.
        assert late - early < 16_000_000, held
