"""Every way to train that keeps residuals, alike for the tests of checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    outer_nesterov,
)
from gradwire.torch.options import grouped
from training import TwoPaths, batch, make_model

Applied = dict[str, np.ndarray]  # to each parameter
NAMES = [name for name, _ in make_model().named_parameters()]
# DDP cuts its buckets once, as a restart does.
CUT_ONCE: dict[str, Any] = {"bucket_cap_mb": 0.05, "find_unused_parameters": True}


@dataclass(frozen=True)
class Way:
    """How a training is made. `options`: of its class. rate: the learning rate of SGD. transposed:
    the parameters lie in memory column by column. wrapped: layers are compiled and have activation
    checkpoints."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.05
    momentum: float = 0.9
    shards: int | None = None  # of "fsdp": the ranks that share a model; None: all
    transposed: bool = False
    wrapped: bool = False


class Training:
    """One rank. `source` is what keeps residuals, `keep` what is saved beside it."""

    source: Any
    applied: Applied  # by the last step: the average (on several ranks, parts of it)

    def __init__(self, way: Way) -> None:
        self.model: TwoPaths = make_model()
        if way.transposed:
            for p in self.model.parameters():
                p.data = p.data.mT.contiguous().mT if p.dim() > 1 else p.data
        if way.wrapped:
            layers = self.model._modules
            layers["first"] = torch.compile(self.model.first, backend="eager")  # type: ignore[assignment]
            layers["second"] = checkpoint_wrapper(self.model.second)
        self.way = way
        self.version = 0
        self.local = torch.optim.SGD(self.model.parameters(), lr=way.rate, momentum=way.momentum)

    @abstractmethod
    def step(self, zero: bool = False) -> None:
        """One step, with gradients of zeros if asked for."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def loss(self, model: nn.Module, zero: bool) -> torch.Tensor:
        rank = dist.get_rank()
        inputs, labels = batch(rank, self.version)
        self.version += 1
        # torch.compile's own buckets of DDP can't be as small as these.
        with torch._dynamo.config.patch(optimize_ddp=False):
            return (0.0 if zero else 1.0) * nn.functional.cross_entropy(model(inputs), labels)

    def keep(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "local": self.local.state_dict()}

    def load(self, kept: dict[str, Any], state: dict[str, Any], version: int) -> None:
        """Goes on from what was kept, and from the state of `source`."""
        self.take(kept)
        self.source.load_state_dict(state)
        self.version = version

    def take(self, kept: dict[str, Any]) -> None:
        self.take_model(kept["model"])
        self.local.load_state_dict(deepcopy(kept["local"]))  # it takes the tensors themselves

    def take_model(self, saved: dict[str, torch.Tensor]) -> None:
        """Takes over the values of a model that may have been wrapped in another way."""
        self.model.load_state_dict(dict(zip(self.model.state_dict(), saved.values(), strict=True)))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """With the names of the model that is not wrapped."""
        return list(zip(NAMES, self.model.parameters(), strict=True))

    def values(self) -> dict[str, np.ndarray]:
        return {n: p.detach().numpy().copy() for n, p in self.named()}

    def gradients(self) -> Applied:
        named = self.named()
        return {n: p.grad.detach().numpy().copy() for n, p in named if p.grad is not None}

    def close(self) -> None:
        self.source.close()


class Hooked(Training):
    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.ddp = DistributedDataParallel(self.model, **CUT_ONCE)
        self.source = GradwireState(start_iter=0, **grouped(way.options))
        self.ddp.register_comm_hook(self.source, gradwire_hook)

    def step(self, zero: bool = False) -> None:
        self.local.zero_grad()
        self.loss(self.ddp, zero).backward()
        self.applied = self.gradients()
        self.local.step()


class OverBackend(Training):
    """DDP without a hook, over a group of the backend that compresses."""

    def __init__(self, way: Way, group: dist.ProcessGroup) -> None:
        super().__init__(way)
        self.ddp = DistributedDataParallel(self.model, process_group=group, **CUT_ONCE)

    def step(self, zero: bool = False) -> None:
        self.local.zero_grad()
        self.loss(self.ddp, zero).backward()
        self.local.step()


class Wrapped(Training):
    """ShardedOptimizer, LocalSteps."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        make: Callable[..., Any] = ShardedOptimizer if way.kind == "sharded" else LocalSteps
        options = dict(way.options)
        if options.pop("nesterov", False):
            options["outer"] = outer_nesterov()
        self.source = make(self.local, self.model, **grouped(options))

    def keep(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def take(self, kept: dict[str, Any]) -> None:
        self.take_model(kept["model"])

    def step(self, zero: bool = False) -> None:
        before = self.exact()
        self.source.zero_grad()
        self.loss(self.model, zero).backward()
        self.source.step()
        if zero and self.way.kind == "local":
            self.source.synchronize()
        rate = self.way.rate if self.way.kind == "sharded" else 1.0
        self.applied = {n: (before[n] - values) / rate for n, values in self.exact().items()}

    def exact(self) -> dict[str, np.ndarray]:
        """The model on which all agree. Of ShardedOptimizer the exact values of this rank's shard,
        with zeros elsewhere."""
        if self.way.kind != "sharded":
            anchors = self.source.anchors()
            assert anchors.keys() == dict(self.model.named_parameters()).keys()
            return {n: a.numpy().copy() for n, a in zip(NAMES, anchors.values(), strict=True)}
        whole = {n: np.zeros(p.numel(), np.float32) for n, p in self.named()}
        for piece in self.source.state_dict()["shard"]["pieces"]:
            end = piece["offset"] + piece["values"].numel()
            whole[piece["name"]][piece["offset"] : end] = piece["values"].numpy()
        return whole


class FullySharded(Training):
    def __init__(self, way: Way) -> None:
        super().__init__(way)
        size = dist.get_world_size()
        shards = way.shards or size
        if shards == size:
            mesh = init_device_mesh("cpu", (size,))
        else:
            names = ("replicas", "shards")
            mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=names)

        def place(parameter: nn.Parameter) -> Any:
            # Along another dimension than the first, one that the ranks divide.
            return Shard(1) if parameter.shape[-1] == 48 else Shard(0)

        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=mesh, shard_placement_fn=place)
        self.source = FullyShardComm(self.model, start_iter=0, **grouped(way.options))
        self.local = torch.optim.SGD(self.model.parameters(), lr=way.rate, momentum=way.momentum)

    def keep(self) -> dict[str, Any]:
        momenta = [self.local.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return {
            "model": [_local(p).clone() for p in self.model.parameters()],
            "local": [_local(m).clone() for m in momenta],
        }

    @torch.no_grad()
    def take(self, kept: dict[str, Any]) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.local.step()  # makes the momentum
        for parameter, values, momentum in zip(
            self.model.parameters(), kept["model"], kept["local"], strict=True
        ):
            _local(parameter).copy_(values)
            _local(self.local.state[parameter]["momentum_buffer"]).copy_(momentum)

    def step(self, zero: bool = False) -> None:
        self.local.zero_grad()
        self.loss(self.model, zero).backward()
        named = self.model.named_parameters()
        self.applied = {n: _whole(p.grad) for n, p in named if p.grad is not None}
        self.local.step()

    def values(self) -> dict[str, np.ndarray]:
        return {n: _whole(p) for n, p in self.model.named_parameters()}


def _local(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def _whole(tensor: Any) -> np.ndarray:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().numpy().copy()


class Served(Training):
    """A worker or a server. A server serves in `run` until the workers have left, which is why each
    `run` ends the training; it notes its state after `saves_at` versions."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.applied = {}
        named = list(self.model.named_parameters())
        self.source = ServerOptimizer(
            self.local, named_parameters=named, **grouped({"timeout": 30.0, **way.options})
        )
        self.saves_at = -1
        self.saved: dict[str, Any] | None = None

    def keep(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def take(self, kept: dict[str, Any]) -> None:
        if self.way.options.get("pulls") == "gradients":
            self.take_model(kept["model"])

    def run(self, steps: int, zero: bool = False) -> None:
        optimizer = self.source
        optimizer.connect()
        if optimizer.is_server:
            before = super().values()
            optimizer.serve(self.note)
            after = super().values().items()
            self.applied = {n: (before[n] - values) / self.way.rate for n, values in after}
            return
        end = optimizer.version + steps
        while optimizer.version < end:
            self.note(optimizer.version)
            self.version = optimizer.version
            optimizer.zero_grad()
            self.loss(self.model, zero).backward()
            optimizer.step()
            if self.way.options.get("pulls") == "gradients":
                self.applied = self.gradients()
        self.note(optimizer.version)
        self.last = super().values()
        optimizer.close()

    def step(self, zero: bool = False) -> None:
        self.run(1, zero)

    def note(self, version: int) -> None:
        self.after = self.source.state_dict()
        if version == self.saves_at:  # an optimizer's state_dict has the tensors themselves
            self.saved = deepcopy(self.after)
            self.kept = deepcopy(self.keep())

    def values(self) -> dict[str, np.ndarray]:
        return {} if self.source.is_server else self.last

    def close(self) -> None:
        """It is closed."""


class Minimized(Training):
    """QSVRG of least squares with a codec that keeps a residual."""

    NUMEL, COUNT = 96, 24

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.weight = nn.Parameter(torch.zeros(8, 12))
        self.share = self.COUNT // dist.get_world_size()
        first = dist.get_rank() * self.share
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.COUNT, self.NUMEL, generator=generator)
        labels = torch.randn(self.COUNT, generator=generator)

        def loss_of(j: torch.Tensor) -> torch.Tensor:
            found = inputs[first + j] @ self.weight.view(-1) - labels[first + j]
            return found.square().mean() / 2

        largest = float(inputs.square().sum(dim=1).max())
        self.source = QSVRG(
            [self.weight], loss_of, self.share, smoothness=largest, convexity=0.1 * largest,
            steps=3, **way.options,
        )  # fmt: skip

    def step(self, zero: bool = False) -> None:
        self.source.epoch()

    def keep(self) -> dict[str, Any]:
        return {}

    def take(self, kept: dict[str, Any]) -> None:
        """All is in the state."""

    def values(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight.detach().numpy().copy()}


KINDS: dict[str, Callable[[Way], Training]] = {
    "hook": Hooked,
    "sharded": Wrapped,
    "local": Wrapped,
    "fsdp": FullySharded,
    "server": Served,
    "qsvrg": Minimized,
}
CODEC = {"codec": "3lc:s=1.5"}
TRAINED = {
    "hook, sharded": Way("hook", CODEC),
    "hook, ring": Way("hook", {"codec": "int8", "exchange": "ring"}),
    "hook, broadcast": Way("hook", CODEC | {"exchange": "broadcast"}),
    "hook, hierarchical": Way("hook", CODEC | {"exchange": "hierarchical", "ranks_per_machine": 2}),
    "hook, terngrad": Way("hook", {"exchange": "terngrad"}),
    "hook, draws": Way("hook", {"codec": "qsgd:bits=4,ef=on"}),
    "ShardedOptimizer": Way("sharded", CODEC),
    "LocalSteps": Way("local", CODEC | {"every": 2}),
    "LocalSteps, outer": Way("local", CODEC | {"every": 2, "nesterov": True}),
    "LocalSteps, fragments": Way("local", CODEC | {"every": 4, "fragments": 2, "delay": 1}),
    "LocalSteps, SparseLoCo": Way(
        "local",
        {
            "codec": "topk2bit:density=0.05",
            "exchange": "broadcast",
            "every": 2,
            "residual_decay": 0.9,
        },
    ),
    "FullyShardComm, FSDP": Way("fsdp", CODEC),
    "FullyShardComm, HSDP": Way("fsdp", CODEC, shards=2),
    "ServerOptimizer": Way("server", CODEC | {"servers": 2}),
    "ServerOptimizer, draws": Way("server", {"codec": "qsgd:bits=4,ef=on"}),
    "ServerOptimizer, gradients": Way("server", CODEC | {"pulls": "gradients"}),
    "QSVRG": Way("qsvrg", {"codec": "3lc:s=1.5"}),
}


def make(way: Way) -> Training:
    return KINDS[way.kind](way)
