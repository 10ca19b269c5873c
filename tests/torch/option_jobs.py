"""Ranks whose optimizers get other options than those of other ranks, in every way to train."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim import SGD, AdamW, Optimizer

import finite_sums
from gradwire.torch import LocalSteps, ServerOptimizer, ShardedOptimizer
from gradwire.torch.link.transport import Kind
from gradwire.torch.link.wire import Wire
from gradwire.torch.records.options import grouped
from training import batch, digest, make_model

STEPS = 12
SECONDS = 60.0  # timeout of a rank that waits in vain


@dataclass(frozen=True)
class Way:
    """make: "sharded", "local" or "server". outer: LocalSteps gets an outer optimizer, which gets
    the other options."""

    make: str
    options: dict[str, Any] = field(default_factory=dict)
    outer: bool = False


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
    rank, model, step = dist.get_rank(), make_model(), -1
    inner = AdamW(model.parameters(), lr=1e-3)
    changed: list[Optimizer] = [] if way.outer else [inner]
    compared: list[str] = []
    send = Wire.send

    def make_outer(anchors: list[nn.Parameter]) -> Optimizer:
        changed.append(SGD(anchors, lr=0.7, momentum=0.9, nesterov=True))
        return changed[-1]

    def count(self: Wire, peer: int, kind: Kind, *args: Any) -> None:
        if kind is Kind.ALIKE and self.doing not in compared:
            compared.append(self.doing)
        send(self, peer, kind, *args)

    def change() -> None:
        for each in changes:
            if each.step == step and each.rank in (None, rank):
                changed[0].param_groups[0][each.key] = each.value

    said, optimizer = None, None
    with warnings.catch_warnings(record=True) as warned, mock.patch.object(Wire, "send", count):
        warnings.simplefilter("always")
        try:
            change()
            optimizer = _wrap(way, inner, model, make_outer)
            for step in range(STEPS):
                change()
                inputs, labels = batch(rank, step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            if way.make != "sharded":
                optimizer.synchronize()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            if optimizer is not None:
                optimizer.close()
    said = said or next(
        (str(w.message) for w in warned if "can't exchange" in str(w.message)), said
    )
    return Ended(said, digest(model), compared)


def _wrap(way: Way, inner: Optimizer, model: nn.Module, make_outer: Any) -> Any:
    options = {"timeout": SECONDS, **way.options}
    if way.make == "sharded":
        return ShardedOptimizer(inner, model, **grouped(options))
    if way.make == "server":
        optimizer = ServerOptimizer(inner, **grouped(options))
        optimizer.connect()
        return optimizer
    if options.get("on_lost"):
        store = PrefixStore("options", _get_default_store())
        options |= {"store": store, "ranks": dist.get_world_size()}
    return LocalSteps(inner, model, outer=make_outer if way.outer else None, **grouped(options))


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
