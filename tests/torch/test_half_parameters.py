"""Parameters of 16 bits: gradwire keeps their values in float32, so that no change is lost."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from frozen import INPUTS, Distances
from gradwire.torch import LocalSteps, ShardedOptimizer, loopback, outer_nesterov
from ways import WAYS, build, integers

THREE_LC = "3lc:s=1.00,coder=rice"
STEPS = 6
MIXED = [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("dtypes", [MIXED[:1], MIXED[2:], MIXED], ids=["bf16", "f16", "mixed"])
@pytest.mark.parametrize("outer", [None, outer_nesterov()])
def test_local_steps_keep_what_16_bits_cannot_hold(dtypes: list[torch.dtype], outer: Any) -> None:
    """The parameters are the roundings of float32 values, which take the average changes."""
    every, steps = 4, 200
    targets = [integers(300, seed=rank).div(100) for rank in range(2)]

    def make_models() -> nn.ParameterList:
        return nn.ParameterList([torch.zeros(300, dtype=dtype) for dtype in dtypes])

    def inner_of(model: nn.ParameterList) -> SGD:
        return SGD(model.parameters(), lr=2e-3, momentum=0.5)

    def step_alone(model: nn.ParameterList, optimizer: Any, rank: int) -> None:
        optimizer.zero_grad()
        for parameter in model:
            ((parameter - targets[rank].to(parameter.dtype)) ** 2).sum().backward()
        optimizer.step()

    def job(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_models()
        optimizer = LocalSteps(inner_of(model), model, "raw", every=every, outer=outer)
        for _ in range(steps):
            step_alone(model, optimizer, rank)
        anchors = [anchor.clone() for anchor in optimizer.anchors().values()]
        optimizer.close()
        return [parameter.detach() for parameter in model], anchors

    exact = nn.ParameterList([torch.zeros(300) for _ in dtypes])
    outside = SGD(exact.parameters(), lr=1.0) if outer is None else outer(list(exact))
    models = [make_models() for _ in range(2)]
    optimizers = [inner_of(model) for model in models]
    for _ in range(steps // every):
        changes = []
        for rank, model in enumerate(models):
            for parameter, whole in zip(model, exact, strict=True):
                parameter.data.copy_(whole.detach())
            begun = [w.detach().to(p.dtype).float() for w, p in zip(exact, model, strict=True)]
            for _ in range(every):
                step_alone(model, optimizers[rank], rank)
            changes.append([b - p.detach().float() for b, p in zip(begun, model, strict=True)])
        for whole, first, second in zip(exact, *changes, strict=True):
            whole.grad = (first + second) / 2
        outside.step()
    for values, anchors in loopback.run(2, job):
        for parameter, anchor, whole, dtype in zip(values, anchors, exact, dtypes, strict=True):
            assert torch.equal(anchor, whole.detach())
            assert torch.equal(parameter, whole.detach().to(dtype))


def wrap(owner: type[LocalSteps | ShardedOptimizer], model: nn.Module, every: int = 1) -> Any:
    """With momentum, so that LocalSteps applies it late."""
    adam = AdamW(model.parameters(), lr=1e-3)
    if owner is LocalSteps:
        return LocalSteps(adam, model, "raw", every=every)
    return ShardedOptimizer(adam, model, "raw")


@pytest.mark.parametrize("owner", [LocalSteps, ShardedOptimizer])
def test_16_bits_that_are_put_back_were_not_changed(owner: Any) -> None:
    """As they are to evaluate an average of the weights."""

    def job(rank: int, looks_away: bool) -> list[torch.Tensor]:
        model = Distances().to(torch.bfloat16)
        optimizer = wrap(owner, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(integers(INPUTS, seed=10 * step + rank).bfloat16()).backward()
            optimizer.step()
            if looks_away:
                kept = {name: values.clone() for name, values in model.state_dict().items()}
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                    for name, parameter in model.named_parameters():
                        parameter.copy_(kept[name])
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    for usual, back in zip(
        loopback.run(2, lambda rank: job(rank, False)),
        loopback.run(2, lambda rank: job(rank, True)),
        strict=True,
    ):
        assert all(map(torch.equal, usual, back))


@pytest.mark.parametrize("owner", [LocalSteps, ShardedOptimizer])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_state_of_another_dtype_is_refused(owner: Any, saved: torch.dtype) -> None:
    other = torch.bfloat16 if saved == torch.float32 else torch.float32

    def job(rank: int) -> None:
        optimizer = wrap(owner, Distances().to(saved), every=2)
        state = optimizer.state_dict()
        optimizer.close()
        with pytest.raises(ValueError, match="parameters of 16 bits"):
            wrap(owner, Distances().to(other), every=2).load_state_dict(state)

    loopback.run(2, job)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_late_momentum_begins_where_16_bits_begin(dtype: torch.dtype) -> None:
    """On each rank at rank 0's values, and not at those that memory happens to hold."""

    def spoilt(values: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.full_like(values, torch.nan, **options)

    def job(rank: int) -> list[float]:
        model = nn.ParameterList([torch.full((64,), 3.0 + rank, dtype=dtype)])
        adam = AdamW(model.parameters(), lr=0.25, weight_decay=0, eps=1e-4)
        optimizer = LocalSteps(adam, model, "raw", every=4)
        seen = []
        for _ in range(3):  # before the first exchange
            model[0].grad = torch.ones(64, dtype=dtype)
            optimizer.step()
            seen.append(model[0][0].item())
        optimizer.close()
        return seen

    with mock.patch.object(torch, "empty_like", spoilt):
        found = loopback.run(2, job)
    assert found[0] == found[1] == pytest.approx([2.75, 2.5, 2.25], abs=0.02)


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_an_eps_that_is_0_in_float16_is_named(eps: float) -> None:
    def job(rank: int) -> bool:
        model = nn.ParameterList([torch.ones(64, dtype=torch.float16)])
        optimizer = LocalSteps(AdamW(model.parameters(), lr=0.1, eps=eps), model, "raw")
        model[0].grad = torch.full((64,), 1e-5, dtype=torch.float16)  # its square is 0
        optimizer.step()
        optimizer.close()
        return torch.equal(model[0].detach(), torch.ones(64, dtype=torch.float16))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stays = loopback.run(2, job)
    told = ["eps=1e-08 of AdamW is 0 in float16" in str(one.message) for one in said]
    assert (any(told), stays) == ((True, [True, True]) if eps == 1e-8 else (False, [False, False]))


def test_changes_below_a_step_of_bfloat16_add_up() -> None:
    """One of four ranks moves a value by one step of bfloat16: a quarter of that on average."""
    start, step = 1.0, 2.0**-7

    def job(rank: int) -> list[float]:
        model = nn.ParameterList([torch.full((64,), start, dtype=torch.bfloat16)])
        optimizer = LocalSteps(SGD(model.parameters(), lr=1.0), model, "raw")
        seen = []
        for _ in range(8):
            model[0].grad = torch.full((64,), -step if rank == 0 else 0.0, dtype=torch.bfloat16)
            optimizer.step()
            seen.append(float(model[0][0]))
        optimizer.close()
        return seen

    (seen, *others) = loopback.run(4, job)
    assert all(other == seen for other in others)
    assert seen[-1] == start + 2 * step


@pytest.mark.parametrize("codec", ["raw", "int8", THREE_LC])
def test_a_sharded_optimizer_steps_float32_values_of_16_bit_parameters(codec: str) -> None:
    """As if the model were float32 and rounded its parameters before each use; dtypes are mixed."""
    steps = 200
    dtypes = {"first": torch.bfloat16, "second": torch.float32, "last": torch.float16}

    def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
        return values.to(dtypes.get(name.partition(".")[0], torch.bfloat16))

    def make() -> Distances:
        model = Distances()
        for name, parameter in model.named_parameters():
            parameter.data = rounded(name, parameter.data / 64)  # float16 ends at 65504
        return model

    def job(rank: int, is_whole: bool) -> list[torch.Tensor]:
        model = make().float() if is_whole else make()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = ShardedOptimizer(inner, model, codec)
        for step in range(steps):
            optimizer.zero_grad()
            x = integers(INPUTS, seed=10 * step + rank) / 64
            for name, parameter in model.named_parameters():
                used = rounded(name, parameter)
                difference = used - x[: used.numel()].view_as(used).to(used.dtype)
                (difference * difference).sum().backward()
            optimizer.step()
            if step == 6:  # and goes on from a state
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        return [rounded(name, p.detach()) for name, p in model.named_parameters()]

    narrow = loopback.run(2, lambda rank: job(rank, False))
    whole = loopback.run(2, lambda rank: job(rank, True))
    start = list(make().parameters())
    for ours, theirs in zip(narrow, whole, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert not any(map(torch.equal, ours, start))


@pytest.mark.parametrize("way", ["LocalSteps, AdamW", "LocalSteps, streaming", "ShardedOptimizer"])
def test_dtypes_may_be_mixed(way: str) -> None:
    def job(rank: int) -> list[torch.Tensor]:
        model = Distances()
        for parameter in model.parameters():
            parameter.data /= 64
        # (Adam's eps is 0 in float16.)
        least = torch.bfloat16 if WAYS[way].adam else torch.float16
        for layer, dtype in ((model.second, torch.bfloat16), (model.last, least)):
            layer.to(dtype)
        training = build(way, model)

        def loss(module: Any, rank: int, step: int) -> torch.Tensor:
            x = integers(INPUTS, seed=1000 * step + rank) / 64  # float16 ends at 65504
            layers = (layer(x.to(layer.weight.dtype)).float() for layer in module.children())
            return torch.stack(list(layers)).sum()

        training.run(STEPS, loss)
        training.settle()
        values = [v.clone() for v in training.values().values()]
        training.close()
        return values

    first, second = loopback.run(2, job)
    assert all(map(torch.equal, first, second))
    assert {torch.float32, torch.bfloat16} < {v.dtype for v in first} or WAYS[way].adam
