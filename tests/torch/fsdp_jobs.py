"""Functions that a test cluster runs with models that fully_shard has sharded."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gradwire import decode, encode
from gradwire.torch import Compression, FullyShardComm, LocalSteps, ShardedOptimizer
from gradwire.torch.options import grouped
from jobs import Owed, owed_in
from training import batch, gather, load, make_model, make_optimizer, save

NAMES = [name for name, _ in make_model().named_parameters()]


@dataclass(frozen=True)
class Sharded:
    """How the ranks train. `comm`: arguments of FullyShardComm; None: PyTorch's own FSDP2."""

    comm: dict[str, Any] | None = field(default_factory=lambda: {"codec": "raw", "start_iter": 0})
    hybrid: bool = False  # two replicas
    mixed: dict[str, Any] = field(default_factory=dict)  # of a MixedPrecisionPolicy
    reshard: bool | int = True
    checkpointed: bool = False  # activations
    micro_batches: int = 1  # the gradients of all but the last are not reduced
    clip: float | None = None
    in_backward: bool = False  # the optimizer steps there
    frozen: str | None = None  # a parameter without gradient
    branch: bool = True
    steps: int = 5
    start: int = 0
    nan_step: int | None = None  # the last rank's gradient is NaN
    failing_step: int | None = None  # backward() raises in the first unit, and is tried again
    saved: list[bytes] | None = None  # by rank, for a restart


@dataclass
class Run:
    """The results of one rank."""

    parameters: dict[str, np.ndarray]  # whole
    local: bytes  # this rank's shards
    losses: list[float]
    stats: dict[str, Any]
    weights_stats: dict[str, Any]
    warnings: list[str]
    owed: Owed
    saved: bytes


def mesh_of(hybrid: bool) -> DeviceMesh:
    size = dist.get_world_size()
    if not hybrid:
        return init_device_mesh("cpu", (size,))
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))


def shard(model: Any, options: Sharded) -> Any:
    mesh = mesh_of(options.hybrid)
    policy = MixedPrecisionPolicy(**options.mixed)
    if options.checkpointed:
        model.second = checkpoint_wrapper(model.second)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard)
    return model


def run_each(all_options: list[Sharded]) -> list[Run]:
    return [run(options) for options in all_options]


def run(options: Sharded) -> Run:
    rank = dist.get_rank()
    model = make_model()
    if options.frozen is not None:
        model.get_parameter(options.frozen).requires_grad_(False)
    shard(model, options)
    comm = None if options.comm is None else FullyShardComm(model, **grouped(options.comm))
    optimizer = make_optimizer(model)
    if options.saved is not None:
        state = load(options.saved[rank])
        _load_shards(model, optimizer, state)
        if comm is not None:
            comm.load_state_dict(state["comm"])
    if options.in_backward:
        _step_in_backward(model)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(options.start, options.start + options.steps):
            if options.failing_step == step:
                _fail(model, rank)
            losses.append(_step(model, optimizer, options, step))
    result = Run(
        parameters={n: _whole(p) for n, p in zip(NAMES, model.parameters(), strict=True)},
        local=b"".join(_local(p).numpy().tobytes() for p in model.parameters()),
        losses=losses,
        stats=comm.stats().as_dict() if comm is not None else {},
        weights_stats={},
        warnings=[str(w.message) for w in caught],
        owed={},
        saved=b"",
    )
    if comm is not None:
        if (weights := comm.weights_stats()) is not None:
            result.weights_stats = weights.as_dict()
        result.owed = owed_in(comm.state_dict())
        result.saved = save(
            {
                "model": [_local(p).clone() for p in model.parameters()],
                "momentum": [
                    _local(optimizer.state[p]["momentum_buffer"]).clone()
                    for p in model.parameters()
                    if p in optimizer.state
                ],
                "comm": comm.state_dict(),
            }
        )
        comm.close()
    del model, optimizer, comm
    gc.collect()
    return result


def _step(model: Any, optimizer: torch.optim.Optimizer, options: Sharded, step: int) -> float:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    optimizer.zero_grad()
    for micro in range(options.micro_batches):
        model.set_requires_gradient_sync(micro == options.micro_batches - 1)
        inputs, labels = batch(rank, step, micro)
        if options.nan_step == step and rank == last:
            inputs[0, 0] = float("nan")
        loss = nn.functional.cross_entropy(model(inputs, options.branch), labels)
        loss.backward()
    if options.clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        if isinstance(norm, DTensor):
            norm.full_tensor()
    finite = all(bool(torch.isfinite(_local(p.grad)).all()) for p in _with_gradient(model))
    if finite and not options.in_backward:
        optimizer.step()
    return loss.item()


def _with_gradient(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def _step_in_backward(model: nn.Module) -> None:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(0.05 * parameter.grad)
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def _fail(model: Any, rank: int) -> None:
    """A backward() that ends with the program's own error after some units were reduced."""

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the program's own")

    inputs, labels = batch(rank, 1000)
    inputs.requires_grad_(True)
    inputs.register_hook(fail)
    try:
        nn.functional.cross_entropy(model(inputs), labels).backward()
    except ArithmeticError:
        model.zero_grad()
        model._get_fsdp_state()._reset_iter_state()
    else:
        raise AssertionError("backward() must have failed")


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def _whole(parameter: nn.Parameter) -> np.ndarray:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach().numpy().copy()


@torch.no_grad()
def _load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the momentum
    for parameter, values, momentum in zip(
        model.parameters(), state["model"], state["momentum"], strict=True
    ):
        _local(parameter).copy_(values)
        _local(optimizer.state[parameter]["momentum_buffer"]).copy_(momentum)


# Weights -------------------------------------------------------------------------------------


def gather_weights(hybrid: bool, weights: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What a forward computes with, and what it should compute with."""
    model = shard(make_model(), Sharded(hybrid=hybrid))
    comm = FullyShardComm(model, "raw", weights=weights)
    exact = {n: _local(p).clone() for n, p in zip(NAMES, model.parameters(), strict=True)}
    model.unshard()
    model.first.unshard()
    used = {
        name: model.get_parameter(name).detach().clone().numpy()
        for name in NAMES
        if not name.startswith("second")
    }
    model.reshard()
    model.first.reshard()
    comm.close()
    group = dist.new_subgroups(dist.get_world_size() // 2)[0] if hybrid else None
    expected = {}
    for name in used:
        part = exact[name].numpy()
        if part.ndim > 1 and used[name].size >= 256 and part.size:
            part = decode(encode(part.reshape(-1), f"{weights},ef=off")).reshape(part.shape)
        expected[name] = torch.cat(gather(torch.from_numpy(part), group)).numpy()
    return {name: (used[name], expected[name]) for name in used}


def weights_seen(codec: str, steps: int) -> list[list[bytes]]:
    """The weights of a layer in each of its forward passes of a step: in forward, and again in
    backward, because its activations are not kept."""
    model = make_model()
    seen: list[bytes] = []
    layer = model.second
    layer.register_forward_pre_hook(
        lambda module, _: seen.append(module.weight.detach().clone().numpy().tobytes())
    )
    shard(model, Sharded(checkpointed=True))
    comm = FullyShardComm(model, "raw", weights=codec)
    found = []
    for _ in range(steps):
        _backward(model)
        found.append(list(seen))
        seen.clear()
    comm.close()
    return found


# Bad input -----------------------------------------------------------------------------------


def raised_by(make: Callable[[], Any]) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse() -> dict[str, str]:
    """What each mistake raises."""
    plain = make_model()
    inner = make_model()
    fully_shard(inner.first, mesh=mesh_of(False))
    mixed = make_model()
    fully_shard(mixed.first, mesh=mesh_of(True))
    fully_shard(mixed, mesh=mesh_of(False))
    flat = shard(make_model(), Sharded())
    hybrid = shard(make_model(), Sharded(hybrid=True))
    found = {
        "plain": raised_by(lambda: FullyShardComm(plain)),
        "inner": raised_by(lambda: FullyShardComm(inner)),
        "meshes": raised_by(lambda: FullyShardComm(mixed)),
        "exchange": raised_by(lambda: FullyShardComm(flat, exchange="ring")),
        "pull_codec": raised_by(
            lambda: FullyShardComm(flat, compression=Compression(pull_codec="int8"))
        ),
        "auto": raised_by(lambda: FullyShardComm(flat, "auto:bits=1")),
        "feedback": raised_by(lambda: FullyShardComm(flat, weights="int8:ef=on")),
        "codec": raised_by(lambda: FullyShardComm(flat, weights="int9")),
    }
    comm = FullyShardComm(hybrid)
    hybrid.set_requires_all_reduce(False)
    found["partial"] = raised_by(lambda: _backward(hybrid))
    found["copy"] = raised_by(lambda: copy.deepcopy(comm))
    comm.close()
    return found


def _backward(model: Any) -> None:
    inputs, labels = batch(dist.get_rank(), 0)
    nn.functional.cross_entropy(model(inputs), labels).backward()


def warnings_of_adam(codec: str) -> tuple[list[str], tuple[str, ...]]:
    """The warnings of a step of Adam, and the remarks in the statistics."""
    model = shard(make_model(), Sharded())
    comm = FullyShardComm(model, codec)
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _backward(model)
        optimizer.step()
    remarks = comm.stats().remarks
    comm.close()
    return [str(w.message) for w in caught], remarks


def unlike_replicas() -> str:
    model = make_model()
    with torch.no_grad():
        model.second.weight.add_(dist.get_rank() // 2)
    shard(model, Sharded(hybrid=True))
    FullyShardComm(model)
    return raised_by(lambda: _backward(model))


def unlike_steps_of_shards() -> str:
    """Both replicas have mixed the same steps, so that gradients between replicas agree."""
    model = shard(make_model(), Sharded(hybrid=True))
    comm = FullyShardComm(model, "3lc:s=1.5")
    comm.load_state_dict({**comm.state_dict(), "iterations": 5 + dist.get_rank() % 2})
    found = raised_by(lambda: _backward(model))
    comm.close()
    return found


def unlike_arguments() -> str:
    model = shard(make_model(), Sharded())
    codec = "int8" if dist.get_rank() == 0 else "3lc"

    def train() -> None:
        FullyShardComm(model, codec, start_iter=0)
        _backward(model)

    return raised_by(train)


def load_of_other_shard(saved: list[bytes]) -> str:
    model = shard(make_model(), Sharded(hybrid=True))
    comm = FullyShardComm(model, "3lc:s=1.5")
    other = load(saved[dist.get_rank() ^ 1])
    found = raised_by(lambda: comm.load_state_dict(other["comm"]))
    comm.close()
    return found


def lose_a_rank() -> str:
    model = shard(make_model(), Sharded())
    comm = FullyShardComm(model, "int8", start_iter=0)
    _backward(model)
    if dist.get_rank() == 2:
        os._exit(3)
    found = raised_by(lambda: _backward(model))
    comm.close()
    return found


def lose_a_rank_of_a_machine() -> str:
    """In backward, the ranks of a machine gather the weights by themselves."""
    model = shard(make_model(), Sharded(reshard=2))
    comm = FullyShardComm(model, "int8", weights="bf16", start_iter=0)
    _backward(model)
    inputs, labels = batch(dist.get_rank(), 1)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    if dist.get_rank() == 2:
        os._exit(3)
    found = raised_by(loss.backward)
    comm.close()
    return found


# Local steps of sharded replicas ---------------------------------------------------------------


@dataclass(frozen=True)
class Replicas:
    """LocalSteps of two replicas, each of two ranks. sharded: by fully_shard; otherwise the two
    ranks of a replica are one, with both batches."""

    options: dict[str, Any]
    sharded: bool = True
    steps: int = 8
    start: int = 0
    saved: list[bytes] | None = None


def local_steps(case: Replicas) -> tuple[list[float], dict[str, np.ndarray], bytes, str]:
    """Losses, whole parameters, this rank's state, and the report."""
    model: Any = make_model()
    group = None
    if case.sharded:
        mesh = mesh_of(True)
        for module in (model.first, model):
            fully_shard(module, mesh=mesh["shards"])
        group = mesh["replicas"].get_group()
    rank = dist.get_rank()
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    optimizer = LocalSteps(adamw, model, process_group=group, **grouped(case.options))
    if case.saved is not None:
        state = load(case.saved[rank])
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), state["model"], strict=True):
                _local(parameter).copy_(values)
    losses = []
    for step in range(case.start, case.start + case.steps):
        batches = [
            batch(part, step) for part in ([rank] if case.sharded else [2 * rank, 2 * rank + 1])
        ]
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = {
        n: _whole(p) if case.sharded else p.detach().numpy().copy()
        for n, p in zip(NAMES, model.parameters(), strict=True)
    }
    local = [p.to_local().detach().clone() if case.sharded else p for p in model.parameters()]
    saved = save({"optimizer": optimizer.state_dict(), "model": local})
    report = str(optimizer.stats())
    optimizer.close()
    return losses, whole, saved, report


def misuse_of_local_steps() -> dict[str, str]:
    def wrap(model: Any, **options: Any) -> str:
        adamw = torch.optim.AdamW(model.parameters())
        return raised_by(lambda: LocalSteps(adamw, model, **grouped(options)))

    partly = make_model()
    fully_shard(partly.first, mesh=mesh_of(False))
    model = shard(make_model(), Sharded())
    sharded = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "partly": wrap(partly),
        "hybrid mesh": wrap(shard(make_model(), Sharded(hybrid=True))),
        "all ranks": wrap(shard(make_model(), Sharded())),
        "sharded optimizer": raised_by(lambda: ShardedOptimizer(sharded, model)),
    }
