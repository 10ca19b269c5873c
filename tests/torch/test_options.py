"""Options of optimizers, such as learning rates, that are not equal on all ranks are found."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import finite_sums
from cluster import Cluster
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from training import digest, loss_of, make_model
from ways import Way, build

STEPS = 12
SECONDS = 60.0  # timeout of a rank that waits in vain


@dataclass(frozen=True)
class Change:
    """What `rank` (None: every rank) sets in its group before a step."""

    key: str
    value: Any
    step: int = 5
    rank: int | None = 1


@dataclass(frozen=True)
class Ended:
    """said: error or warning (None: neither). compared: the exchanges in which this rank sent
    digests of its options."""

    said: str | None
    model: str
    compared: list[str]


def train_each(ways: Sequence[Way], changes: Sequence[Change]) -> list[Ended]:
    return [train(way, changes) for way in ways]


def train(way: Way, changes: Sequence[Change]) -> Ended:
    """With the option "outer", an outer optimizer gets the changes."""
    rank, model, has_outer = dist.get_rank(), make_model(), "outer" in way.options
    inner = AdamW(model.parameters(), lr=1e-3)
    changed: list[Optimizer] = [] if has_outer else [inner]
    compared: list[str] = []
    send = Wire.send

    def make_outer(anchors: list[nn.Parameter]) -> Optimizer:
        changed.append(SGD(anchors, lr=0.7, momentum=0.9, nesterov=True))
        return changed[-1]

    def count(self: Wire, peer: int, kind: Kind, *args: Any) -> None:
        if kind is Kind.ALIKE and self.doing not in compared:
            compared.append(self.doing)
        send(self, peer, kind, *args)

    def change(step: int) -> None:
        for each in changes:
            if each.step == step and each.rank in (None, rank):
                changed[0].param_groups[0][each.key] = each.value

    def change_and_compute(module: nn.Module, number: int, step: int) -> torch.Tensor:
        change(step)
        return loss_of(module, number, step)

    options: dict[str, Any] = {"outer": make_outer} if has_outer else {}
    said, training = None, None
    with warnings.catch_warnings(record=True) as warned, mock.patch.object(Wire, "send", count):
        warnings.simplefilter("always")
        try:
            change(-1)
            training = build(way, model, lambda parameters: inner, timeout=SECONDS, **options)
            training.run(STEPS, change_and_compute)
            training.settle()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            if training is not None:
                training.close()
    said = said or next(
        (str(w.message) for w in warned if "can't exchange" in str(w.message)), said
    )
    return Ended(said, digest(model), compared)


def minimize(changes: dict[int, dict[str, Any]]) -> str | None:
    """An epoch of QSVRG, attributes that some ranks set, and another epoch."""
    weight = nn.Parameter(torch.zeros(finite_sums.N))
    chosen = finite_sums.least_squares()
    optimizer = chosen.optimizer(weight, steps=2, timeout=SECONDS)
    try:
        optimizer.epoch()
        for name, value in changes.get(dist.get_rank(), {}).items():
            setattr(optimizer, name, value)
        optimizer.epoch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()
    return None


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
    for rank in cluster.run(world, train_each, list(ways.values()), [change]):
        for name, ended in zip(ways, rank, strict=True):
            assert ended.said is not None, f"{name}: silent"
            assert ended.said.startswith("PeerMismatchError"), f"{name}: {ended.said}"
            assert all(value in ended.said for value in values), f"{name}: {ended.said}"
            assert "rank 1" in ended.said, name


def test_options_that_change_alike_cost_one_digest(cluster: Cluster) -> None:
    changes = [Change("lr", 5e-4, 6, rank=None), Change("weight_decay", 0.5, 6, rank=None)]
    ways = WAYS | OUTER
    ranks = cluster.run(4, train_each, list(ways.values()), changes)
    for name, of_ranks in zip(ways, zip(*ranks, strict=True), strict=True):
        assert [ended.said for ended in of_ranks] == [None] * 4, name
        assert len({ended.model for ended in of_ranks}) == 1, name
        for ended in of_ranks:
            # In the first exchange, and in the first one after the change.
            assert len(ended.compared) == 2, f"{name}: {ended.compared}"


def test_where_ranks_come_and_go_other_options_give_a_warning(cluster: Cluster) -> None:
    way = Way("local", {"on_lost": "continue", "every": 2})
    for (ended,) in cluster.run(3, train_each, [way], [Change("lr", 5e-4)]):
        assert ended.said is not None
        assert "has 'lr of group 0 of AdamW: 0.0005'" in ended.said
        assert not ended.said.startswith("PeerMismatchError")


@pytest.mark.parametrize("changed", [{"lr": 0.01}, {"steps": 3}])
def test_qsvrg_compares_what_is_set_later(cluster: Cluster, changed: dict[str, Any]) -> None:
    for said in cluster.run(2, minimize, {1: changed}):
        assert said is not None, "silent"
        assert said.startswith("PeerMismatchError")
        assert "steps of" in said
    assert cluster.run(2, minimize, {0: changed, 1: changed}) == [None, None]
