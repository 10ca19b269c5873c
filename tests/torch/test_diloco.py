"""DiLoCo as torchft names it, against the algorithm as its paper gives it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from frozen import Distances, loss
from gradwire.torch import DiLoCo, LocalSteps, Schedule, loopback
from runs import said_by
from test_optimizer_list import muon_and_adamw

EVERY, STEPS = 4, 16


def outer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def train_by_hand(rank: int) -> list[torch.Tensor]:
    """Algorithm 1 of arXiv:2311.08105, with PyTorch's all-reduce."""
    model, whole = Distances(), Distances()
    inner, outer = AdamW(model.parameters(), lr=2e-3), outer_of(whole)
    scheduler = ExponentialLR(outer, 0.5)
    for step in range(STEPS):
        inner.zero_grad()
        loss(model, rank, step).backward()
        inner.step()
        if (step + 1) % EVERY:
            continue
        for own, shared in zip(model.parameters(), whole.parameters(), strict=True):
            change = (shared - own).detach()
            dist.all_reduce(change)
            shared.grad = change / dist.get_world_size()
        outer.step()
        scheduler.step()
        model.load_state_dict(whole.state_dict())
    return [p.detach() for p in model.parameters()]


def train(rank: int, **options: Any) -> list[torch.Tensor]:
    model = Distances()
    inner, outer = AdamW(model.parameters(), lr=2e-3), outer_of(model)
    with DiLoCo(model, inner, outer, sync_every=EVERY, **options) as diloco:
        scheduler = ExponentialLR(outer, 0.5)
        for step in range(STEPS):
            inner.zero_grad()
            loss(model, rank, step).backward()
            inner.step()
            if (step + 1) % EVERY == 0:
                scheduler.step()
    assert diloco.stats().local_steps == STEPS
    return [p.detach().clone() for p in model.parameters()]


def test_it_is_the_algorithm_of_the_paper() -> None:
    for ours, theirs in zip(loopback.run(2, train), loopback.run(2, train_by_hand), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("codec", "gate"),
    [("raw", None), ("int8", None), ("topk2bit", None), (None, "bfloat16"), ("fp16", "bfloat16")],
)
def test_it_is_local_steps_under_other_names(codec: str | None, gate: str | None) -> None:
    options = {
        "gate": gate,
        "fragments": 2,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.25,
    }

    def wrapped(rank: int) -> list[torch.Tensor]:
        model = Distances()
        outer = outer_of(model)
        optimizer = LocalSteps(
            AdamW(model.parameters(), lr=2e-3),
            model,
            codec,
            outer=outer,
            schedule=Schedule(EVERY, fragments=2, delay=1, mix=0.25, gate=gate or ""),
        )
        scheduler = ExponentialLR(outer, 0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                scheduler.step()
        optimizer.synchronize()
        optimizer.close()
        return [p.detach().clone() for p in model.parameters()]

    here = loopback.run(2, lambda rank: train(rank, codec=codec, **options))
    there = loopback.run(2, wrapped)
    for ours, theirs in zip(here, there, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_the_outer_optimizers_state_is_in_that_of_local_steps() -> None:
    def train(rank: int) -> tuple[list[str], float]:
        model = Distances()
        inner, outer = SGD(model.parameters(), lr=0.1), outer_of(model)
        said = [said_by(lambda: DiLoCo(model, inner, stepped_outer(), sync_every=1))]
        with DiLoCo(model, inner, outer, sync_every=1) as diloco:
            outer.param_groups[0]["lr"] = 0.25
            loss(model, rank, 0).backward()
            inner.step()
            state = copy.deepcopy(diloco.optimizer.state_dict())
            said += [said_by(outer.state_dict), said_by(outer.step)]
            said.append(said_by(lambda: outer.load_state_dict({})))
        again = outer_of(model)
        with DiLoCo(model, inner, again, sync_every=1) as diloco:
            diloco.optimizer.load_state_dict(state)
        return said, again.param_groups[0]["lr"]

    def stepped_outer() -> Optimizer:
        model = Distances()
        outer = outer_of(model)
        loss(model, 0, 0).backward()
        outer.step()
        return outer

    for (early, *used), lr in loopback.run(2, train):
        assert "outer_optimizer is a SGD that has a state already" in early
        assert [text.split(",")[0] for text in used] == [
            "RuntimeError: SGD was asked for its state itself",
            "RuntimeError: SGD was stepped itself",
            "RuntimeError: SGD was given a state itself",
        ]
        assert lr == 0.25


def test_a_gate_sends_fewer_bytes() -> None:
    """Without a codec, what it lets through is sent, and nothing else."""

    def sent(rank: int, gate: str | None) -> tuple[str, int]:
        model = Distances()
        inner = AdamW(model.parameters(), lr=1e-5)
        with DiLoCo(model, inner, outer_of(model), sync_every=2, gate=gate) as diloco:
            for step in range(4):
                inner.zero_grad()
                loss(model, rank, step).backward()
                inner.step()
        stats = diloco.stats().exchanges
        return stats.codec, stats.push_bytes

    ((plain, most), _), ((gated, least), _) = (
        loopback.run(2, lambda rank, gate=gate: sent(rank, gate))  # type: ignore[misc]
        for gate in (None, "bfloat16")
    )
    assert (plain, gated.partition(":")[0]) == ("raw", "topk")
    assert least < most / 2


def test_several_inner_optimizers() -> None:
    def job(rank: int) -> tuple[list[torch.Tensor], int]:
        model = Distances()
        parts = muon_and_adamw(model)
        with DiLoCo(model, parts, outer_of(model), sync_every=2) as diloco:
            for step in range(4):
                loss(model, rank, step).backward()
                for part in parts:
                    part.step()
                model.zero_grad()
            exchanges = diloco.stats().exchanges.steps
        return [p.detach().clone() for p in model.parameters()], exchanges

    (first, exchanges), (second, _) = loopback.run(2, job)
    assert all(map(torch.equal, first, second))
    assert exchanges == 2


def test_an_error_inside_is_the_error_outside() -> None:
    def job(rank: int) -> None:
        model = Distances()
        inner = SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, outer_of(model), sync_every=2):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loopback.run(2, job)


def test_after_it_the_inner_optimizer_steps_alone() -> None:
    def job(rank: int) -> bool:
        model = Distances()
        inner = SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, outer_of(model), sync_every=1):
            pass
        loss(model, rank, 0).backward()
        before = model.last.bias.detach().clone()
        inner.step()  # the ranks' gradients differ, and nothing averages them
        return torch.equal(before, model.last.bias)

    assert loopback.run(2, job) == [False, False]


def test_a_step_outside_is_refused() -> None:
    def job(rank: int) -> None:
        model = Distances()
        inner = SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, inner, outer_of(model), sync_every=2)
        loss(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match="SGD was stepped outside of the DiLoCo"):
            inner.step()
        del diloco
        inner.step()  # nothing would exchange it

    loopback.run(2, job)


def test_it_is_entered_once() -> None:
    def job(rank: int) -> None:
        model = Distances()
        diloco = DiLoCo(model, SGD(model.parameters(), lr=0.1), outer_of(model), sync_every=2)
        with diloco, pytest.raises(RuntimeError, match="was entered before"):
            diloco.__enter__()
        with pytest.raises(RuntimeError, match="was entered before"), diloco:
            pass

    loopback.run(2, job)


def test_the_order_of_several_does_not_matter() -> None:
    def job(rank: int, places: tuple[int, int]) -> list[torch.Tensor]:
        model = Distances()
        parts = muon_and_adamw(model)
        with DiLoCo(model, parts, outer_of(model), sync_every=1) as diloco:
            for step in range(3):
                loss(model, rank, step).backward()
                for place in places:
                    parts[place].step()
                model.zero_grad()
            assert diloco.local_steps == diloco.stats().exchanges.steps == 3
        return [p.detach().clone() for p in model.parameters()]

    first, second = loopback.run(2, lambda rank: job(rank, (1, 0)))
    usual, _ = loopback.run(2, lambda rank: job(rank, (0, 1)))
    for one, other, third in zip(first, second, usual, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("steps", [1, 2])
def test_one_of_several_that_is_not_stepped_is_named(steps: int) -> None:
    def job(rank: int) -> None:
        model = Distances()
        parts = muon_and_adamw(model)
        with DiLoCo(model, parts, outer_of(model), sync_every=1):
            for step in range(steps):
                loss(model, rank, step).backward()
                parts[0].step()

    when = "the context was left" if steps == 1 else "Muon was stepped again"
    with pytest.raises(RuntimeError, match=f"{when} before AdamW was stepped"):
        loopback.run(2, job)


def test_exchanged_arguments_are_named() -> None:
    model = Distances()
    inner = SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"^model is a SGD; a torch"):
        DiLoCo(inner, model, outer_of(model), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_every": 0}, "sync_every is 0; an exchange every 1 step or more is needed"),
        ({"fragment_sync_delay": 3}, "fragment_sync_delay is 3; 0 to sync_every=2 steps"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha is 1.5; a share from 0"),
        (
            {"fragment_update_alpha": 0.5, "fragment_sync_delay": 2},
            "fragment_update_alpha=0.5 with fragment_sync_delay=sync_every=2 would send some "
            "changes twice: take fragment_sync_delay=1 or less, or fragment_update_alpha=0",
        ),
        ({"fragments": 3}, "fragments is 3, but each begins its exchange in a step of its own"),
        ({"outer_optimizer": lambda parameters: None}, "outer_optimizer= must return"),
        (
            {"inner_optimizer": nn.Linear(1, 1)},
            "inner_optimizer is a Linear; a torch.optim.Optimizer or",
        ),
        ({"gate": "float8"}, "gate is 'float8'; valid is 'bfloat16'"),
        ({"gate": "bfloat16", "codec": "3lc"}, "it would send values that gate= holds back"),
        ({"should_quantize": True}, "as torchft calls it: write codec=..."),
    ],
)
def test_errors_have_the_names_that_the_user_gave(options: dict[str, Any], said: str) -> None:
    def job(rank: int) -> None:
        model = Distances()
        usual: dict[str, Any] = {
            "inner_optimizer": SGD(model.parameters(), lr=0.1),
            "sync_every": 2,
        }
        outer = {"outer_optimizer": outer_of(model)}
        DiLoCo(model, **usual | outer | options)

    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        loopback.run(1, job)


def test_a_state_of_another_schedule_is_refused_in_its_names() -> None:
    def job(rank: int) -> None:
        states = []
        for delay in (1, 0):
            model = Distances()
            inner = SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, outer_of(model), 2, fragment_sync_delay=delay) as diloco:
                states.append(diloco.state_dict())
                if delay == 0:
                    diloco.load_state_dict(states[0])

    said = "fragment_sync_delay: the state has 1, this rank has 0"
    with pytest.raises(ValueError, match=said):
        loopback.run(1, job)
