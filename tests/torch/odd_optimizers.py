"""Optimizers with ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


class Coded(torch.Tensor):
    """A state in few bits, of a class that knows few operations, as torchao's."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"Coded knows no {func}")


class InFewBits(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("moment", Coded(p))
        super().step()


class OwnRate(torch.optim.SGD):
    """Finds its step from the gradients that it is given, as Prodigy does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["d"] = float(sum(p.grad.abs().sum() for p in group["params"]))
        super().step()


class DecayOfMatrices(torch.optim.SGD):
    """Vectors do not decay, whatever their group says."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99 if p.dim() > 1 else 1.0)
        super().step()


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011): each step adds noise."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-3)
        super().step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Sharp": Sharp,
    "ScheduleFree": ScheduleFree,
    "Lookahead": Lookahead,
    "DecayOfMatrices": DecayOfMatrices,
    "Noisy": Noisy,
    "InFewBits": InFewBits,
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "LBFGS": torch.optim.LBFGS,
}
