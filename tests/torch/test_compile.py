"""Models compiled by `torch.compile`: the same training, exchanged as without it."""

from __future__ import annotations

import numpy as np
import pytest

from cluster import Cluster
from compile_jobs import train_compiled


@pytest.mark.parametrize("way", ["hook", "LocalSteps", "ShardedOptimizer", "FullyShardComm"])
def test_a_compiled_model_trains_as_it_does_without(cluster: Cluster, way: str) -> None:
    plain = cluster.run(2, train_compiled, way, False)
    compiled = cluster.run(2, train_compiled, way, True)
    assert compiled[0][0] == compiled[1][0], "the replicas differ"
    for (_, before, counted), (_, losses, also) in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(losses, before, rtol=1e-3)
        assert also["values"] == counted["values"] > 0
        assert also["push_bytes"] + also["pull_bytes"] == pytest.approx(
            counted["push_bytes"] + counted["pull_bytes"], rel=0.01
        )
