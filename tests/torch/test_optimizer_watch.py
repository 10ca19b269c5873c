"""What sends gradients finds the optimizer, and warns of one that divides by squares of coarse
gradients."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import runs
from gradwire._core import is_coarse
from gradwire.torch.errors import CoarseGradientsWarning
from gradwire.torch.wrapping_optimizer import OptimizerWatch
from runs import Case
from training import make_model
from ways import Way

ADAPTIVE = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad"]
LINEAR = ["SGD", "ASGD"]


def watch_one_step(
    optimizer: torch.optim.Optimizer, *watched: torch.Tensor, codec: str = "3lc:s=1"
) -> list[str]:
    watch = OptimizerWatch(watched, codec, rank=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
    warned = [w for w in caught if w.category is CoarseGradientsWarning]
    assert {w.filename for w in warned} <= {__file__}, "not PyTorch's line, nor gradwire's"
    said = [str(w.message) for w in warned]
    assert said == list(watch.remarks)
    return said


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(4, 4))
    made.grad = torch.ones(4, 4)
    return made


@pytest.mark.parametrize("name", [*ADAPTIVE, "Adafactor"])
def test_adaptive_optimizers_are_known_by_their_state(name: str) -> None:
    weight = parameter()
    (said,) = watch_one_step(getattr(torch.optim, name)([weight]), weight)
    assert said.startswith(f"{name} learns several times too slowly from gradients compressed with")
    assert "import LocalSteps; " in said
    assert f"LocalSteps({name}(...), model, codec='3lc:s=1.00,coder=rice')" in said


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_other_optimizers_raise_no_warning(name: str, momentum: float) -> None:
    weight = parameter()
    options = {"momentum": momentum} if name == "SGD" else {}
    assert watch_one_step(getattr(torch.optim, name)([weight], lr=0.1, **options), weight) == []


class OfSomeoneElse(torch.optim.Optimizer):
    """Keeps squares under the usual name."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg_sq"] = p.grad**2


def test_unknown_optimizers_are_known_by_their_state() -> None:
    weight = parameter()
    (said,) = watch_one_step(OfSomeoneElse([weight]), weight)
    assert "LocalSteps(OfSomeoneElse(...), model" in said


def test_whoever_chose_auto_may_keep_it() -> None:
    weight = parameter()
    (said,) = watch_one_step(torch.optim.AdamW([weight]), weight, codec="auto:bits=0.5")
    assert "LocalSteps(AdamW(...), model, codec='auto:bits=0.5')" in said


def test_other_ranks_keep_the_remark_for_stats_alone() -> None:
    weight = parameter()
    watch = OptimizerWatch([weight], "3lc:s=1", rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.AdamW([weight]).step()
    assert len(watch.remarks) == 1


def test_an_optimizer_of_other_parameters_is_none_of_its_business() -> None:
    own = parameter()
    watch = OptimizerWatch([own], "3lc:s=1", rank=1)
    torch.optim.Adam([parameter()]).step()
    assert watch.remarks == ()
    torch.optim.Adam([own]).step()
    assert len(watch.remarks) == 1, "it still waited"


@pytest.mark.parametrize("adaptive_first", [True, False])
def test_one_of_several_optimizers_is_found(adaptive_first: bool) -> None:
    first, second = parameter(), parameter()
    watch = OptimizerWatch([first, second], "3lc:s=1", rank=1)
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW([second])]
    for optimizer in reversed(optimizers) if adaptive_first else optimizers:
        optimizer.step()
    (said,) = watch.remarks
    assert "AdamW" in said


def test_two_models_are_watched_at_once() -> None:
    first, second = parameter(), parameter()
    watches = [OptimizerWatch([p], "3lc:s=1", rank=1) for p in (first, second)]
    for parameters in ([first], [second]):
        torch.optim.AdamW(parameters).step()
    assert [len(watch.remarks) for watch in watches] == [1, 1]


def test_watches_come_and_go_while_an_optimizer_steps() -> None:
    """In another thread, or by the garbage collector. PyTorch raises if a hook is removed or
    registered while it calls the others."""
    held = [OptimizerWatch([parameter()], "3lc:s=1", rank=1) for _ in range(3)]
    hooks = dict(_global_optimizer_post_hooks)

    def replace_one(*given: object) -> None:
        held.pop(0)
        held.append(OptimizerWatch([parameter()], "3lc:s=1", rank=1))

    handle = register_optimizer_step_post_hook(replace_one)
    for _ in range(5):
        torch.optim.SGD([parameter()], lr=0.1).step()
    handle.remove()
    assert dict(_global_optimizer_post_hooks) == hooks, "one hook for all"
    alive = [ref() for ref in OptimizerWatch._all or () if ref() in held]
    assert alive == held


@pytest.mark.parametrize("codec", ["3lc", "stc", "topk", "terngrad", "stoch3", "onebit"])
def test_coarse_codecs(codec: str) -> None:
    assert is_coarse(codec)


@pytest.mark.parametrize(
    ("codec", "coarse"),
    [
        *[(codec, False) for codec in ("raw", "bf16", "fp16", "int8", "inceptionn", "qsgd:bits=4")],
        ("qsgd:bits=3", True),
        ("topk:ratio=0.9", False),
    ],
)
def test_close_codecs(codec: str, coarse: bool) -> None:
    assert is_coarse(codec) == coarse


def test_a_codec_that_sends_closely_needs_no_watch() -> None:
    own = parameter()
    watch = OptimizerWatch([own], "int8", rank=0)
    torch.optim.AdamW([own]).step()
    assert watch.remarks == ()


@pytest.mark.parametrize("place", ["hook", "sharded", "frozen"])
@pytest.mark.parametrize(
    ("optimizer", "codec", "count"),
    [("AdamW", "3lc:s=1", 1), ("AdamW", "int8", 0), ("SGD", "3lc:s=1", 0)],
)
def test_it_is_said_once_and_stats_repeat_it(
    place: str, optimizer: str, codec: str, count: int
) -> None:
    options: dict[str, Any] = {"codec": codec}
    if place != "sharded":
        options["start_iter"] = 1
    if place == "frozen":  # most parameters, with int8
        options["rules"] = [("first*", "int8"), ("second*", "int8")]

    def make() -> nn.Module:
        model = make_model()
        for layer in (model.first, model.second) if place == "frozen" else ():
            layer.requires_grad_(False)
        return model

    way = Way("sharded" if place == "sharded" else "hook", options)
    inner = partial(getattr(torch.optim, optimizer), lr=1e-3)
    ranks = runs.run_one(2, Case(way, inner, 3, model=make))
    said = [run.said(CoarseGradientsWarning) for run in ranks]
    assert [len(each) for each in said] == [count, 0], "rank 0 alone warns"
    for run in ranks:
        assert [each for each in run.stats["remarks"] if "learns several" in each] == said[0]
