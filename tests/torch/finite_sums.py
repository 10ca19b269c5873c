"""Least squares and logistic regression, both L2-regularized, with the constants of theorems.

All functions f_j and their mean are known, so that the minimum is, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gradwire.contrib.qsvrg import QSVRG

N, M = 96, 200  # values, functions


@dataclass(frozen=True)
class FiniteSum:
    """`loss(weight, j)`: the mean of the functions j, each with `smoothness`-Lipschitz gradients;
    the mean of all is `convexity`-strongly convex. Both compute in the type of the weight."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    smoothness: float
    convexity: float

    def optimizer(
        self, weight: torch.nn.Parameter, count: int = 10, first: int = 0, **options: Any
    ) -> QSVRG:
        """For a worker with the functions from `first` on, `count` of them."""
        return QSVRG(
            [weight],
            lambda j: self.loss(weight, first + j),
            count,
            smoothness=self.smoothness,
            convexity=self.convexity,
            **options,
        )

    def value(self, weight: torch.Tensor) -> float:
        return float(self.loss(weight.detach().double(), torch.arange(M)))

    def minimum(self) -> float:
        """By Newton's method in float64."""
        weight = torch.zeros(N, dtype=torch.float64)
        for _ in range(30):
            weight.requires_grad_()
            loss = self.loss(weight, torch.arange(M))
            (gradient,) = torch.autograd.grad(loss, weight)
            hessian = torch.autograd.functional.hessian(
                lambda w: self.loss(w, torch.arange(M)), weight.detach()
            )
            weight = weight.detach() - torch.linalg.solve(hessian, gradient)
        return self.value(weight)


def _rows(seed: int) -> torch.Tensor:
    """Rows of length 1, with tails as heavy as those of gradients."""
    rows = torch.randn(M, N, generator=torch.Generator().manual_seed(seed)) ** 3
    return functional.normalize(rows)


def least_squares(regularization: float = 0.25) -> FiniteSum:
    """f_j(w) = (a_j w - b_j)^2 / 2 + regularization |w|^2 / 2, |a_j| = 1."""
    rows = _rows(1)
    targets = torch.randn(M, generator=torch.Generator().manual_seed(2))

    def loss(weight: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        left = rows.to(weight.dtype)[j] @ weight - targets.to(weight.dtype)[j]
        return left.square().mean() / 2 + regularization * weight.square().sum() / 2

    least = float(torch.linalg.eigvalsh(rows.double().T @ rows.double() / M)[0])
    return FiniteSum(loss, 1 + regularization, max(least, 0) + regularization)


def logistic_regression(regularization: float = 0.0625) -> FiniteSum:
    """f_j(w) = log(1 + exp(-b_j a_j w)) + regularization |w|^2 / 2, |a_j| = 1, b_j = 1 or -1."""
    rows = _rows(3)
    signs = torch.randn(M, generator=torch.Generator().manual_seed(4)).sign()

    def loss(weight: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        margins = signs.to(weight.dtype)[j] * (rows.to(weight.dtype)[j] @ weight)
        return functional.softplus(-margins).mean() + regularization * weight.square().sum() / 2

    return FiniteSum(loss, 0.25 + regularization, regularization)


PROBLEMS = {"least squares": least_squares, "logistic regression": logistic_regression}
