"""PULSELoCo: LocalSteps that send only those changes that alter the model in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import runs
from averages_by_hand import gated, nesterov, train_by_hand
from gradwire.torch import outer_nesterov, pulse_loco, reshard
from learning import learn
from runs import Case, said_by, threads
from training import batch, make_model
from ways import Way, build

# Small steps, of which the gate holds most back.
adamw = partial(AdamW, lr=1e-4)
STREAMS: list[dict[str, Any]] = [
    {"every": 4},
    {"every": 4, "fragments": 2, "delay": 3},
    {"every": 3, "fragments": 3, "delay": 2},
    {"every": 4, "residual_decay": 0.5},
]


def apart(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss whose gradient needs no sum, so it has the same bits wherever a machine's libraries
    add in another order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    noise = {p: torch.randn(p.shape, generator=generator) for p in model.parameters()}
    return torch.stack([(0.5 * p * p + p * values).sum() for p, values in noise.items()]).sum()


@pytest.mark.parametrize("streams", STREAMS)
def test_the_exchanges_are_the_algorithm_written_down(streams: dict[str, Any]) -> None:
    """Bit for bit, because the sums of two ranks and the products of the outer optimizer round
    alike in any order."""
    way = Way("local", pulse_loco(0.5, 0.5) | streams)
    case = Case(way, adamw, steps=120, loss=apart, model=make_model)
    shares: list[float] = []
    decay = streams.get("residual_decay", 1.0)
    expected = train_by_hand(case, 2, gated(decay, shares), nesterov(0.5, 0.5))
    for rank, run in enumerate(runs.run_one(2, case)):
        for name, values in run.training.values().items():
            np.testing.assert_array_equal(values, expected[rank][name], name)
    assert 0.01 < np.mean(shares) < 0.9  # the gate lets some through


def kept_in(state: dict[str, Any]) -> list[list[torch.Tensor]]:
    return [fragment["gate"]["kept"] for fragment in state["optimizer"]["fragments"]]


def test_a_skipped_exchange_leaves_what_is_kept() -> None:
    deeds = {3: runs.make_infinite}
    way = Way("local", pulse_loco() | {"every": 2})
    case = Case(way, adamw, steps=4, with_gradients=deeds, notes=(2, 4))
    run = runs.run_one(2, case)[1]
    assert run.stats["skipped_steps"] == 1
    before, after = (kept_in(state)[0] for state in run.states.values())
    assert any(values.any() for values in before)
    assert all(map(torch.equal, before, after))


def test_what_is_owed_to_an_unused_parameter_waits() -> None:
    """It neither decays nor is sent."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step)[0], use_branch=step < 2).square().sum()

    case = Case(
        Way("local", pulse_loco() | {"every": 2, "residual_decay": 0.5}),
        adamw,
        steps=4,
        notes=(2, 4),
        loss=loss,
        model=make_model,
    )
    run = runs.run_one(2, case)[0]
    places = [i for i, name in enumerate(run.training.values()) if name.startswith("branch")]
    before, after = (kept_in(state)[0] for state in run.states.values())
    assert any(before[place].any() for place in places)
    assert all(torch.equal(before[place], after[place]) for place in places)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_rank_has_the_same_model(dtype: torch.dtype) -> None:
    """In bfloat16, what an optimizer changes is seen, but for steps from one binade to another."""
    way = Way("local", pulse_loco() | {"every": 2, "fragments": 2})
    case = Case(
        way,
        partial(AdamW, lr=1e-3, eps=1e-4),
        notes=(6,),
        after={6: runs.settle},
        loss=lambda model, rank, step: model(batch(rank, step)[0].to(dtype)).square().sum(),
        model=partial(make_model, dtype),
    )
    ends = runs.run_one(3, case)
    assert len({run.digests[-1] for run in ends}) == 1
    kept = torch.cat([v.flatten() for values in kept_in(ends[0].state) for v in values])
    assert (kept.count_nonzero() < 0.01 * kept.numel()) == (dtype == torch.bfloat16)


def test_another_number_of_ranks_shares_what_was_kept() -> None:
    """The mean of what all ranks keep stays the same for another number of ranks."""
    way = Way("local", pulse_loco() | {"every": 2})

    def both(parameters: Any) -> Any:
        given = list(parameters)
        return [AdamW(given[::2], lr=1e-4), SGD(given[1::2], lr=1e-3)]

    case = Case(way, both, steps=4, notes=(4,))
    states = [run.state["optimizer"] for run in runs.run_one(2, case)]
    moved = reshard(states, 3)
    for place, parts in enumerate(
        zip(*(kept_in({"optimizer": s})[0] for s in states), strict=True)
    ):
        for state in moved:
            here = kept_in({"optimizer": state})[0][place]
            assert torch.equal(here, torch.stack(parts).mean(dim=0))


def test_what_does_not_go_together_is_refused() -> None:
    def said(**options: Any) -> str:
        way = Way("local", options)
        return threads(1, lambda rank: said_by(lambda: build(way, make_model())))[0]

    assert "gate is 'float8'; valid is 'bfloat16'" in said(gate="float8")
    held_back = "keeps a residual, and so it would send values that gate= holds back"
    assert held_back in said(gate="bfloat16", codec="3lc")
    assert held_back in said(gate="bfloat16", pull_codec="int8")
    assert held_back in said(gate="bfloat16", rules=[("first*", "topk")])
    assert held_back in said(gate="bfloat16", codec="auto:bits=1")
    assert said(gate="bfloat16", codec="qsgd:bits=4") == "nothing"


def test_it_learns_as_diloco_does_with_fewer_bytes() -> None:
    plain: dict[str, Any] = {"every": 4, "codec": "raw", "outer": outer_nesterov()}
    (first, _), (usual, raw_bytes) = learn(0, **plain), learn(400, **plain)
    loss, sent_bytes = learn(400, every=4, **pulse_loco())
    assert usual < 0.6 * first
    assert loss < 1.25 * usual
    assert sent_bytes < raw_bytes


def test_the_arguments_are_those_of_diloco_with_a_gate() -> None:
    chosen = pulse_loco(lr=0.5, momentum=0.8)
    made = chosen["outer"]([torch.nn.Parameter(torch.zeros(1))])
    assert (made.defaults["lr"], made.defaults["momentum"], made.defaults["nesterov"]) == (
        0.5,
        0.8,
        True,
    )
    assert chosen["gate"] == "bfloat16"
