"""Several optimizers in a list: Muon for the matrices of a model, AdamW for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Muon, Optimizer, SparseAdam

from frozen import INPUTS, Distances, loss
from gradwire.torch import LocalSteps, ShardedOptimizer, compress, loopback
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.optimizer_list import OptimizerList
from odd_optimizers import OwnRate
from training import digest
from ways import integers

RAW = "raw"
Make = Callable[[nn.Module], list[Optimizer]]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [Muon(matrices, lr=1e-3), AdamW(rest, lr=1e-3)]


def train(
    make: Make, steps: int = 6, dtype: torch.dtype = torch.float32, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """The parameters of each rank in the end."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        model = Distances().to(dtype)
        optimizer = LocalSteps(make(model), model, **options)
        for step in range(steps):
            optimizer.zero_grad()
            model(integers(INPUTS, seed=1000 * step + rank).to(dtype)).backward()
            optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    return loopback.run(2, job)


def test_each_steps_its_own_parameters_as_it_would_alone() -> None:
    """One rank and no codec: nothing but the two optimizers decides."""

    def job(rank: int) -> list[torch.Tensor]:
        model = Distances()
        optimizer = LocalSteps(muon_and_adamw(model), model, RAW, late_momentum=False)
        for step in range(5):
            optimizer.zero_grad()
            loss(model, 0, step).backward()
            optimizer.step()
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    (found,) = loopback.run(1, job)
    model = Distances()
    optimizers = muon_and_adamw(model)
    for step in range(5):
        model.zero_grad()
        loss(model, 0, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [RAW, "3lc:s=1.00,coder=rice"])
@pytest.mark.parametrize("every", [1, 3])
def test_ranks_agree_and_move(codec: str, every: int, dtype: torch.dtype) -> None:
    first, second = train(muon_and_adamw, codec=codec, every=every, dtype=dtype)
    for name, start in Distances().to(dtype).named_parameters():
        assert torch.equal(first[name], second[name])
        assert not torch.equal(first[name], start), name


def test_momentum_is_late_for_adam_alone() -> None:
    """Muon's matrices go as with Muon alone, and AdamW's tensors as with AdamW alone."""
    together, _ = train(muon_and_adamw, codec=RAW, every=2)
    for index in range(2):

        def one(model: nn.Module, index: int = index) -> list[Optimizer]:
            return [muon_and_adamw(model)[index]]

        alone, _ = train(one, codec=RAW, every=2)
        for name, start in Distances().named_parameters():
            if (start.dim() == 2) == (index == 0):
                torch.testing.assert_close(alone[name], together[name], rtol=1e-6, atol=1e-7)


def test_a_state_goes_on_bit_for_bit() -> None:
    def job(rank: int, at: int | None) -> list[torch.Tensor]:
        model = Distances()
        optimizer = LocalSteps(muon_and_adamw(model), model, every=2)
        for step in range(8):
            if step == at:
                saved, values = optimizer.state_dict(), model.state_dict()
                optimizer.close()
                model = Distances()
                model.load_state_dict(values)
                optimizer = LocalSteps(muon_and_adamw(model), model, every=2)
                optimizer.load_state_dict(saved)
                model.load_state_dict(values)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    for through, stopped in zip(
        loopback.run(2, lambda rank: job(rank, None)),
        loopback.run(2, lambda rank: job(rank, 5)),
        strict=True,
    ):
        assert all(map(torch.equal, through, stopped))


def test_schedulers_of_the_parts_and_of_the_whole_count() -> None:
    def job(rank: int) -> list[float]:
        model = Distances()
        parts = muon_and_adamw(model)
        optimizer = LocalSteps(parts, model, RAW)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        one = torch.optim.lr_scheduler.LambdaLR(parts[1], lambda step: 0.1**step)
        loss(model, rank, 0).backward()
        optimizer.step()
        schedule.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the part itself was not stepped by the user
            one.step()
        rates.append(parts[1].param_groups[0]["lr"])
        optimizer.close()
        return rates

    ((first, second, third), _) = loopback.run(2, job)
    assert (first, second) == pytest.approx((5e-4, 5e-4))
    assert third == pytest.approx(1e-4)  # of the rate with which its scheduler began


def test_compress_takes_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    def job(rank: int) -> str:
        model = Distances()
        optimizer = compress(model, muon_and_adamw(model), every=2)
        loss(model, rank, 0).backward()
        optimizer.step()
        optimizer.close()
        return type(optimizer).__name__

    assert loopback.run(2, job) == ["LocalSteps", "LocalSteps"]
    assert "LocalSteps with 3lc:s=1.00,coder=rice for Muon and AdamW" in capsys.readouterr().err


def shared(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=1), SGD(list(model.children())[-1].parameters(), lr=1)]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda model: [], ValueError, "the list of optimizers is empty"),
        (shared, ValueError, "the SGD and an optimizer before it in the list step the same"),
        (lambda m: [SGD(m.parameters(), lr=1), m], TypeError, "the first is a Distances"),
        (
            lambda m: [SGD(list(m.first.parameters()), lr=1), LBFGS(m.last.parameters())],
            ValueError,
            "LBFGS computes gradients in its step",
        ),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(
    make: Any, error: type[Exception], said: str
) -> None:
    def job(rank: int) -> None:
        model = Distances()
        LocalSteps(make(model), model)

    with pytest.raises(error, match=said):
        loopback.run(1, job)


def test_a_part_that_the_user_steps_is_named() -> None:
    def job(rank: int) -> None:
        model = Distances()
        parts = muon_and_adamw(model)
        optimizer = LocalSteps(parts, model)
        loss(model, rank, 0).backward()
        try:
            parts[0].step()
        finally:
            optimizer.close()

    with pytest.raises(RuntimeError, match="Muon was stepped itself, but LocalSteps wraps it"):
        loopback.run(1, job)


def test_states_and_groups_are_those_of_the_parts() -> None:
    model = Distances()
    parts = muon_and_adamw(model)
    whole = OptimizerList(parts)
    assert [len(group["params"]) for group in whole.param_groups] == [3, 5]
    assert len(whole.state) == 0
    loss(model, 0, 0).backward()
    before = model.last.bias.detach().clone()
    assert whole.step(lambda: torch.ones(())) == 1
    assert not torch.equal(before, model.last.bias)
    assert len(whole.state) == 8
    assert whole.state[model.last.bias] is parts[1].state[model.last.bias]
    assert whole.state.get(nn.Parameter(torch.zeros(1)), {}) == {}
    saved = whole.state_dict()
    whole.state.clear()
    assert not parts[0].state
    assert not parts[1].state
    whole.load_state_dict(saved)
    assert len(whole.state) == 8
    with pytest.raises(ValueError, match="zip"):
        OptimizerList(parts[:1]).load_state_dict(saved)


def test_who_takes_a_list_is_named() -> None:
    model = Distances()
    with pytest.raises(TypeError, match=r"the first is a list \(LocalSteps takes several\)"):
        ShardedOptimizer(muon_and_adamw(model), model)  # type: ignore[arg-type]


def test_an_optimizer_that_finds_options_from_its_own_gradients_is_told_where_it_goes() -> None:
    with pytest.raises(
        PeerMismatchError, match=r"'d of group 0 .* goes with DDP and gradwire_hook"
    ):
        train(lambda model: [OwnRate(model.parameters())], codec=RAW)


def test_sparse_gradients_go_beside_those_whose_noise_is_corrected() -> None:
    def train_sparse(rank: int, clip_norm: float | None = None, every: int = 1) -> Any:
        torch.manual_seed(0)
        rows, layer = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 2)
        model = nn.Sequential(rows, layer)
        inner = [SparseAdam(rows.parameters(), lr=0.1), AdamW(layer.parameters(), lr=0.1)]
        optimizer = LocalSteps(inner, model, every=every, clip_norm=clip_norm)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.tensor([rank, 20 + step])).square().sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return digest(model), optimizer.stats().gains

    for every in (1, 2):
        one, other = loopback.run(2, partial(train_sparse, every=every))
        assert one[0] == other[0]
        assert one[1][0] == 1.0
        assert max(one[1][1:]) > 1.0
    with pytest.raises(TypeError, match=r"of 0\.weight is sparse .* ones: leave out clip_norm, or"):
        loopback.run(2, partial(train_sparse, clip_norm=1.0))

    def train_adagrad(rank: int) -> None:
        model = nn.Embedding(40, 8, sparse=True)
        optimizer = LocalSteps(Adagrad(model.parameters()), model)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match="of dense ones: give correct_noise=False, or make its nn"):
        loopback.run(2, train_adagrad)
