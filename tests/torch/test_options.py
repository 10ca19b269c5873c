"""Options of optimizers, such as learning rates, that are not equal on all ranks are found."""

from __future__ import annotations

from typing import Any

import pytest

import option_jobs
from cluster import Cluster
from option_jobs import Change
from ways import Way

RING = {"codec": "int8", "exchange": "ring"}
WAYS = {
    "sharded": Way("sharded"),
    "sharded, raw": Way("sharded", {"codec": "raw"}),
    "local": Way("local"),
    "local, every third": Way("local", {"every": 3}),
    "local, ring": Way("local", RING),
    "local, machines": Way(
        "local", {"codec": "int8", "exchange": "hierarchical", "ranks_per_machine": 2}
    ),
    "local, fragments": Way("local", {"every": 4, "fragments": 2, "delay": 1}),
    "local, back to back": Way("local", {"every": 2, "delay": 2}),
    "local, early momentum": Way("local", {"late_momentum": False, "correct_noise": False}),
}
OUTER = {
    "outer": Way("local", {"every": 2, "outer": None}),
    "outer, fragments": Way("local", {"every": 2, "fragments": 2, "outer": None}),
}
CHANGES = {
    "lr": (Change("lr", 5e-4), "lr of group 0 of AdamW: 0.001", "lr of group 0 of AdamW: 0.0005"),
    "weight_decay": (Change("weight_decay", 0.5), "AdamW: 0.01", "AdamW: 0.5"),
    "late beta": (Change("betas", (0.9, 0.99)), "AdamW: [0.9, 0.999]", "AdamW: [0.9, 0.99]"),
    "before": (Change("lr", 5e-4, step=-1), "AdamW: 0.001", "AdamW: 0.0005"),
    "new": (Change("initial_lr", 0.1), "rank 0 has 'lr of group 0", "initial_lr of group 0"),
    "rank 0": (Change("lr", 5e-4, rank=0), "AdamW: 0.001", "AdamW: 0.0005"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_options_stop_all_ranks(cluster: Cluster, change: str) -> None:
    each, *values = CHANGES[change]
    _expect_refusals(cluster, 4 if change == "lr" else 2, WAYS, each, values)


def test_other_options_of_an_outer_optimizer_stop_all_ranks(cluster: Cluster) -> None:
    values = ["SGD of fragment 0: 0.7", "SGD of fragment 0: 0.5"]
    _expect_refusals(cluster, 2, OUTER, Change("lr", 0.5), values)


def _expect_refusals(
    cluster: Cluster, world: int, ways: dict[str, Way], change: Change, values: list[str]
) -> None:
    ways = {n: w for n, w in ways.items() if world == 4 or "machines" not in n}
    for rank in cluster.run(world, option_jobs.train_each, list(ways.values()), [change]):
        for name, ended in zip(ways, rank, strict=True):
            assert ended.said is not None, f"{name}: silent"
            assert ended.said.startswith("PeerMismatchError"), f"{name}: {ended.said}"
            assert all(value in ended.said for value in values), f"{name}: {ended.said}"
            assert "rank 1" in ended.said, name


def test_options_that_change_alike_cost_one_digest(cluster: Cluster) -> None:
    changes = [Change("lr", 5e-4, 6, rank=None), Change("weight_decay", 0.5, 6, rank=None)]
    ways = WAYS | OUTER
    ranks = cluster.run(4, option_jobs.train_each, list(ways.values()), changes)
    for name, of_ranks in zip(ways, zip(*ranks, strict=True), strict=True):
        assert [ended.said for ended in of_ranks] == [None] * 4, name
        assert len({ended.model for ended in of_ranks}) == 1, name
        for ended in of_ranks:
            # In the first exchange, and in the first one after the change.
            assert len(ended.compared) == 2, f"{name}: {ended.compared}"


def test_where_ranks_come_and_go_other_options_give_a_warning(cluster: Cluster) -> None:
    way = Way("local", {"on_lost": "continue", "every": 2})
    for (ended,) in cluster.run(3, option_jobs.train_each, [way], [Change("lr", 5e-4)]):
        assert ended.said is not None
        assert "has 'lr of group 0 of AdamW: 0.0005'" in ended.said
        assert not ended.said.startswith("PeerMismatchError")


@pytest.mark.parametrize("changed", [{"lr": 0.01}, {"steps": 3}])
def test_qsvrg_compares_what_is_set_later(cluster: Cluster, changed: dict[str, Any]) -> None:
    for said in cluster.run(2, option_jobs.minimize, {1: changed}):
        assert said is not None, "silent"
        assert said.startswith("PeerMismatchError")
        assert "steps of" in said
    assert cluster.run(2, option_jobs.minimize, {0: changed, 1: changed}) == [None, None]
