"""A model whose last reference is gone: its memory and its threads go, too, also after an error."""

from __future__ import annotations

import pytest

import drop_jobs
from cluster import Cluster


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["hook", "sharded", "server"])
def test_nothing_stays_of_a_model_that_is_dropped(
    fragile_cluster: Cluster, way: str, fails: bool
) -> None:
    assert fragile_cluster.run(2, drop_jobs.leftovers, way, fails) == [[], []]
