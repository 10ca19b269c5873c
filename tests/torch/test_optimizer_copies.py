"""Copies of an optimizer have options of their own: what they do to them, the user's do not see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.torch import (
    GradwireState,
    LocalSteps,
    Schedule,
    ShardedOptimizer,
    gradwire_hook,
    loopback,
)
from gradwire.torch.optimizers.local_rules import OuterLike
from gradwire.torch.optimizers.replica import most_bytes
from gradwire.torch.wrapping_optimizer import is_adaptive


class Counting(SGD):
    """Counts its steps in its groups and defaults, as Ranger and Prodigy do in their groups."""

    def __init__(self, parameters: Any, lr: Any = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.defaults["steps"] = [0]
        for group in self.param_groups:
            group |= {"counted": torch.zeros(()), "rates": [1.0], "more": {"steps": [0]}}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.defaults["steps"][0] += 1
        for group in self.param_groups:
            group["counted"] += 1
            group["rates"].append(0.5)
            group["more"]["steps"][0] += 1


def test_looking_at_an_optimizer_takes_no_step_of_it() -> None:
    def look(rank: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = Counting(model.parameters())
        before = copy.deepcopy([optimizer.param_groups, optimizer.defaults])
        assert not is_adaptive(optimizer)
        most_bytes(optimizer)
        GradwireState(optimizer=optimizer)
        ShardedOptimizer(optimizer, model).close()
        LocalSteps(optimizer, model).close()
        assert str([optimizer.param_groups, optimizer.defaults]) == str(before)

    loopback.run(2, look)


class Noisy(SGD):
    """Draws in its step, and needs values for it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn(parameter.shape), alpha=float(parameter.norm()))


def test_looking_at_an_optimizer_shows_nowhere() -> None:
    called: list[str] = []

    def look(rank: int) -> None:
        model = nn.Linear(8, 8)
        before = torch.get_rng_state()
        GradwireState(optimizer=Noisy(model.parameters()))
        ShardedOptimizer(Adam(model.parameters()), model).close()
        assert torch.equal(torch.get_rng_state(), before)

    hook = register_optimizer_step_post_hook(lambda *_: called.append("hook"))
    loopback.run(1, look)
    hook.remove()
    assert not called


class Counted(SGD):
    """Has an entry of its own beside those of the parameters."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        entries: Any = self.state
        entries["steps"] = entries.get("steps", 0) + 1


def test_an_optimizer_may_have_entries_of_its_own() -> None:
    def train(rank: int) -> None:
        for way in (LocalSteps, ShardedOptimizer, None):
            model = nn.Linear(64, 64)
            inner = Counted(model.parameters(), lr=0.1)
            state = GradwireState("3lc", start_iter=0, optimizer=inner) if way is None else None
            module: nn.Module = DistributedDataParallel(model) if state else model
            if state is not None:
                module.register_comm_hook(state, gradwire_hook)  # type: ignore[operator]
            optimizer = inner if way is None else way(inner, model)
            for _ in range(2):
                module(torch.ones(1, 64)).sum().backward()
                optimizer.step()

    loopback.run(2, train)


class Factored(SGD):
    """Has options that are no options of a group."""

    def __init__(self, parameters: Any, factor: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=float(self.factor))


def test_an_outer_optimizer_is_copied_or_refused() -> None:
    def train(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner = SGD(model.parameters(), lr=1.0)
        for outer, said in (
            (SGD(model[1].parameters(), lr=0.0), "outer is a SGD that lacks parameters of the SGD"),
            (Factored(model.parameters(), torch.tensor(0.5)), "a copy can't take a step"),
        ):
            with pytest.raises(ValueError, match=said):
                LocalSteps(inner, model, outer=outer)
        outer = Factored(model.parameters(), 0.5)
        optimizer = LocalSteps(inner, model, "raw", outer=outer)
        before = model[0].weight.detach().clone()
        model(torch.ones(1, 4)).sum().backward()
        expected = before - 0.5 * model[0].weight.grad
        optimizer.step()
        torch.testing.assert_close(model[0].weight, expected)
        optimizer.close()
        outer.state_dict()  # it is the user's again

    loopback.run(2, train)


def test_fragments_have_outer_optimizers_of_their_own() -> None:
    def train(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        outer = Counting(model.parameters(), lr=torch.tensor(0.5))
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = LocalSteps(inner, model, outer=outer, schedule=Schedule(2, fragments=2))
        outers: list[Any] = [fragment.outer for fragment in optimizer._averaging.fragments]
        outers[0].param_groups[0]["lr"].fill_(9.0)
        outers[0].step()
        for other in (outers[1], outer):
            (group,) = other.param_groups
            assert float(group["lr"]) == 0.5
            assert (float(group["counted"]), other.defaults["steps"]) == (0.0, [0])
        optimizer.close()

    loopback.run(2, train)


def test_what_cannot_be_copied_is_shared() -> None:
    """Such as a tensor that a graph has made, or a lock."""
    rate = torch.ones((), requires_grad=True) * 0.5
    weight = nn.Parameter(torch.zeros(3))
    outer = SGD([weight], lr=0.1)
    outer.param_groups[0] |= {"rate": rate, "generator": (n for n in range(3))}
    (group,) = OuterLike(outer, outer)([weight]).param_groups
    assert float(group["rate"]) == 0.5
    assert group["generator"] is outer.param_groups[0]["generator"]


def test_a_loaded_state_stays_as_it_is() -> None:
    def load(rank: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = ShardedOptimizer(SGD(model.parameters(), lr=torch.tensor(0.5)), model)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"].fill_(0.1)
        assert float(state["options"][0]["lr"]) == 0.5
        optimizer.close()

    loopback.run(2, load)
