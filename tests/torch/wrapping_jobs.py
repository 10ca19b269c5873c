"""Optimizers with ways of their own, and what becomes of those that are wrapped."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import LocalSteps, ServerOptimizer
from gradwire.torch.errors import CommunicationError
from gradwire.torch.options import grouped
from sharing_jobs import SERVED, WAYS, Tied, Training


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at a point uphill."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        places = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in places]).norm()
        for p in places:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05 / float(norm))

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates a mean of its points (Defazio et al. 2024), with their protocol."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "training": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["training"]
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            z.sub_(p.grad, alpha=0.1)
            p.lerp_(z, 0.5)

    def train(self) -> None:
        self._switch(to_mean=False)

    def eval(self) -> None:
        self._switch(to_mean=True)

    @torch.no_grad()
    def _switch(self, to_mean: bool) -> None:
        if self.param_groups[0]["training"] == to_mean:
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["z"], -1.0 if to_mean else 0.5)
            self.param_groups[0]["training"] = not to_mean


class Lookahead(torch.optim.SGD):
    """Goes back to slow weights in every fifth step (Zhang et al. 2019)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("slow", p.detach().clone())
        super().step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Sharp": Sharp,
    "ScheduleFree": ScheduleFree,
    "Lookahead": Lookahead,
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "LBFGS": torch.optim.LBFGS,
}


def step_with(way: str, name: str) -> str:
    """What is said in four steps of that optimizer."""
    model = Tied()
    inner = OPTIMIZERS[name](model.parameters())
    optimizer: Any = None
    try:
        optimizer = WAYS[way](inner, model)
        training = Training(model, inner, optimizer, {})

        def closure() -> float:
            optimizer.zero_grad()
            training.backward()
            return 0.0

        for _ in range(4):
            closure()
            optimizer.step(closure)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        if optimizer is not None:
            optimizer.close()
    return "nothing"


def clip_sharply(clip_norm: float | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The parameters after steps of sharpness-aware minimization: in LocalSteps, and alone with
    clip_grad_norm_."""

    def train(wraps: bool) -> list[np.ndarray]:
        model = Tied()
        inner = Sharp(model.parameters())
        optimizer: Any = inner
        if wraps:
            optimizer = LocalSteps(inner, model, codec="raw", clip_norm=clip_norm)
        training = Training(model, inner, optimizer, {})

        def closure() -> None:
            optimizer.zero_grad()
            training.backward()
            if not wraps and clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

        for _ in range(4):
            closure()
            optimizer.step(closure)
        return [p.detach().numpy().copy() for p in model.parameters()]

    return train(True), train(False)


def evaluate_schedule_free() -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Three ranks, of which the last serves averages: the models in eval() and again in train()."""
    model = Tied()
    inner = ScheduleFree(model.parameters())
    optimizer = ServerOptimizer(inner, model=model, pulls="gradients", **grouped(SERVED))
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return None
    training = Training(model, inner, optimizer, {})
    for _ in range(3):
        training.step()
    in_training = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    evaluated = [p.detach().numpy().copy() for p in model.parameters()]
    optimizer.train()
    for parameter, before in zip(model.parameters(), in_training, strict=True):
        torch.testing.assert_close(parameter.detach(), before)
    trained = [p.detach().numpy().copy() for p in model.parameters()]
    optimizer.close()
    return evaluated, trained


def leave_local_steps() -> dict[str, Any]:
    """An AdamW during LocalSteps, and after it."""
    model = Tied()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = LocalSteps(inner, model, every=2, codec="raw")
    training = Training(model, inner, optimizer, {})
    found: dict[str, Any] = {"modes": [hasattr(optimizer, mode) for mode in ("train", "eval")]}
    for step in range(3):
        training.step()
        found[f"betas {step}"] = inner.state_dict()["param_groups"][0]["betas"]
    model.first.weight.data = torch.zeros_like(model.first.weight)
    try:
        training.step()
    except RuntimeError as error:
        found["edited"] = str(error)
    optimizer.close()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(inner.state_dict())
    found["betas after"] = other.param_groups[0]["betas"]
    training.backward()
    inner.step()
    for _ in range(2):  # the second takes over from the first, which was given up
        training.optimizer = LocalSteps(inner, model, codec="raw")
    training.step()
    return found


def refusals_of_outer() -> list[str]:
    said = []
    model = Tied()

    def make(outer: Any) -> LocalSteps:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return LocalSteps(inner, model, outer=outer, codec="raw")

    made: list[torch.optim.Optimizer] = []

    def keep(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=1.0))
        return made[-1]

    def step_without_one() -> None:
        optimizer = make(keep)
        del made[-1].param_groups[0]["params"][0]
        optimizer.step()

    calls: list[Callable[[], Any]] = [
        lambda: make(lambda parameters: torch.optim.SGD(model.parameters(), lr=1.0)),
        lambda: make(lambda parameters: None),
        step_without_one,
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def thaw() -> str | None:
    """A layer that was frozen in `connect` is trained with barrier="tensor"."""
    model = Tied()
    model.first.requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = WAYS["served by the tensor"](inner, model)
    optimizer.connect()
    if optimizer.is_server:
        with contextlib.suppress(CommunicationError):
            optimizer.serve()
        return None
    training = Training(model, inner, optimizer, {})
    training.step()
    torch.save(model, io.BytesIO())  # the hooks on it are no part of a copy
    copied = copy.deepcopy(model)
    model.first.requires_grad_(True)
    try:
        training.step()
    except RuntimeError as error:
        copied(torch.ones(1, 6))
        return str(error)
    return "nothing"


def move_qsvrg() -> tuple[list[np.ndarray], str]:
    """An epoch from other parameters than the last epoch's, by two ways; and what a copy says."""
    inputs, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)), torch.ones(12)
    weight = nn.Parameter(torch.zeros(4))

    def loss_of(j: torch.Tensor) -> torch.Tensor:
        return (inputs[j] @ weight - labels[j]).square().mean() / 2

    results: list[np.ndarray] = []
    for is_loaded in (False, True):
        weight.data.zero_()
        largest = float(inputs.square().sum(dim=1).max())
        optimizer = QSVRG([weight], loss_of, 12, smoothness=largest, convexity=0.1 * largest)
        optimizer.epoch()
        if is_loaded:
            optimizer.load_state_dict({**optimizer.state_dict(), "values": torch.ones(4)})
        else:
            with torch.no_grad():
                weight.fill_(1.0)
        optimizer.epoch()
        results.append(weight.detach().numpy().copy())
    try:
        copy.deepcopy(optimizer)
    except TypeError as error:
        return results, str(error)
    return results, "nothing"
