"""Autocast to float16 with a GradScaler, where the gradients of one rank overflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from owed import Owed, owed_in
from runs import adamw, digests_of, sgd, threads
from training import batch, make_model
from ways import Way, build

SCALE, OVERFLOWS, STEPS, WORKERS = 2.0**10, 4, 12, 3
FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
CODEC: dict[str, Any] = {"codec": "3lc:s=1.00"}
WAYS = {
    "hook": Way("hook", {**CODEC, "start_iter": 0}),
    "FullyShardComm": Way("fsdp", {**CODEC, "start_iter": 0}),
    "FullyShardComm, float16": Way("fsdp", {**CODEC, "start_iter": 0}, policy=FLOAT16),
    "LocalSteps": Way("local", CODEC, adam=True),
    "LocalSteps, every 3": Way("local", {**CODEC, "every": 3}, adam=True),
    "served": Way("server", {**CODEC, "timeout": 20.0}, servers=1),
}


@dataclass
class Seen:
    """By one rank; lists have an entry for each step."""

    values: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)  # the gradients, before the step
    owed: list[Owed] = field(default_factory=list)


def train(name: str, rank: int) -> Seen | None:
    """In one step the last worker's loss is so large that its gradients of 16 bits are infinite.
    None: of a server."""
    way, seen = WAYS[name], Seen()
    scaler = torch.amp.GradScaler("cpu", SCALE)
    # A residual of scaled gradients follows the scale; the other ways unscale gradients first.
    options: dict[str, Any] = {"scaler": scaler} if way.kind in ("hook", "fsdp") else {}
    training = build(way, make_model(), adamw if way.adam else sgd, **options)
    training.scaler = scaler

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, 0)
        with torch.autocast("cpu", torch.float16):
            logits = module(inputs)
        assert logits.dtype == torch.float16
        value = nn.functional.cross_entropy(logits.float(), labels)
        seen.losses.append(value.item())
        return value * (2.0**12 if step == OVERFLOWS and rank == WORKERS - 1 else 1.0)

    def use_gradients(step: int) -> None:
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        seen.finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients))

    def note(steps: int) -> None:
        seen.values.append({n: v.clone() for n, v in training.values().items()})
        seen.scales.append(scaler.get_scale())
        state = training.source.state_dict()
        seen.owed.append(owed_in(state.get("gradwire", state)))

    training.use_gradients = use_gradients
    training.run(STEPS, loss, note)
    is_server = way.servers > 0 and training.optimizer.is_server
    training.close()
    return None if is_server else seen


@pytest.fixture(scope="module", params=WAYS)
def ranks(request: pytest.FixtureRequest) -> tuple[str, list[Seen]]:
    name: str = request.param
    found = threads(WORKERS + WAYS[name].servers, lambda rank: train(name, rank))
    seen = [one for one in found if one is not None]
    assert len(seen) == WORKERS
    return name, seen


def test_scales_fall_where_gradients_overflow(ranks: tuple[str, list[Seen]]) -> None:
    """The hook and FSDP give the averages of all ranks; else each rank looks at its own."""
    name, seen = ranks
    alone = WAYS[name].kind in ("local", "server")
    falls = [[SCALE] * OVERFLOWS + [scale] * (STEPS - OVERFLOWS) for scale in (SCALE, SCALE / 2)]
    assert [one.scales for one in seen] == [falls[not alone]] * (WORKERS - 1) + [falls[True]]
    for one in seen:
        usual = [step != OVERFLOWS or (alone and one is not seen[-1]) for step in range(STEPS)]
        assert one.finite == usual


def test_ranks_stay_together(ranks: tuple[str, list[Seen]]) -> None:
    name, seen = ranks
    kind, every = WAYS[name].kind, WAYS[name].options.get("every", 1)
    if kind != "fsdp":  # there each rank has other shards
        each = [[digests_of(values) for values in one.values] for one in seen]
        assert all(digests[every - 1 :: every] == each[0][every - 1 :: every] for digests in each)
    for one in seen:
        before, after = one.values[OVERFLOWS - 1], one.values[OVERFLOWS]
        stayed = all(torch.equal(before[name], after[name]) for name in before)
        alone = name == "LocalSteps, every 3" and one is seen[-1]
        assert stayed == (kind != "local" or alone)


def test_nothing_infinite_is_kept(ranks: tuple[str, list[Seen]]) -> None:
    _, seen = ranks
    for one in seen:
        assert all(values.isfinite().all() for step in one.values for values in step.values())
        kept = [values for owed in one.owed for kind in owed.values() for values in kind.values()]
        assert any(values.any() for values in kept)
        assert all(np.isfinite(values).all() for values in kept)


def test_the_loss_falls(ranks: tuple[str, list[Seen]]) -> None:
    for one in ranks[1]:
        assert one.losses[-1] < 0.8 * one.losses[0], one.losses
