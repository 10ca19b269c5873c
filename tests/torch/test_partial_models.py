"""Models of which a part is trained, in all ways: layers frozen and thawed, adapters alone, tied
weights, groups that are added. Each is trained as the optimizer alone would, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from deeds import Tied, two_steps_after
from gradwire.torch import DiLoCo
from runs import threads
from ways import KINDS, Program, Training, Way, build

WORKERS = 2
RAW: dict[str, Any] = {"codec": "raw"}


class InDiLoCo(Training):
    """With an outer optimizer that subtracts the average: the steps are the inner one's."""

    def attach(self, **options: Any) -> None:
        outer = partial(SGD, lr=1.0)
        self.source = DiLoCo(self.model, self.inner, outer, sync_every=1, **options)
        self.source.__enter__()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.source.__exit__(None, None, None)


KINDS["diloco"] = InDiLoCo
WAYS = {
    "hook": Way("hook", RAW),
    "local": Way("local", RAW),
    "DiLoCo": Way("diloco"),
    "sharded": Way("sharded", RAW),
    "served": Way("server", RAW | {"timeout": 20.0}, servers=1),
    "served gradients": Way("server", RAW | {"timeout": 20.0, "pulls": "gradients"}, servers=1),
}


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.linspace(-0.5, 0.5, 2 * base.in_features).view(2, -1))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + x @ self.lora_A.T @ self.lora_B.T
        return adapted


def _adapt(model: Any) -> Any:
    model.requires_grad_(False)
    model.first, model.last = Adapted(model.first), Adapted(model.last)
    return model


def _freeze_first(model: Any) -> Any:
    model.first.requires_grad_(False)
    return model


def _freeze_tied(model: Any) -> Any:
    model.second.weight.requires_grad_(False)  # that of `third`, too
    return model


MODELS: dict[str, Callable[[Any], Any]] = {
    "tied weights": lambda model: model,
    "a frozen layer": _freeze_first,
    "frozen tied weights": _freeze_tied,
    "adapters alone": _adapt,
}


def trainable(parameters: Any) -> Optimizer:
    return SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def train(
    way: str | None,
    prepare: Callable[[Any], Any],
    inner: Callable[[Any], Optimizer],
    deed: Callable[[Training], None],
    rank: int,
) -> dict[str, torch.Tensor] | str | None:
    """The parameters two steps after the deed, or the error; None on a server."""
    model = prepare(Tied())

    def loss(module: Any, worker: int, step: int) -> torch.Tensor:
        return one_loss(module, -1 if way is None else worker, step)

    try:
        if way is None:
            training = Training(Way("alone"), model, inner, Program())
        else:
            training = build(WAYS[way], model, inner)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    found = two_steps_after(deed, training, 1, loss)
    if not isinstance(found, nn.Module):
        return found
    return {name: p.detach().clone() for name, p in found.named_parameters()}


def one_loss(module: Any, rank: int, step: int) -> torch.Tensor:
    """Of the rows of one worker of two; rank -1: of all, whose mean is that of both."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator), torch.arange(16) % 3
    rows = slice(None) if rank < 0 else slice(rank, None, WORKERS)
    return nn.functional.cross_entropy(module(x[rows]), y[rows])


def run_ranks(way: str, job: Callable[[int], Any]) -> list[Any]:
    return threads(WORKERS + WAYS[way].servers, job)


def nothing(training: Training) -> None: ...


def compare(way: str, *what: Any) -> None:
    """All ranks have what the optimizer alone makes, and some parameter has moved."""
    (expected,) = threads(1, partial(train, None, *what))
    assert isinstance(expected, dict), expected
    start = dict(what[0](Tied()).named_parameters())
    for found in run_ranks(way, partial(train, way, *what)):
        if found is None:
            continue  # a server
        assert isinstance(found, dict), found
        assert found.keys() == expected.keys()
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=1e-5, msg=name)
            if not start[name].requires_grad:
                assert torch.equal(values, start[name]), name
        assert any(not torch.equal(found[name], start[name]) for name in found)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_trained_as_alone(way: str, model: str) -> None:
    compare(way, MODELS[model], trainable, nothing)


def _freeze_later(training: Training) -> None:
    training.inner.param_groups[0]["momentum"] = 0.0
    training.model.last.requires_grad_(False)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "hook"])
def test_a_layer_that_is_frozen_later_stays(way: str) -> None:
    compare(way, MODELS["tied weights"], trainable, _freeze_later)


def _add_group(training: Training) -> None:
    training.model.extra = nn.Linear(2, 2)
    training.inner.add_param_group({"params": list(training.model.extra.parameters())})


def _thaw(training: Training) -> None:
    layer: Any = training.model.first
    layer.requires_grad_(True)
    training.inner.add_param_group({"params": list(layer.parameters())})


@pytest.mark.parametrize("deed", [_add_group, _thaw])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "hook"])
def test_what_the_optimizer_gets_later_is_named(way: str, deed: Callable[[Training], None]) -> None:
    prepare = MODELS["a frozen layer" if deed is _thaw else "tied weights"]
    name = "first.weight" if deed is _thaw else "extra.weight"
    for found in run_ranks(way, partial(train, way, prepare, trainable, deed)):
        assert found is None or f"{name} was added to the groups of the SGD" in found


@pytest.mark.parametrize("way", ["local", "DiLoCo", "sharded"])
def test_a_frozen_layer_is_left_out_of_the_optimizer(way: str) -> None:
    everything = partial(SGD, lr=0.1)
    for found in run_ranks(way, partial(train, way, _freeze_first, everything, nothing)):
        assert found == (
            "ValueError: first.weight requires no gradient: leave it out of the optimizer"
        )
