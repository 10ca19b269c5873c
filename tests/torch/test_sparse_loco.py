"""SparseLoCo: LocalSteps with sparse 2-bit changes and residuals that decay."""

from __future__ import annotations

import pickle  # pickle: of what this process wrote
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import runs
from averages_by_hand import decaying, train_by_hand
from gradwire.torch import outer_nesterov, pulse_loco, sparse_loco
from learning import learn
from runs import INFINITE_NAME, Case, said_by, threads
from training import make_model
from ways import Way, build

CODEC = "topk2bit:density=0.05"
SPARSE = {"codec": CODEC, "exchange": "broadcast", "every": 2, "residual_decay": 0.5}


@pytest.mark.parametrize("streams", [{}, {"every": 4, "fragments": 2, "delay": 3}])
def test_the_exchanges_are_the_algorithm_written_down(streams: dict[str, int]) -> None:
    """With fragments, the turns of the parameters and the delay are those of streaming."""
    step = partial(torch.optim.SGD, lr=1.0)
    case = Case(Way("local", {"outer": step, **SPARSE, **streams}), steps=9)
    expected = train_by_hand(case, 3, decaying(CODEC, 0.5))
    for rank, run in enumerate(runs.run_one(3, case)):
        for name, values in run.training.values().items():
            np.testing.assert_allclose(values, expected[rank][name], rtol=1e-4, atol=1e-5)


def test_a_skipped_exchange_does_not_let_residuals_decay() -> None:
    """The second exchange is skipped, because the last rank's gradient of a tensor is infinite: it
    sends nothing of this tensor, whose residual stays as it was."""
    deeds = {3: runs.make_infinite}
    case = Case(Way("local", SPARSE), steps=4, with_gradients=deeds, notes=(2,))
    run = runs.run_one(2, case)[1]
    assert run.stats["skipped_steps"] == 1
    usual, left = (
        [r["values"] for r in state["optimizer"]["residuals"] if r["name"] == INFINITE_NAME]
        for state in run.states.values()
    )
    assert len(left) == len(usual) == 1
    assert usual[0].any()
    assert torch.equal(left[0], usual[0])


def test_a_decay_needs_a_codec_with_a_residual() -> None:
    def said(codec: str, decay: float) -> str:
        way = Way("local", {"codec": codec, "residual_decay": decay})
        return threads(1, lambda rank: said_by(lambda: build(way, make_model())))[0]

    needed = "raw keeps no residual that residual_decay could multiply: take a codec with"
    assert needed in said("raw", 0.9)
    needed = "residual_decay is 0.0; a factor above 0, and at most 1, is needed"
    assert needed in said("topk2bit", 0.0)
    assert "topk2bit:ef=off keeps no residual" in said("topk2bit:ef=off", 0.9)


def test_sparse_loco_learns_as_diloco_does() -> None:
    """It may end with a loss that is 25 % higher. Of the bytes, raw biases and headers
    included, less than a tenth is left."""
    plain: dict[str, Any] = {"every": 8, "codec": "raw", "outer": outer_nesterov()}
    (first, _), (usual, raw_bytes) = learn(0, **plain), learn(400, **plain)
    loss, sent_bytes = learn(400, every=8, **sparse_loco(0.05))
    assert usual < 0.6 * first
    assert loss < 1.25 * usual
    assert 10 * sent_bytes < raw_bytes


def test_the_arguments_are_those_of_the_paper() -> None:
    chosen = sparse_loco(density=0.01, decay=0.9)
    assert chosen["codec"] == "topk2bit:density=0.01"
    assert (chosen["exchange"], chosen["residual_decay"]) == ("broadcast", 0.9)


def test_presets_go_to_other_processes() -> None:
    for preset in (outer_nesterov(0.5), pulse_loco(0.5), sparse_loco()):
        outer = pickle.loads(pickle.dumps({"outer": preset} if callable(preset) else preset))
        made = outer["outer"]([nn.Parameter(torch.zeros(1))])
        assert made.defaults["lr"] in (0.5, 1.0)
