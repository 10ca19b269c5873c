"""Every way to train with gradwire, listed once: how it is made, steps and ends.

    training = build("LocalSteps, streaming", model)
    training.run(20, loss)
    training.close()

Each rank of a world of torch.distributed does so.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import array_device
from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    loopback,
    outer_nesterov,
    pulse_loco,
    register_backend,
    sparse_loco,
)
from gradwire.torch.options import grouped

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of module, rank and step
OnStep = Callable[[int], object]
Inner = Callable[[list[nn.Parameter]], Optimizer]
# With these options DDP cuts its buckets once. Otherwise it cuts them again after the first step.
CUT_ONCE: dict[str, Any] = {"bucket_cap_mb": 0.05, "find_unused_parameters": True}
_CPU = torch.device("cpu")
_numbers = itertools.count()


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        kind: a key of `KINDS`.
        options: arguments of the kind's class.
        adam: the user's optimizer is AdamW; else SGD with momentum.
        replicas: copies of the model that FSDP shards; 2 is HSDP.
        policy: in which dtypes FSDP computes.
        reshards: `reshard_after_forward` of FSDP.
        columns: FSDP shards matrices with so many columns along these.
        servers: of the ranks.
        codecs: those to train it with; none if `options` name one or the default is meant.
        ranks: the numbers of ranks that it can have, of 2, 3 and 4.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    adam: bool = False
    replicas: int = 1
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshards: bool | int | None = None
    columns: int | None = None
    servers: int = 0
    codecs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2, 3, 4)

    @property
    def is_elastic(self) -> bool:
        return self.options.get("on_lost") == "continue"


class Program:
    """What a program has around its calls of gradwire: nothing."""

    def construct(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step(self, arithmetic: bool = True) -> AbstractContextManager[Any]:
        """Without `arithmetic` for calls that compute gradients by themselves."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Training:
    """One rank's part of a training.

    Attributes:
        module: the module that is called.
        inner: the user's own optimizer.
        optimizer: the one that steps: `inner`, or gradwire's around it.
        source: gradwire's object, which keeps residuals and statistics; None without one.
        steps: that this rank has taken.
        scaler: of the loss.
        use_gradients: called with the gradients of each step, and with `steps`.
    """

    source: Any = None
    module: Any
    in_backward = False  # gradwire exchanges there, and not in `optimizer.step`

    def __init__(self, way: Way, model: nn.Module, inner: Inner, program: Program) -> None:
        self.way, self.model, self.program, self.steps = way, model, program, 0
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.use_gradients: OnStep = lambda steps: None
        self.module = self.wrap()
        self.inner = inner(list(model.parameters()))
        self.optimizer: Any = self.inner

    def wrap(self) -> nn.Module:
        return self.model

    def attach(self, **options: Any) -> None:
        """Makes gradwire's object, with the options of the way and these."""

    @property
    def rank(self) -> int:
        """By which gradwire counts this rank: members and workers are numbered as they come."""
        if hasattr(self.optimizer, "rank"):  # where ranks come and go there is no default group
            return self.optimizer.rank
        return dist.get_rank()

    def step(self, loss: Loss) -> None:
        self.optimizer.zero_grad()
        value = loss(self.module, self.rank, self.steps)
        with self.program.backward() if self.in_backward else nullcontext():
            self.scaler.scale(value).backward()
        self.use_gradients(self.steps)
        with nullcontext() if self.in_backward else self.program.step():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1

    def run(self, steps: int, loss: Loss, on_step: OnStep = lambda step: None) -> None:
        """A server serves until all workers have closed.

        Args:
            steps: to take.
            loss: of a step.
            on_step: called after each step, with the number of those taken.
        """
        for _ in range(steps):
            self.step(loss)
            on_step(self.steps)

    def parts(self) -> dict[str, Any]:
        """What has a state that a checkpoint needs."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return parts if self.source in (None, self.optimizer) else parts | {"gradwire": self.source}

    def state(self) -> dict[str, Any]:
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.parts().items()}

    def load(self, state: dict[str, Any], steps: int) -> None:
        """Goes on from a state that was taken after so many steps."""
        for name, part in self.parts().items():
            part.load_state_dict(copy.deepcopy(state[name]))
        self.steps = steps

    def settle(self) -> None:
        """Exchanges what was not exchanged yet."""

    def values(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, or its shards of them."""
        return {name: local_of(p) for name, p in self.model.named_parameters()}

    def sent_bytes(self) -> int:
        """By this rank, compressed or not, in pushes and pulls."""
        stats = self.source.stats().as_dict()
        return stats["push_bytes"] + stats["pull_bytes"]

    def close(self) -> None:
        self.source.close()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Plain(Training):
    """DDP without gradwire."""

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model, **CUT_ONCE)

    def close(self) -> None:
        """There is nothing to close."""


class Hooked(Training):
    in_backward = True

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model, **CUT_ONCE)

    def attach(self, **options: Any) -> None:
        self.source = GradwireState(**grouped({"start_iter": 2, **self.way.options, **options}))
        self.module.register_comm_hook(self.source, gradwire_hook)


class Sharded(Training):
    def attach(self, **options: Any) -> None:
        options = {**self.way.options, **options}
        self.source = self.optimizer = ShardedOptimizer(self.inner, self.model, **grouped(options))


class Local(Training):
    def attach(self, **options: Any) -> None:
        options = {**self.way.options, **options}
        if self.way.is_elastic and "store" not in options:
            options |= {"store": fresh_store(), "ranks": dist.get_world_size()}
        self.source = self.optimizer = LocalSteps(self.inner, self.model, **grouped(options))

    def settle(self) -> None:
        with self.program.step():
            self.optimizer.synchronize()


class Served(Training):
    """A worker or a server."""

    def parts(self) -> dict[str, Any]:
        has_model = self.way.options.get("pulls") != "gradients"  # in the optimizer's state
        return {"optimizer": self.optimizer} if has_model else super().parts()

    def attach(self, **options: Any) -> None:
        options = {"servers": self.way.servers, "model": self.model, **self.way.options, **options}
        self.source = self.optimizer = ServerOptimizer(self.inner, **grouped(options))

    def run(self, steps: int, loss: Loss, on_step: OnStep = lambda step: None) -> None:
        with self.program.construct():
            self.optimizer.connect()
        if self.optimizer.is_server:
            with self.program.step():
                self.optimizer.serve(on_step)
        end = self.steps + steps
        while not self.optimizer.is_server and self.optimizer.version < end:
            self.steps = self.optimizer.version  # a worker may miss versions
            self.step(loss)
            on_step(self.optimizer.version)

    def settle(self) -> None:
        """Waits for the last pulls: `close` drops those that are under way."""
        if self.way.options.get("barrier") == "tensor" and not self.optimizer.is_server:
            with self.program.step():
                self.optimizer.synchronize()

    def close(self) -> None:
        if not self.optimizer.is_server:
            self.optimizer.close()


class FullySharded(Training):
    in_backward = True

    def wrap(self) -> nn.Module:
        mesh = mesh_of(self.way.replicas, next(self.model.parameters()).device)
        for module in (*self.model.children(), self.model):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=self.way.policy,
                reshard_after_forward=self.way.reshards,
                shard_placement_fn=self.place,
            )
        return self.model

    def place(self, parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.shape[-1] == self.way.columns else 0)

    def attach(self, **options: Any) -> None:
        self.source = FullyShardComm(self.model, **grouped({**self.way.options, **options}))

    def sent_bytes(self) -> int:
        weights = self.source.weights_stats()
        return super().sent_bytes() + (0 if weights is None else weights.as_dict()["pull_bytes"])


class FullyShardedAlone(FullySharded):
    """FSDP2 without gradwire."""

    def attach(self, **options: Any) -> None:
        """FSDP2 sends all by itself."""

    def close(self) -> None:
        """There is nothing to close."""


def mesh_of(replicas: int, device: torch.device = _CPU) -> DeviceMesh:
    """PyTorch would give the groups of two dimensions a timeout of 30 minutes."""
    size = dist.get_world_size()
    if device != _CPU:
        return array_device.make_mesh(replicas)
    if replicas == 1:
        return init_device_mesh("cpu", (size,))
    names, shape = ("replicas", "shards"), (replicas, size // replicas)
    if dist.get_backend() == loopback.NAME:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    gloo = _get_default_group()._get_backend(torch.device("cpu"))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # PyTorch hides it
    options._timeout = gloo.options._timeout
    override: dict[int | str, Any] = dict.fromkeys(names, ("gloo", options))
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)


class OverBackend(Training):
    """DDP without a hook, over a group that compresses."""

    def attach(self, **options: Any) -> None:
        name = f"gradwire{fresh_number()}"
        codec = {**self.way.options, **options}
        register_backend(codec.pop("codec"), name=name, **codec)
        self.group: Any = dist.new_group(backend=name)
        self.module = DistributedDataParallel(self.model, process_group=self.group, **CUT_ONCE)

    def sent_bytes(self) -> int:
        counts = self.group.stats()
        return sum(count["sent_bytes"] for count in counts.values())

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class Minimized(Training):
    """QSVRG of (weight - target j)^2 / 2; it knows its functions, so the model is its own."""

    COUNT = 24

    def __init__(self, way: Way, model: nn.Module, inner: Inner, program: Program) -> None:
        super().__init__(way, nn.ParameterList([torch.zeros(8, 96)]), inner, program)
        self.targets = integers(768 * self.COUNT, seed=5).view(self.COUNT, 8, 96)

    def attach(self, **options: Any) -> None:
        share = self.COUNT // dist.get_world_size()
        first = dist.get_rank() * share
        (weight,) = self.model.parameters()

        def loss_of(j: torch.Tensor) -> torch.Tensor:
            difference = weight - self.targets[first + j]
            return (difference * difference).sum(dim=(1, 2)).mean() / 2

        options = {"smoothness": 1.25, "convexity": 0.75, "steps": 3, **self.way.options, **options}
        self.source = self.optimizer = QSVRG([weight], loss_of, share, **options)

    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.source}

    def step(self, loss: Loss) -> None:
        with self.program.step(arithmetic=False):
            self.source.epoch()
        self.steps += 1


KINDS: dict[str, Callable[[Way, nn.Module, Inner, Program], Training]] = {
    "plain": Plain,
    "hook": Hooked,
    "sharded": Sharded,
    "local": Local,
    "server": Served,
    "fsdp": FullySharded,
    "plain fsdp": FullyShardedAlone,
    "backend": OverBackend,
    "qsvrg": Minimized,
}


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """One by one, as on the CPU: together, parameters of 16 bits are rounded otherwise."""
    return SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), foreach=False)


def build(
    way: str | Way,
    model: nn.Module,
    inner: Inner | None = None,
    program: Program | None = None,
    **options: Any,
) -> Training:
    """Makes this rank's part; the options are those of the kind's class, before the way's own."""
    chosen = WAYS[way] if isinstance(way, str) else way
    inner = inner or (adamw if chosen.adam else sgd)
    training = KINDS[chosen.kind](chosen, model, inner, program or Program())
    with training.program.construct():
        training.attach(**options)
    return training


def fresh_number() -> int:
    """One that no training had before, the same on every rank."""
    number = torch.tensor(next(_numbers), dtype=torch.int64, device="cpu")
    dist.broadcast(number, 0)
    return int(number)


def fresh_store() -> PrefixStore:
    return PrefixStore(f"way {fresh_number()}", _get_default_store())


def integers(count: int, seed: int) -> torch.Tensor:
    """Cubes of integers, with tails as heavy as those of gradients; exact on any machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 21, (count,), generator=generator).float() ** 3 / 256


THREE_LC, GOAL = "3lc:s=1.00,coder=rice", "auto:bits=1,every=4"
CODECS = ("raw", "bf16", "int8", THREE_LC, "qsgd:bits=4", "topk:ratio=0.05")
FEW = ("raw", THREE_LC)  # one that keeps no residual, and one that does

WAYS: dict[str, Way] = {
    "hook": Way("hook", codecs=(*CODECS, GOAL)),
    "hook, ring": Way("hook", {"exchange": "ring"}, codecs=CODECS),
    "hook, broadcast": Way(
        "hook", {"exchange": "broadcast"}, codecs=("qsgd:bits=4", "topk:ratio=0.05")
    ),
    "hook, terngrad": Way("hook", {"exchange": "terngrad"}),
    "hook, hierarchical": Way(
        "hook", {"exchange": "hierarchical", "ranks_per_machine": 2}, codecs=FEW, ranks=(4,)
    ),
    "hook, pull codec": Way("hook", {"codec": "3lc:s=1.5", "pull_codec": "int8"}),
    "ShardedOptimizer": Way("sharded", codecs=(*CODECS, GOAL)),
    "ShardedOptimizer, AdamW": Way("sharded", {"codec": "int8"}, adam=True),
    "LocalSteps": Way("local", {"every": 2}, codecs=(*CODECS, GOAL)),
    "LocalSteps, ring": Way("local", {"every": 2, "codec": "int8", "exchange": "ring"}),
    "LocalSteps, AdamW": Way("local", {"every": 4}, adam=True, codecs=(THREE_LC, GOAL)),
    "LocalSteps, every step": Way("local", {"codec": "3lc:s=1.5"}, adam=True),
    "LocalSteps, clipped": Way(
        "local", {"codec": "3lc:s=1", "every": 2, "clip_norm": 0.5}, adam=True
    ),
    "LocalSteps, DiLoCo": Way("local", {"every": 2, "codec": "int8", "outer": outer_nesterov()}),
    "LocalSteps, outer AdamW": Way(
        "local", {"codec": "3lc:s=1", "every": 2, "outer": lambda p: AdamW(p, lr=0.01)}
    ),
    "LocalSteps, fragments": Way("local", {"every": 2, "fragments": 2}, codecs=FEW),
    "LocalSteps, streaming": Way(
        "local", {"every": 3, "fragments": 2, "delay": 1, "mix": 0.5}, codecs=FEW
    ),
    "LocalSteps, back to back": Way("local", {"every": 2, "delay": 2}, codecs=FEW),
    "LocalSteps, SparseLoCo": Way("local", {"every": 2, **sparse_loco(0.1)}),
    "LocalSteps, PULSELoCo": Way("local", {"every": 2, **pulse_loco()}),
    "LocalSteps, elastic": Way("local", {"every": 2, "on_lost": "continue"}, adam=True, codecs=FEW),
    "servers": Way("server", servers=1, codecs=(*FEW, "int8")),
    "servers, two": Way("server", {"codec": "3lc:s=1.5"}, servers=2, ranks=(4,)),
    "servers, AdamW": Way("server", {"codec": "int8"}, adam=True, servers=1),
    "servers, gradients": Way("server", {"pulls": "gradients"}, servers=1, codecs=FEW),
    "servers, by the tensor": Way("server", {"barrier": "tensor"}, servers=1, codecs=FEW),
    "servers, elastic": Way("server", {"on_lost": "continue"}, servers=1, codecs=FEW),
    "FSDP2": Way("fsdp", codecs=(*FEW, "int8")),
    "FSDP2, weights": Way("fsdp", {"codec": "int8", "weights": "bf16"}),
    "HSDP": Way("fsdp", replicas=2, codecs=FEW, ranks=(4,)),
    "backend": Way("backend", {"min_numel": 256}, codecs=("int8:bucket=256", "qsgd:bits=4")),
    "QSVRG": Way("qsvrg", codecs=("raw", "qsgd:bits=4")),
}
