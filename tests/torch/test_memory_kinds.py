"""Tensors whose values are not what lies in their memory: averaged rightly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD

import backend_jobs
from cluster import Cluster
from gradwire.torch import LocalSteps, ServerOptimizer, ShardedOptimizer
from ways import WAYS, build

STEPS = 4


class Negated(nn.Module):
    """Its gradient comes with PyTorch's negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(1)
        return torch.complex(ones, self.w).conj().resolve_conj().conj().imag * x


def gradient_is_negative(x: float) -> bool:
    model = Negated()
    model(torch.tensor([x])).sum().backward()
    assert model.w.grad is not None
    return model.w.grad.is_neg()


def weights_of(way: str) -> list[float]:
    """After each step with the codec raw, from ranks whose gradients are 1 and 2."""
    training = build(way, Negated(), lambda parameters: SGD(parameters, lr=0.25), codec="raw")
    found: list[float] = []

    def note(step: int) -> None:
        weight: Any = training.model.w
        found.append(float(weight.full_tensor() if training.way.kind == "fsdp" else weight))

    training.run(STEPS, lambda module, rank, step: module(torch.tensor([1.0 + rank])).sum(), note)
    training.settle()
    training.close()
    return found


def odd_parameters() -> dict[str, nn.Module]:
    freed = nn.Linear(8, 8)
    freed.weight.data.untyped_storage().resize_(0)
    halved = nn.Linear(8, 8)
    halved.weight.data.untyped_storage().resize_(128)
    with FakeTensorMode():
        fake = nn.Linear(8, 8)
    negative = nn.Linear(8, 8)
    negative.weight = nn.Parameter(torch._neg_view(torch.ones(8, 8)))
    return {"freed": freed, "halved": halved, "fake": fake, "negative": negative}


def odd_buffers() -> dict[str, nn.Module]:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    models: dict[str, nn.Module] = {}
    for kind, buffer in {"freed": freed, "negative": torch._neg_view(torch.ones(8))}.items():
        models[f"buffer {kind}"] = nn.Linear(8, 8)
        models[f"buffer {kind}"].register_buffer("counts", buffer)
    return models


def refusals() -> dict[str, str]:
    """What each optimizer says of each odd parameter or buffer."""
    ways: dict[str, Callable[[Any, nn.Module], object]] = {
        "LocalSteps": LocalSteps,
        "ShardedOptimizer": ShardedOptimizer,
        "ServerOptimizer": lambda inner, model: ServerOptimizer(inner, model=model),
    }
    said = {}
    for kind, model in (odd_parameters() | odd_buffers()).items():
        for way, make in ways.items():
            if way == "ServerOptimizer" and "buffer" in kind:
                continue  # it takes none over here
            try:
                make(SGD(model.parameters(), lr=0.1), model)
                said[f"{way}, {kind}"] = "taken"
            except TypeError as error:
                said[f"{way}, {kind}"] = str(error)
    return said


def _free_gradient(model: nn.Linear) -> None:
    assert model.weight.grad is not None
    model.weight.grad.untyped_storage().resize_(0)


def _halve_gradient(model: nn.Linear) -> None:
    model.weight.grad = torch.ones(8, 8).t()  # not contiguous
    model.weight.grad.untyped_storage().resize_(128)


def _free_parameter(model: nn.Linear) -> None:
    freed = torch.ones(8, 8)
    freed.untyped_storage().resize_(0)
    model.weight.data = freed


DEEDS = {"freed": _free_gradient, "halved": _halve_gradient, "parameter": _free_parameter}
STEPPED: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: LocalSteps(SGD(model.parameters(), lr=0.1), model),
    "AdamW": lambda model: LocalSteps(torch.optim.AdamW(model.parameters()), model),
    "clipped": lambda model: LocalSteps(SGD(model.parameters(), lr=0.1), model, clip_norm=1.0),
    "closure": lambda model: LocalSteps(torch.optim.LBFGS(model.parameters()), model),
    "sharded": lambda model: ShardedOptimizer(SGD(model.parameters(), lr=0.1), model),
    "server": lambda model: ServerOptimizer(
        SGD(model.parameters(), lr=0.1), model=model, codec="raw"
    ),
}


def freed_in_training() -> dict[str, str]:
    """What each optimizer says of memory that was freed or cut on rank 0 after two steps."""
    said = {}
    for way, make in STEPPED.items():
        for name, deed in DEEDS.items():
            if way == "closure" and name == "parameter":
                continue
            if text := _train_and_free(make, deed, with_closure=way == "closure"):
                said[f"{way}, {name}"] = text
    return said


def _train_and_free(
    make: Callable[[nn.Module], Any], deed: Callable[[nn.Linear], None], with_closure: bool
) -> str:
    model = nn.Linear(8, 8)
    optimizer = make(model)
    if getattr(optimizer, "is_server", False):
        try:
            optimizer.serve()
        except RuntimeError:
            return ""
        raise AssertionError("the workers ended")

    def evaluate(frees: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        if frees:
            deed(model)
        return loss

    try:
        for step in range(3):
            frees = step == 2 and dist.get_rank() == 0
            if with_closure:
                optimizer.step(partial(evaluate, frees))
            else:
                evaluate(frees)
                optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()
    return "taken"


def test_autograd_makes_gradients_with_the_negative_bit() -> None:
    assert gradient_is_negative(1.0)


@pytest.mark.parametrize(
    "way",
    [
        "hook",
        "LocalSteps, every step",
        "ShardedOptimizer",
        "servers",
        "servers, gradients",
        "FSDP2",
    ],
)
def test_gradients_with_the_negative_bit_keep_their_sign(cluster: Cluster, way: str) -> None:
    workers = 2
    found = cluster.run(workers + WAYS[way].servers, weights_of, way)
    assert found[:workers] == [[0.625, 0.25, -0.125, -0.5]] * workers


def test_parameters_without_their_values_are_refused_by_name(cluster: Cluster) -> None:
    for said in cluster.run(2, refusals):
        assert len(said) == 12 + 4
        for case, text in said.items():
            kept = "is stored as its negative" if "negative" in case else "not hold its values"
            assert text.startswith("the buffer counts" if "buffer" in case else "weight"), case
            assert kept in text, case


def test_memory_that_is_freed_in_a_training_is_named(cluster: Cluster) -> None:
    said, of_others = cluster.run(2, freed_in_training)[:2]
    assert len(said) == 6 * 3 - 1
    for case, text in said.items():
        if "parameter" in case:
            assert text.startswith("RuntimeError: the memory of weight was freed after"), case
        else:
            assert text.startswith("TypeError: the gradient of weight is a Tensor whose"), case
    assert not any(text == "taken" for text in of_others.values())


def test_the_backend_resolves_the_negative_bit(cluster: Cluster) -> None:
    options = {"all_reduce": "raw", "min_numel": 1}
    for is_right, _ in cluster.run(2, backend_jobs.over_backend, "reduce a negative", options):
        assert is_right
