"""Ranks whose optimizers get other options than those of other ranks, in every way to train."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import finite_sums
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
