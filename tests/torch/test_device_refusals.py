"""What can't be trained is refused by name before the first step, at each door: models on two
devices or of other dtypes, devices that vanish, groups without a store or a network.

The device that is not the CPU is array_device.py's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.torch_version import TorchVersion

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
    register_backend,
)
from gradwire.torch.staging import stage as staging
from gradwire.torch.staging.copier import Copier
from test_odd_parameters import Vanishing
from ways import fresh_number, integers, mesh_of

Model = Any
Group = dist.ProcessGroup | None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(2)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def step(module: Any, optimizer: Any, device: str = "cpu") -> None:
    optimizer.zero_grad()
    module(integers(INPUTS, seed=1 + dist.get_rank()).to(device)).backward()
    optimizer.step()


def hook(model: Model, group: Group, steps: int = 1, device: str = "cpu") -> None:
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    state = GradwireState("int8", process_group=group)
    ddp.register_comm_hook(state, gradwire_hook)
    for _ in range(steps):
        step(ddp, sgd(model), device)
    state.close()


def shard(model: Model, policy: MixedPrecisionPolicy, steps: int = 1, replicas: int = 1) -> None:
    device = next(model.parameters()).device
    mesh: Any = mesh_of(replicas, device)
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    comm = FullyShardComm(model, "int8")
    for _ in range(steps):
        step(model, sgd(model), str(device))
    comm.close()


def over_backend(model: Model, group: Group = None, steps: int = 1, device: str = "cpu") -> None:
    name = f"gradwire{fresh_number()}"
    register_backend(min_numel=256, name=name)
    ddp = DistributedDataParallel(model, process_group=dist.new_group(backend=name))
    for _ in range(steps):
        step(ddp, sgd(model), device)


def optimize(make: Callable[..., Any], model: Model, group: Group = None) -> None:
    """With what steps in an optimizer's place."""
    optimizer = make(model, process_group=group)
    optimizer.connect() if isinstance(optimizer, ServerOptimizer) else step(model, optimizer)
    optimizer.close()


def in_diloco(model: Model) -> None:
    inner = sgd(model)
    with DiLoCo(model, inner, lambda parameters: SGD(parameters, lr=1.0), 4):
        step(model, inner)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "compress": lambda model, **more: compress(model, sgd(model), **more),
    "LocalSteps": lambda model, **more: LocalSteps(sgd(model), model, **more),
    "ShardedOptimizer": lambda model, **more: ShardedOptimizer(sgd(model), model, **more),
    "ServerOptimizer": lambda model, **more: ServerOptimizer(
        sgd(model), servers=1, model=model, **more
    ),
}
DOORS: dict[str, Callable[[Model], Any]] = {
    **{name: partial(optimize, make) for name, make in OPTIMIZERS.items()},
    "DiLoCo": in_diloco,
    "hook": lambda model: hook(model, None),
    "FSDP2": lambda model: shard(model, MixedPrecisionPolicy()),
    "HSDP": lambda model: shard(model, MixedPrecisionPolicy(), replicas=2),
    "backend": over_backend,
}
# (A server waits for the steps of workers, so it is not among those that see a gradient.)
SERVED = {"sparse gradient": {"ServerOptimizer"}}


def said_by(job: Callable[[], object]) -> str:
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Models -----------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 64, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.rows(torch.tensor([1, 5])).sum() * x[0]
        return total


class Real(Distances):
    """A real loss of complex parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).real


def make_model(kind: str) -> Model:
    model: Model = {"sparse gradient": Sparse, "complex": Real}.get(kind, Distances)()
    if kind == "two devices":
        array_device.to_device(model.last)
    elif kind == "float64":
        model.last.double()
    elif kind == "complex":
        model.last.weight = nn.Parameter(torch.zeros(12, 64, dtype=torch.complex64))
    elif kind == "meta":
        model.last.to("meta")
    return model


def walk(kind: str) -> dict[str, tuple[str, bool]]:
    """What each door says, and whether an optimizer has stepped the model."""
    warnings.simplefilter("ignore")
    found = {}
    for name in sorted(DOORS.keys() - SERVED.get(kind, set())):
        door, model = DOORS[name], make_model(kind)
        stepped: list[Any] = []

        def note(optimizer: Optimizer, *_: Any, ours: Model = model, noted: Any = stepped) -> None:
            own = {id(parameter) for parameter in ours.parameters()}
            params = [p for group in optimizer.param_groups for p in group["params"]]
            noted += [p for p in params if id(p) in own]

        handle = register_optimizer_step_post_hook(note)
        found[name] = said_by(partial(door, model)), bool(stepped)
        handle.remove()
    return found


IN_OUR_WORDS = {
    "two devices": "ValueError: first.weight is on cpu and last.weight on arraydevice:0: a rank",
    "float64": "last.weight is torch.float64: make the model float32",
    "complex": "last.weight is torch.complex64: make torch.view_as_real of it the parameter",
    "meta": "last.weight is on the device meta, without values: initialize the model first",
    "sparse gradient": "TypeError: the gradient of rows.weight is sparse (torch.sparse_coo)",
}
_DDPS = "ValueError: DistributedDataParallel's input module must be on the same type of devices"
OF_FSDP = {
    "two devices": "incompatible tensor type",  # (it moves models between real devices)
    "meta": "FSDP parameters should be materialized from meta device before training",
    "float64": "that of last.weight is reduced as torch.float64: give fully_shard",
    "complex": "that of last.weight is reduced as torch.complex64: make torch.view_as",
    "sparse gradient": "NotImplementedError: Could not run 'fsdp::chunk_cat'"
    if TorchVersion(torch.__version__) < "2.15"
    else "RuntimeError: reshape is not implemented for sparse tensors",
}
OTHERWISE = {  # None: trains
    ("two devices", "hook"): _DDPS,
    ("two devices", "backend"): _DDPS,
    ("meta", "hook"): _DDPS,
    ("meta", "backend"): _DDPS,
    ("float64", "hook"): "TypeError: gradwire_hook averages float32, bfloat16 and float16",
    ("float64", "backend"): None,  # uncompressed
    ("complex", "hook"): None,
    ("complex", "backend"): None,
    ("sparse gradient", "backend"): None,  # uncompressed
    **{(kind, door): said for kind, said in OF_FSDP.items() for door in ("FSDP2", "HSDP")},
    **{("sparse gradient", door): None for door in ("compress", "LocalSteps", "DiLoCo")},
}


@pytest.mark.parametrize("kind", IN_OUR_WORDS)
def test_every_door_refuses_before_the_first_step(ranks: Cluster, kind: str) -> None:
    for found in ranks.run(2, walk, kind):
        assert found.keys() == DOORS.keys() - SERVED.get(kind, set())
        for door, (said, has_stepped) in found.items():
            expected = OTHERWISE.get((kind, door), IN_OUR_WORDS[kind])
            if expected is None:
                assert (said, has_stepped) == ("nothing", True), door
            else:
                assert expected in said, (door, said)
                assert said != "nothing", door
                assert not has_stepped, door


# Several devices of one kind --------------------------------------------------------------------


def hook_two_devices(is_ignored: bool) -> str:
    """DDP takes such a model. The backward pass is of the layers on the first of the devices."""
    warnings.simplefilter("ignore")

    class LastLayers(Distances):
        def forward(self, x: torch.Tensor) -> Any:
            return self.second(x) + self.conv(x) + self.last(x)

    model: Any = array_device.to_device(LastLayers())
    array_device.to_device(model.first, f"{array_device.NAME}:1")
    if is_ignored:
        names = [f"first.{name}" for name, _ in model.first.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return said_by(lambda: hook(model, array_device.new_group(), device=DEVICE))


def test_the_hook_refuses_two_devices_but_for_what_ddp_ignores(ranks: Cluster) -> None:
    for said in ranks.run(2, hook_two_devices, False):
        assert "first.weight is on arraydevice:1 and second.weight on arraydevice:0" in said
        assert "or a DistributedDataParallel, of its own" in said
    assert ranks.run(2, hook_two_devices, True) == ["nothing", "nothing"]


def shard_on_two_devices() -> str:
    model: Any = Distances()
    array_device.to_device(model.last)
    fully_shard(model.last, mesh=mesh_of(1, torch.device(DEVICE)))
    fully_shard(model, mesh=mesh_of(1))
    return said_by(lambda: FullyShardComm(model))


def test_units_on_two_devices_are_refused(ranks: Cluster) -> None:
    for said in ranks.run(2, shard_on_two_devices):
        assert said.startswith("ValueError: first.weight and")
        assert "on cpu, and last.weight" in said
        assert f"on {DEVICE}: give every call of fully_shard the same mesh" in said


# A device that vanishes -------------------------------------------------------------------------


def lose_device(way: str) -> str:
    """Rank 0's device vanishes."""
    warnings.simplefilter("ignore")
    model = array_device.to_device(Distances())
    copier = Vanishing if dist.get_rank() == 0 else Copier
    trainings: dict[str, Callable[[], None]] = {
        "hook": lambda: hook(model, array_device.new_group(), 40, DEVICE),
        "backend": lambda: over_backend(model, None, 40, DEVICE),
        "FSDP2": lambda: shard(model, MixedPrecisionPolicy(), 40),
        "HSDP": lambda: shard(model, MixedPrecisionPolicy(), 40, replicas=2),
    }
    # DDP's constructor has broadcast the model before.
    with mock.patch.object(staging, "Copier", copier), mock.patch.object(Vanishing, "left", 30):
        return said_by(trainings[way])


@pytest.mark.parametrize("way", ["hook", "FSDP2", "HSDP", "backend"])
def test_a_device_that_vanishes_in_backward_is_named(ranks: Cluster, way: str) -> None:
    own, other = ranks.run(2, lose_device, way)
    assert "between arraydevice:0 and the host (device-side assert triggered)" in own
    assert "go on from the last checkpoint" in own
    assert "rank 0" in other


# Groups -----------------------------------------------------------------------------------------


def without_network() -> dict[str, str]:
    warnings.simplefilter("ignore")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "nowhere0"}
    found = {}
    for name, door in DOORS.items():
        if name == "HSDP":  # its mesh needs Gloo first, of PyTorch itself
            continue
        with mock.patch.dict(os.environ, environment):
            found[name] = said_by(partial(door, Distances()))
    return found


def test_ranks_without_a_network_interface_are_told_what_to_set(ranks: Cluster) -> None:
    for found in ranks.run(2, without_network):
        for door, said in found.items():
            assert "CommunicationError: gradwire's messages go between tensors of" in said, door
            assert "set GLOO_SOCKET_IFNAME to the one that leads to the other ranks" in said, door


def without_store() -> dict[str, str]:
    """The program has made the group itself, so that torch.distributed does not know it."""
    warnings.simplefilter("ignore")
    store = PrefixStore("own", dist.distributed_c10d._get_default_store())
    timeout = dist.distributed_c10d.default_pg_timeout
    group = array_device.ArrayGroup(store, dist.get_rank(), dist.get_world_size(), timeout)
    group._set_group_name("own")
    doors = {name: partial(optimize, make, group=group) for name, make in OPTIMIZERS.items()}
    found = {name: said_by(partial(door, Distances())) for name, door in doors.items()}
    on_device = array_device.to_device(Distances())
    return found | {"hook": said_by(lambda: hook(on_device, group, device=DEVICE))}


def test_a_group_without_a_store_is_refused(ranks: Cluster) -> None:
    for found in ranks.run(2, without_store):
        for door, said in found.items():
            assert "has no store, where gradwire's ranks meet: make it by" in said, door
