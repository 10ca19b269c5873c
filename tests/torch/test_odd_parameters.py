"""Parameters whose values are not numbers in rows and columns are refused before the first step, at
each door; and a device that vanishes is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import SGD, AdamW

import array_device
from array_device import DEVICE
from cluster import Cluster
from frozen import INPUTS, Distances
from gradwire.torch import (
    DiLoCo,
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    compress,
    gradwire_hook,
)
from gradwire.torch.parameters import name_parameters
from gradwire.torch.staging import stage as staging
from gradwire.torch.staging.copier import Copier
from ways import build, integers


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def hook(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(GradwireState(model=ddp), gradwire_hook)


def shard(model: nn.Module) -> None:
    mesh: Any = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    FullyShardComm(model)


DOORS: dict[str, Callable[[Any], Any]] = {
    "compress": lambda model: compress(model, sgd(model)),
    "LocalSteps": lambda model: LocalSteps(sgd(model), model),
    "LocalSteps, not stepped": lambda model: LocalSteps(sgd(model.linear), model),
    "ShardedOptimizer": lambda model: ShardedOptimizer(sgd(model), model),
    "ServerOptimizer": lambda model: ServerOptimizer(sgd(model), servers=1, model=model),
    "DiLoCo": lambda model: DiLoCo(model, sgd(model), sgd(model), 4).__enter__(),
    "hook": hook,
    "FSDP": shard,
}
PYTORCHS = {"hook", "FSDP"}  # PyTorch's wrapper of the model refuses it in words of its own


def odd_parameter(kind: str) -> nn.Parameter:
    ones = torch.ones(8, 4)
    if kind == "quantized":
        values = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
        return nn.Parameter(values, requires_grad=False)
    if kind == "sparse":
        return nn.Parameter(ones.to_sparse())
    if kind == "lazy":
        return UninitializedParameter()  # type: ignore[return-value]
    if kind == "expanded":
        return nn.Parameter(torch.ones(8, 1).expand(8, 4))
    if kind == "windows":
        return nn.Parameter(torch.ones(11).unfold(0, 4, 1))
    return nn.Parameter(torch.nested.nested_tensor([ones, ones[:2]]))


def walk(kind: str) -> dict[str, str]:
    """What each door says."""
    warnings.simplefilter("ignore")
    said = {}
    for name, door in DOORS.items():
        model = nn.Module()
        model.linear = nn.Linear(4, 4)
        model.odd = odd_parameter(kind)
        try:
            door(model)
        except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("quantized", "quantized (torch.qint8): train tensor.dequantize()"),
        ("sparse", "sparse (torch.sparse_coo): make tensor.to_dense() the parameter"),
        ("nested", "nested (torch.strided): make each part of it a parameter"),
        ("lazy", "lazy, without a shape: call the model once before"),
        ("expanded", "expanded or made of overlapping windows: its elements share memory"),
        ("windows", "expanded or made of overlapping windows: its elements share memory"),
    ],
)
def test_every_door_refuses(cluster: Cluster, kind: str, remedy: str) -> None:
    for said in cluster.run(2, walk, kind):
        assert said.keys() | PYTORCHS == DOORS.keys()
        for door, text in said.items():
            if door not in PYTORCHS:
                assert text.startswith("TypeError: "), (door, text)
                assert f"odd is {remedy}" in text, (door, text)


# Memory that parameters share, and its order ----------------------------------------------------


def with_views(interleaved: bool) -> nn.Module:
    """Two parameters in the memory of one tensor, which share a row unless they are interleaved."""
    whole = torch.zeros(8, 4)
    model = nn.Module()
    model.linear = nn.Linear(4, 4)
    model.first = nn.Parameter(whole[:, :2] if interleaved else whole[:5])
    model.second = nn.Parameter(whole[:, 2:] if interleaved else whole[4:])
    return model


def walk_views() -> dict[str, str]:
    """What each door says that changes values."""
    warnings.simplefilter("ignore")
    said = {}
    for name in ("LocalSteps", "ShardedOptimizer", "ServerOptimizer", "DiLoCo"):
        try:
            DOORS[name](with_views(interleaved=False))
            said[name] = ""
        except TypeError as error:
            said[name] = str(error)
    return said


def test_parameters_in_the_same_memory_are_refused(cluster: Cluster) -> None:
    for said in cluster.run(2, walk_views):
        for text in said.values():
            assert "first and second share memory" in text, said
    apart = with_views(interleaved=True)
    assert len(name_parameters(sgd(apart), apart.named_parameters())) == 4


def in_order(order: str) -> nn.Sequential:
    """The same values, in rows or in other orders of memory."""
    torch.manual_seed(3)
    linear = nn.Linear(64, 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), linear)
    if order != "rows":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        linear.weight.data = linear.weight.detach().t().contiguous().t()
    return model


def train_in_order(way: str, order: str) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")
    model = in_order(order)
    fused = AdamW(model.parameters(), lr=0.1, fused=True)
    if way == "servers":
        optimizer: Any = ServerOptimizer(fused, servers=1, model=model, codec="raw")
        if optimizer.is_server:
            optimizer.serve()
            return []
    elif way == "outer optimizer":
        optimizer = LocalSteps(
            fused, model, every=2, codec="raw", outer=lambda a: AdamW(a, lr=0.1, fused=True)
        )
    else:
        optimizer = ShardedOptimizer(fused, model, codec="raw")
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        data = torch.randn(2, 3, 6, 6)
        model(data).square().sum().backward()
        optimizer.step()
    optimizer.close()
    return [parameter.detach().contiguous() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["servers", "outer optimizer", "ShardedOptimizer"])
def test_fused_optimizers_step_any_order_of_memory(cluster: Cluster, way: str) -> None:
    rows = cluster.run(2, train_in_order, way, "rows")
    others = cluster.run(2, train_in_order, way, "columns")
    for one, other in zip(rows[-1] or rows[0], others[-1] or others[0], strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


# A device that vanishes -------------------------------------------------------------------------


class Vanishing(Copier):
    """Copies to the host, so many times."""

    left = 4

    def to_host(self, values: torch.Tensor, host: torch.Tensor) -> None:
        if self.left == 0:
            raise RuntimeError("device-side assert triggered")
        self.left -= 1
        super().to_host(values, host)


def lose_device(way: str) -> str:
    """Rank 0's device vanishes."""
    warnings.simplefilter("ignore")
    array_device.install()

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        total: torch.Tensor = module(integers(INPUTS, seed=step).to(DEVICE))
        return total

    copier = Vanishing if dist.get_rank() == 0 else Copier
    with mock.patch.object(staging, "Copier", copier):
        training = build(way, array_device.to_device(Distances()))
        try:
            training.run(10, loss)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if not training.way.servers:
                training.close()
    return "no error"


@pytest.mark.parametrize("way", ["LocalSteps, every step", "ShardedOptimizer", "servers"])
def test_a_device_that_vanishes_is_named(way: str) -> None:
    with_others = 3 if way == "servers" else 2
    cluster = Cluster(with_others)
    try:
        own, *others = cluster.run(with_others, lose_device, way)
    finally:
        cluster.close()
    assert "between arraydevice:0 and the host (device-side assert triggered)" in own
    assert "go on from the last checkpoint" in own
    assert way == "servers" or all("rank 0" in other for other in others), others
