"""Parameters that an optimizer trains which gradwire was not given, and frozen ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gradwire.torch import DiLoCo, LocalSteps, ServerOptimizer, ShardedOptimizer, loopback
from gradwire.torch.errors import UnsharedParameterWarning
from runs import said_by

RAW: dict[str, Any] = {"codec": "raw"}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.mean = copy.deepcopy(self.body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def sgd(*modules: nn.Module) -> SGD:
    return SGD([p for module in modules for p in module.parameters()], lr=0.05)


def diloco(optimizer: SGD, model: nn.Module) -> Any:
    """Its optimizer is the user's, after which it exchanges."""
    outer = SGD(model.parameters(), lr=1.0)
    optimizer.__dict__["kept"] = DiLoCo(model, optimizer, outer, sync_every=1, **RAW).__enter__()
    return optimizer


def served(optimizer: SGD, /, **names: Any) -> Any:
    made = ServerOptimizer(optimizer, servers=1, **RAW, **names)
    made.connect()
    return made


WAYS: dict[str, Callable[[SGD, nn.Module], Any]] = {
    "local": lambda optimizer, model: LocalSteps(optimizer, model, **RAW),
    "local, every 2": lambda optimizer, model: LocalSteps(optimizer, model, every=2, **RAW),
    "sharded": lambda optimizer, model: ShardedOptimizer(optimizer, model, **RAW),
    "diloco": diloco,
    "served": lambda optimizer, model: served(optimizer, model=model),
    "served, by names": lambda optimizer, model: served(
        optimizer, named_parameters=model.named_parameters()
    ),
}


def warned(way: str, body: Callable[[Parts], Any], beside: Callable[[Parts], Any]) -> set[str]:
    """What ranks are told which train the model. body: what gradwire gets. beside: gives what is
    called after each step."""

    def train(rank: int) -> None:
        model = Parts()
        optimizer = WAYS[way](body(model), model)
        if getattr(optimizer, "is_server", False):
            optimizer.serve()
            return
        then = beside(model)
        for step in range(4):
            model.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            then()
        if way != "diloco":
            optimizer.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loopback.run(3, train)
    found = [w for w in caught if w.category is UnsharedParameterWarning]
    assert {w.filename for w in found} <= {__file__}
    assert len(found) in (0, 2, 3), "once a rank"
    return {str(w.message) for w in found}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_second_optimizer_trains_is_named(way: str) -> None:
    (said,) = warned(way, lambda model: sgd(model.body), lambda model: sgd(model.head).step)
    assert said.startswith("head.weight and 1 more changed between steps")


@pytest.mark.parametrize("way", ["local", "sharded"])
def test_a_layer_that_came_later_is_named(way: str) -> None:
    def put_in(model: Parts) -> Callable[[], None]:
        model.head = nn.Linear(6, 2)  # of parameters that gradwire does not have
        return sgd(model.head).step

    (said,) = warned(way, lambda model: sgd(model.body), put_in)
    assert said.startswith("head.weight")


def average(model: Parts) -> Callable[[], None]:
    """Weights that are means of others, and require gradients, as in self-supervised learning."""

    @torch.no_grad()
    def then() -> None:
        for mean, new in zip(model.mean.parameters(), model.body.parameters(), strict=True):
            mean.lerp_(new, 0.5)

    return then


def train_with_its_own(model: Parts) -> Callable[[], None]:
    return LocalSteps(sgd(model.head), model, **RAW).step


def load_once(model: Parts) -> Callable[[], None]:
    heads = [copy.deepcopy(model.head.state_dict())]

    def then() -> None:
        if heads:
            model.head.load_state_dict(heads.pop())

    return then


@pytest.mark.parametrize("way", ["local", "sharded"])
@pytest.mark.parametrize("beside", [average, train_with_its_own, load_once])
def test_other_writes_are_the_program_s_own(way: str, beside: Callable[[Parts], Any]) -> None:
    assert not warned(way, lambda model: sgd(model.body), beside)


def test_parameters_can_be_swapped() -> None:
    """As PyTorch does where a DTensor is cast. It swaps no tensor that has a weak reference."""

    def swap(rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = LocalSteps(sgd(model), model, **RAW)
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(2, 3)))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), 0.95))
        optimizer.close()

    loopback.run(1, swap)


@pytest.mark.parametrize("names", ["model", "named_parameters"])
def test_servers_compare_what_is_frozen(names: str) -> None:
    """They do not send it."""

    def connect(rank: int) -> str:
        model = Parts()
        model.head.requires_grad_(False)
        with torch.no_grad():
            model.body.bias.add_(rank)  # comes from the server
            model.head.bias.add_(float(rank == 1))
        given = {"model": model} if names == "model" else {names: model.named_parameters()}
        return said_by(lambda: served(sgd(model.body), **given))

    for said in loopback.run(3, connect):
        assert said.startswith("PeerMismatchError")
        assert "no server sends head.bias" in said
