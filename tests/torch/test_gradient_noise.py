"""GradientNoise: estimates of the power of an average gradient, by ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from gradwire.torch.optimizers.gradient_noise import (
    GradientNoise,
    average_norm,
    count_decay,
    norms_of,
)

NUMELS = [1003, 64, 3, 1]


def train(ranks: int, common: float, noise: float, steps: int = 60) -> list[GradientNoise]:
    """Every rank's gradient is a common part and its own noise, new in each step."""
    generator = torch.Generator().manual_seed(1)
    estimates = [GradientNoise(NUMELS, ranks) for _ in range(ranks)]
    for _ in range(steps):
        mean = torch.zeros(estimates[0].numel)
        shared = [torch.randn(n, generator=generator) for n in NUMELS]
        for estimate in estimates:
            own = [torch.randn(n, generator=generator) for n in NUMELS]
            sketch = torch.full_like(mean, torch.nan)
            gradients = [common * s + noise * o for s, o in zip(shared, own, strict=True)]
            estimate.sketch(gradients, sketch, norms_of(gradients).tolist())
            mean += sketch / ranks
        for estimate in estimates:
            estimate.update(mean)
    return estimates


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_gains_are_between_one_and_the_root_of_the_ranks(ranks: int) -> None:
    for common, noise, expected in (
        (1.0, 0.0, 1.0),
        (0.0, 1.0, math.sqrt(ranks)),
        (1.0, 1.0, math.sqrt(2.0 / (1.0 + 1.0 / ranks))),
    ):
        for estimate in train(ranks, common, noise):
            gains = estimate.gains()
            assert gains[:2] == pytest.approx([expected, expected], rel=0.15)
            assert 1.0 <= min(gains) <= max(gains) <= math.sqrt(ranks)


def test_a_gradient_whose_norm_overflows_is_forgotten() -> None:
    """In float32 its norm is infinite."""
    estimate, mean = GradientNoise(NUMELS, 4), torch.zeros(GradientNoise(NUMELS, 4).numel)
    for size in (1e20, *[1.0] * 6000):
        gradients = [torch.full((n,), size) for n in NUMELS]
        estimate.sketch(gradients, mean, norms_of(gradients).tolist())
        estimate.update(mean)
    assert estimate.power.isfinite().all()
    assert estimate.gains() == pytest.approx([1.0] * 4, rel=0.1)


def test_average_norm_is_that_of_the_average() -> None:
    gradients = [torch.ones(n) for n in NUMELS]
    own = sum(NUMELS) ** 0.5
    assert average_norm([GradientNoise(NUMELS, 4)], gradients) == pytest.approx(own)
    noisy = train(4, common=0.0, noise=1.0)[0]
    assert average_norm([noisy], gradients) == pytest.approx(own / 2, rel=0.1)
    assert average_norm([noisy], [None] * len(NUMELS)) == 0.0


def test_a_tensor_without_gradient_has_gain_one() -> None:
    estimate = GradientNoise(NUMELS, 4)
    sketch = torch.full((estimate.numel,), torch.nan)
    gradients = [None, None, torch.ones(3), None]
    estimate.sketch(gradients, sketch, norms_of(gradients).tolist())
    assert torch.equal(sketch.view(4, -1).abs().sum(dim=1) > 0, torch.tensor([0, 0, 1, 0]) > 0)
    estimate.update(sketch)
    assert estimate.gains() == [1.0, 1.0, 1.0, 1.0]


def test_a_state_goes_on_bit_for_bit() -> None:
    whole, first = train(2, 1.0, 1.0)[0], train(2, 1.0, 1.0)[0]
    rest = GradientNoise(NUMELS, 2)
    rest.load_state_dict(first.state_dict())
    gradients = [torch.ones(n) for n in NUMELS]
    for estimate in (whole, rest):
        sketch = torch.zeros(estimate.numel)
        estimate.sketch(gradients, sketch, norms_of(gradients).tolist())
        estimate.update(sketch)
    assert whole.gains() == rest.gains() != first.gains()
    with pytest.raises(ValueError, match="the state has 4 tensors, this rank has 1"):
        GradientNoise([5], 2).load_state_dict(first.state_dict())


def adamw_of_pytorch_2_6(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = AdamW(parameters, lr=0.1, weight_decay=0.5)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    return optimizer


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (adamw_of_pytorch_2_6, 0.95),
        (lambda p: AdamW(p, lr=0.1, weight_decay=0.5), 0.95),
        (lambda p: Adam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), 0.95),
        (lambda p: Adafactor(p, lr=0.1, weight_decay=0.5), 0.95),
        (lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.5), 0.95),
        (lambda p: Adam(p, lr=0.1, weight_decay=0.5), 1.0),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.5), 1.0),
    ],
)
def test_decoupled_decay_is_counted_where_there_is_a_gradient(
    make: Callable[[list[nn.Parameter]], Optimizer], share: float
) -> None:
    parameters = [nn.Parameter(torch.ones(2, 1)) for _ in range(3)]
    kept = [1.0, 1.0, 0.5]
    count_decay(make(parameters), kept, [True, False, True])
    assert kept == [share, 1.0, 0.5 * share]
