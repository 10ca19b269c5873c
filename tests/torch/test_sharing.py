"""What is shared with the user's optimizer and module is looked at again in each step: whatever the
user does to them is followed, or refused in words that name the parameter and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sharing_jobs
from cluster import Cluster
from sharing_jobs import FOLLOWED, REFUSED, UNLIKE

# An error of a worker takes the server a second to notice, so they get a few of the deeds.
OF_SERVED = [
    *("nothing", "momentum cycled", "groups replaced", "parametrized", "edited", "frozen"),
    *("model loaded", "model loaded and back", "state loaded into the wrapped optimizer"),
    *("group added", "parameter replaced", "stepped itself"),
]
OF_REPLICAS = ["nothing", "model loaded", "edited", "scheduler of the wrapped optimizer"]
OF_ALL = [*FOLLOWED, *REFUSED]
DONE: dict[str, list[str]] = {
    "local": OF_ALL,
    "local, every 2": OF_REPLICAS,
    "local, outer": OF_REPLICAS,
    "local, fragments": OF_REPLICAS,
    "sharded": OF_ALL,
    "sharded, owed": OF_REPLICAS,
    "served": OF_SERVED,
    "served by the tensor": ["frozen", "group added", "parameter replaced", "model loaded"],
    "served gradients": ["nothing", "edited", "model loaded", "group added"],
}


def refusal(way: str, deed: str) -> str | None:
    """Words of the error that must follow; None: there must be none."""
    if deed in REFUSED:
        return REFUSED[deed][1]
    kind = way if (way, deed) in UNLIKE else way.partition(",")[0]
    return UNLIKE.get((kind, deed)) if way != "served gradients" else None


@pytest.mark.parametrize("way", DONE)
def test_each_deed_is_followed_or_refused(cluster: Cluster, way: str) -> None:
    """As the steps are those of the optimizer alone, it shows what follows from a deed."""
    ranks = cluster.run(2, sharing_jobs.do_all, way, DONE[way])
    for deed in DONE[way]:
        for found in (rank[deed] for rank in ranks):
            if found is None:
                continue  # a server
            words = refusal(way, deed)
            if words is not None:
                assert isinstance(found, str), (deed, "nothing was said")
                assert words in found, deed
                continue
            assert not isinstance(found, str), (deed, found)
            expected: Any = sharing_jobs.do(None, deed)
            for mine, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-5, err_msg=deed)


@pytest.mark.parametrize("way", ["local", "sharded", "served"])
def test_a_way_is_not_copied_by_halves(cluster: Cluster, way: str) -> None:
    for rank in cluster.run(2, sharing_jobs.copy_everything, way):
        assert len(rank) == 5
        for name, said in rank.items():
            assert "can't be copied or pickled" in said, name
            assert "save its state_dict()" in said
