"""Buffers and parameters of unusual kinds are taken over as they are, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from cluster import Cluster
from gradwire.torch import LocalSteps, ServerOptimizer, ShardedOptimizer


def _make(kind: str, value: float) -> torch.Tensor:
    if kind == "sparse":
        return torch.tensor([value, 0.0, 1.0, 0.0]).to_sparse()
    if kind == "expanded":
        return torch.full((1,), value).expand(4)
    if kind == "meta":
        return torch.empty(4, device="meta")
    if kind == "conjugate":
        return torch.full((4,), complex(value, value)).conj()
    with torch.inference_mode(kind == "inference"):
        return torch.full((4,), value)


def _train(model: nn.Module, way: str) -> None:
    local = SGD(model.parameters(), lr=0.1)
    optimizer: Any
    if way == "server":
        optimizer = ServerOptimizer(local, model=model, buffers_from=0, buffers_every=1)
        optimizer.connect()
        if optimizer.is_server:
            optimizer.serve()
            return
    else:
        optimizer = {"local": LocalSteps, "sharded": ShardedOptimizer}[way](local, model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.close()


def train_with_buffer(way: str, kind: str, ignored: bool) -> tuple[str, list[complex]]:
    """What was said, and the buffer's values afterwards. Ranks begin with 1, 2, ..."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("table", _make(kind, dist.get_rank() + 1.0))
    if ignored:
        names = ["0.table"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    said = ""
    try:
        _train(model, way)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    table = model.get_buffer("0.table")
    return said, [] if table.is_meta else [complex(v) for v in table.to_dense().tolist()]


def refusals_of_parameters(way: str) -> dict[str, str]:
    """What is said to a parameter of each kind."""
    said = {}
    for kind, dtype in (("complex", torch.complex64), ("double", torch.float64)):
        model = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
        said[kind] = _refusal(model, way)
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    said["inference"] = _refusal(model, way)
    return said


def _refusal(model: nn.Module, way: str) -> str:
    try:
        _train(model, way)
    except TypeError as error:
        return str(error)
    return "taken"


WAYS = ["local", "sharded", "server"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sparse", "expanded", "meta"])
def test_a_buffer_that_cannot_be_written_is_refused_by_name_and_can_be_left_out(
    cluster: Cluster, way: str, kind: str
) -> None:
    for said, _ in cluster.run(2, train_with_buffer, way, kind, False):
        assert said.startswith("TypeError: the buffer 0.table is ")
        assert kind in said
        assert "_set_params_and_buffers_to_ignore_for_model(model, ['0.table'])" in said
    for rank, (said, values) in enumerate(cluster.run(2, train_with_buffer, way, kind, True)):
        assert said == ""
        assert kind == "meta" or values[0] == rank + 1, "each rank keeps its own"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "inference", "conjugate"])
def test_buffers_of_other_kinds_are_taken_over(cluster: Cluster, way: str, kind: str) -> None:
    first = 2 if way == "server" else 1  # the server's, or rank 0's
    for said, values in cluster.run(2, train_with_buffer, way, kind, False):
        assert said == ""
        assert values == [first * (1 - 1j) if kind == "conjugate" else first] * 4


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_not_exchanged_are_named(cluster: Cluster, way: str) -> None:
    for said in cluster.run(2, refusals_of_parameters, way):
        assert "0.weight is torch.complex64" in said["complex"]
        assert "torch.view_as_real" in said["complex"]
        assert "0.weight is torch.float64" in said["double"]
        assert "0.weight was made inside torch.inference_mode()" in said["inference"]
