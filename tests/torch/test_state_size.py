"""What a process that joins takes at most is what a member sends: no less, and hardly more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.torch_version import TorchVersion

from gradwire.torch import LocalSteps, outer_nesterov
from gradwire.torch.checkpoint import from_bytes, to_bytes
from gradwire.torch.optimizers.replica import most_bytes
from gradwire.torch.options import grouped
from member_jobs import SETTINGS
from training import BATCH, INPUTS, make_model

FEW = 100_000  # bytes: names, numbers and what torch.save adds to each of some dozen tensors


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().sum()
        loss.backward()
        return loss

    inputs = torch.randn(BATCH, INPUTS)
    for _ in range(steps):
        optimizer.step(closure)


OUTER_ADAM = partial(optim.Adam, lr=0.1)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (partial(optim.SGD, lr=0.01), {}),
    "momentum": (partial(optim.SGD, lr=0.01, momentum=0.9), {}),
    "adamw": (optim.AdamW, {}),
    "noise and late momentum": (optim.AdamW, {"correct_noise": True, "late_momentum": True}),
    "outer": (optim.AdamW, {"outer": outer_nesterov()}),
    "fragments": (optim.AdamW, {"outer": OUTER_ADAM, "every": 4, "fragments": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_is_the_size_of_a_members_state(store: TCPStore, way: str) -> None:
    make, settings = WAYS[way]

    model = make_model()
    settled: dict[str, Any] = {
        **SETTINGS,
        "correct_noise": False,
        "late_momentum": False,
        **settings,
    }
    member = LocalSteps(
        make(model.parameters()), model, **grouped({"store": store, "ranks": 1, **settled})
    )
    limit = member._averaging.most_state()  # before any step, as a process that joins has it
    train(model, member, 9)
    sent = len(to_bytes(member._averaging.shared_state()))
    member.close()
    assert sent <= limit <= sent + FEW


def test_a_learning_rate_of_numpy_reaches_who_joins(store: TCPStore) -> None:
    model = make_model()
    sgd = optim.SGD(model.parameters(), lr=np.float64(0.25))
    member = LocalSteps(sgd, model, **grouped({"store": store, "ranks": 1, **SETTINGS}))
    state = from_bytes(to_bytes(member._averaging.shared_state()))
    member.close()
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.25


STATEFUL: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adagrad": optim.Adagrad,  # has its state before the first step
    "amsgrad": partial(optim.Adam, amsgrad=True),
    "asgd": optim.ASGD,  # its step needs values
    "lbfgs": partial(optim.LBFGS, history_size=3, lr=0.001),  # its step needs a closure
}


@pytest.mark.parametrize("name", STATEFUL)
def test_the_limit_is_the_size_of_an_optimizers_state(name: str) -> None:
    if name == "adagrad" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("it cannot be copied there, and has the wide limit")
    model = make_model()
    optimizer = STATEFUL[name](model.parameters())
    limit = most_bytes(optimizer)
    train(model, optimizer, 5)
    sent = len(to_bytes(optimizer.state_dict()))
    assert sent <= limit <= sent + FEW
    assert most_bytes(optimizer) >= sent


class Peculiar(optim.SGD):
    """Has attributes that no copy has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.own = torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.own += 1
        return super().step(closure)


def test_an_optimizer_that_cannot_be_copied_has_a_wide_limit() -> None:
    model = make_model()
    optimizer = Peculiar(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    assert 256 * 4 * numel < most_bytes(optimizer) < 300 * 4 * numel
    assert not optimizer.own.any()
    assert not optimizer.state
