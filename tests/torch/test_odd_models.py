"""Tensors without values, and models of such tensors or of none, go all ways."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import array_device
from array_device import DEVICE
from cluster import Cluster
from gradwire.torch import GradwireState, gradwire_hook, loopback, register_backend
from gradwire.torch.staging import moves, stage
from gradwire.torch.staging.moves import checksums_of, pack, unpack
from test_state_places import in_ordinary_memory
from ways import WAYS, adamw, build, sgd

N = 80  # of the rows and columns of a layer, which barrier="tensor" exchanges by itself
IN_STEP = [  # they exchange in a rank's own thread, and can be ranks of one process
    name
    for name, way in WAYS.items()
    if way.kind in ("sharded", "local", "server") and not way.is_elastic
]
# (FSDP2 itself takes no gradient without values.)
BESIDE = [name for name, way in WAYS.items() if way.kind == "hook" or way.is_elastic]


class Model(nn.Module):
    """Some: tensors without values before, between and after others. Only: no others. None: no
    tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if kind != "none":
            self.before = nn.Parameter(torch.zeros(0, 4))
        if kind == "some":
            self.first = nn.Linear(N, N)
        if kind != "none":
            self.between = nn.Linear(0, 0)
        if kind == "some":
            self.second = nn.Linear(N, N)
            self.register_buffer("buffer", torch.zeros(3, 0))
        if kind != "none":
            self.after = nn.Parameter(torch.zeros(2, 0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = inputs.sum()
        for parameter in self.parameters(recurse=False):
            total = total + parameter.square().sum()
        layer: Any
        for layer in self.children():
            rows = torch.ones(2, layer.in_features, device=inputs.device) * inputs[0]
            total = total + layer(rows).square().sum() / 1000
        return total


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    here = next((p.device for p in module.parameters()), torch.device("cpu"))
    inputs = torch.full((2,), float(step)).to(here).requires_grad_()
    total: torch.Tensor = module(inputs)
    return total


def train(way: str, kind: str, device: str = "cpu", **options: Any) -> list[Any]:
    """This rank's parameters, after it has gone on from its state."""
    warnings.simplefilter("ignore")
    model: nn.Module = Model(kind)
    if device != "cpu":
        model = array_device.to_device(model)

    def inner(parameters: list[nn.Parameter]) -> Optimizer:
        groups: Any = [{"params": parameters}]  # PyTorch refuses an empty list of parameters
        return adamw(groups) if WAYS[way].adam else sgd(groups)

    training = build(way, model, inner, **options)
    training.run(3, loss)
    if not WAYS[way].servers:
        training.source.load_state_dict(training.source.state_dict())
        training.run(3, loss)
    training.settle()
    assert str(training.source.stats())
    training.close()
    return [values.cpu().float().tolist() for values in training.values().values()]


def train_all(way: str, kind: str, device: str, **options: Any) -> list[Any]:
    ranks = WAYS[way].ranks[-1] if len(WAYS[way].ranks) == 1 else 3
    return loopback.run(ranks, lambda rank: train(way, kind, device, **options))


@pytest.fixture(scope="module")
def device_cluster() -> Iterator[Cluster]:
    yield from array_device.cluster_of(2)


@pytest.mark.parametrize("kind", ["some", "only", "none"])
@pytest.mark.parametrize("way", IN_STEP)
def test_they_go_the_ways_of_one_process(device_cluster: Cluster, way: str, kind: str) -> None:
    if kind == "none" and ("fragments" in WAYS[way].options or "outer" in WAYS[way].options):
        pytest.skip("there are no layers, and PyTorch makes no optimizer of nothing")
    (on_cpu,) = device_cluster.run(1, train_all, way, kind, "cpu")
    (on_device,) = device_cluster.run(1, train_all, way, kind, DEVICE)
    assert on_cpu == on_device
    if kind == "some" and "back to back" not in way:
        assert on_cpu[0] == on_cpu[1]


@pytest.mark.parametrize("way", BESIDE)
def test_they_go_the_ways_of_several_processes(cluster: Cluster, way: str) -> None:
    ranks = max(WAYS[way].ranks) if len(WAYS[way].ranks) == 1 else 2 + (WAYS[way].servers > 0)
    found = cluster.run(ranks, train, way, "some")
    assert found[0] == found[1]


def with_places(kind: str, memory: str) -> None:
    with (
        mock.patch.object(moves, "new_page_locked", in_ordinary_memory),
        mock.patch.object(stage, "new_page_locked", in_ordinary_memory),
    ):
        train_all("LocalSteps, AdamW", kind, DEVICE, memory=memory)
        train_all("ShardedOptimizer", kind, DEVICE, memory=memory)


@pytest.mark.parametrize("memory", ["device", "host", "pinned"])
@pytest.mark.parametrize("kind", ["some", "only", "none"])
def test_anchors_and_residuals_without_values(
    device_cluster: Cluster, kind: str, memory: str
) -> None:
    device_cluster.run(1, with_places, kind, memory)


def train_hooked() -> list[Any]:
    warnings.simplefilter("ignore")
    group = array_device.new_group()
    model = array_device.to_device(Model("some"))
    module = DistributedDataParallel(model, process_group=group)
    state = GradwireState("3lc", process_group=group)
    module.register_comm_hook(state, gradwire_hook)
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss(module, dist.get_rank(), step).backward()
        optimizer.step()
    state.close()
    return [p.detach().cpu().float().tolist() for p in model.parameters()]


def test_they_go_the_way_of_the_hook_on_a_device(device_cluster: Cluster) -> None:
    one, other = device_cluster.run(2, train_hooked)
    assert one == other


def sum_nothing() -> list[int]:
    register_backend(name="empty", min_numel=1)
    group: Any = dist.new_group(backend="empty")
    values = torch.zeros(0)
    dist.all_reduce(values, group=group)
    dist.all_gather_into_tensor(torch.zeros(2, 0), torch.zeros(1, 0), group=group)
    dist.reduce_scatter_tensor(torch.zeros(1, 0), torch.zeros(2, 0), group=group)
    dist.destroy_process_group(group)
    return list(values.shape)


def test_the_backend_sums_tensors_without_values(cluster: Cluster) -> None:
    assert cluster.run(2, sum_nothing) == [[0], [0]]


def copy_all(kind: str, device: str) -> None:
    here, other = Model(kind), Model(kind)
    tensors = (
        [*array_device.to_device(here).parameters()] if device != "cpu" else [*here.parameters()]
    )
    odd = [torch.empty_strided((0,), (0,)), torch.empty_strided((2, 0), (0, 0))]
    unpack(pack([*tensors, *odd]), [*other.parameters(), *odd])
    assert checksums_of([*tensors, *odd]) == checksums_of([*other.parameters(), *odd])


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("kind", ["some", "only", "none"])
def test_staged_copies_without_values(device_cluster: Cluster, kind: str, device: str) -> None:
    device_cluster.run(1, copy_all, kind, device)


def train_scripted(way: str) -> bool:
    """Whether the compiled layer has been trained, and ends as one that is not compiled."""

    def train_with(scripts: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer: Any = nn.Linear(N, N)
        first = layer.weight.detach().clone()
        layer = torch.jit.script(layer) if scripts else layer
        model = nn.Sequential(nn.Linear(N, N), layer)
        training = build(way, model)
        training.run(3, lambda module, rank, step: module(torch.ones(2, N) + rank).square().mean())
        training.settle()
        training.close()
        assert not torch.equal(layer.weight, first)
        values: torch.Tensor = layer.weight.detach()
        return values

    return torch.equal(train_with(scripts=True), train_with(scripts=False))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "way", ["hook", "ShardedOptimizer", "LocalSteps", "servers", "servers, by the tensor"]
)
def test_layers_of_torchscript_are_trained(cluster: Cluster, way: str) -> None:
    assert cluster.run(2, train_scripted, way) == [True, True]
