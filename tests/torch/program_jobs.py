"""Trains every way to train under what a program may have set for its own tensors.

The forward and backward passes, the data and the model do not see the settings; gradwire's calls
do. So each run must end with the bits of the run without settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.overrides import TorchFunctionMode

import finite_sums
from fsdp_jobs import mesh_of
from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    PerRank,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    outer_nesterov,
    reshard,
    sparse_loco,
)
from gradwire.torch.backend.process_group import GradwireGroup
from gradwire.torch.backend.rules import Rules
from gradwire.torch.records.exchange_settings import ExchangeSettings
from gradwire.torch.records.options import grouped
from training import batch, make_model

STEPS = 5
Scope = Callable[[], AbstractContextManager[Any]]


class _Watching(TorchFunctionMode):
    """The mode of a program that looks at its own calls."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with _set(torch.use_deterministic_algorithms, True, False):
        yield


# Several at once, to save time. Each has another default dtype and another way to set a device.
SETTINGS: dict[str, tuple[Scope, ...]] = {
    "none": (),
    "bfloat16, meta, deterministic, no gradients": (
        lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
        lambda: _set(torch.set_default_device, "meta", None),
        _deterministic,
        torch.no_grad,
    ),
    "float64, inside meta, inference, anomalies": (
        lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: torch.device("meta"),
        torch.inference_mode,
        lambda: torch.autograd.set_detect_anomaly(True),
    ),
    "float16, cpu, function mode, arithmetic": (
        lambda: _set(torch.set_default_dtype, torch.float16, torch.float32),
        lambda: _set(torch.set_default_device, "cpu", None),
        _Watching,
    ),
}
SCOPES = (("all",), ("construction", "steps"), ("all", "steps"))  # of each


# They change the arithmetic of the backward pass itself.
ARITHMETIC: tuple[Scope, ...] = (
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: _set(torch.set_num_threads, 3, 1),
    lambda: _set(torch.set_flush_denormal, True, False),
)


@contextlib.contextmanager
def _entered(settings: Iterable[Scope]) -> Iterator[None]:
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow
        for setting in settings:
            stack.enter_context(setting())
        yield


class Program:
    """Enters the settings around the construction, around the steps, or around both."""

    def __init__(self, setting: str, scope: str) -> None:
        self._setting, self._scope = setting, scope

    def construct(self) -> AbstractContextManager[Any]:
        return self._around("construction")

    def step(self, arithmetic: bool = True) -> AbstractContextManager[Any]:
        return self._around("steps", arithmetic)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """As `step`, but autograd can run, with the arithmetic of the run without settings."""
        with self.step(arithmetic=False), torch.inference_mode(False), torch.enable_grad():
            yield

    def _around(self, part: str, arithmetic: bool = True) -> AbstractContextManager[Any]:
        if self._scope not in (part, "all"):
            return contextlib.nullcontext()
        more = ARITHMETIC if arithmetic and "arithmetic" in self._setting else ()
        return _entered((*SETTINGS[self._setting], *more))


def train_under_each(way: str) -> dict[str, str]:
    """A digest of each run: without settings, and under each of them in each scope."""
    found = {"none": _digest(WAYS[way](Program("none", "all")))}
    for setting, scopes in zip(list(SETTINGS)[1:], SCOPES, strict=True):
        for scope in scopes:
            found[f"{setting}; {scope}"] = _digest(WAYS[way](Program(setting, scope)))
    return found


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", name
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()}


def _backward(model: nn.Module, forward: nn.Module, step: int) -> None:
    model.zero_grad()
    inputs, labels = batch(dist.get_rank(), step)
    nn.functional.cross_entropy(forward(inputs), labels).backward()


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def _adamw(model: nn.Module) -> AdamW:
    """It has stepped: its first step would make tensors on the default device."""
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _wrapped(
    make: Callable[..., Any],
    inner: Callable[[nn.Module], torch.optim.Optimizer] = _sgd,
    synchronizes: bool = False,
    **options: Any,
) -> Callable[[Program], dict[str, torch.Tensor]]:
    """A training with an optimizer of gradwire's that is saved and loaded on the way."""

    def run(program: Program) -> dict[str, torch.Tensor]:
        model = make_model()
        chosen = dict(options)
        if options.get("on_lost") == "continue":
            chosen |= {"store": _fresh_store(), "ranks": dist.get_world_size()}
        local = inner(model)
        with program.construct():
            optimizer = make(local, model, **grouped(chosen))
        for step in range(STEPS):
            _backward(model, model, step)
            with program.step():
                optimizer.step()
                if step == 2 and synchronizes:
                    optimizer.synchronize()
                if step == 3 and "on_lost" not in options:
                    saved = PerRank(optimizer)
                    saved.load_state_dict(saved.state_dict())
        with program.step():
            if synchronizes:
                optimizer.synchronize()
            state = optimizer.state_dict()
            moved = [] if "on_lost" in options else reshard(_gathered(state), 3)
            optimizer.stats().report()
            optimizer.close()
        return _named(model) | {
            f"residual {place} of {rank}": entry["values"]
            for rank, each in enumerate([state, *moved])
            for place, entry in enumerate(each["residuals"])
        }

    return run


def _gathered(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of this rank in the place of all ranks."""
    return [state | {"rank": rank} for rank in range(dist.get_world_size())]


def _fresh_store() -> PrefixStore:
    return PrefixStore(f"program {next(_numbers)}", _get_default_store())


_numbers = iter(range(10**6))  # the same on every rank, because all run the same jobs


def _hook(program: Program) -> dict[str, torch.Tensor]:
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = _sgd(model)
    with program.construct():
        state = GradwireState("3lc:s=1.5", start_iter=1)
        ddp.register_comm_hook(state, gradwire_hook)
    for step in range(STEPS):
        inputs, labels = batch(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        with program.backward():
            loss.backward()
        with program.step():
            saved = state.state_dict()
            if step == 3:
                state.load_state_dict(saved)
        optimizer.step()
    state.close()
    return _named(model) | {str(i): r["values"] for i, r in enumerate(saved["residuals"])}


def _fully_sharded(hybrid: bool) -> Callable[[Program], dict[str, torch.Tensor]]:
    def run(program: Program) -> dict[str, torch.Tensor]:
        model: Any = make_model()
        mesh = mesh_of(hybrid)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if hybrid else None)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = _sgd(model)
        with program.construct():
            comm = FullyShardComm(model, "3lc:s=1.5", weights="bf16", start_iter=1)
        for step in range(STEPS):
            inputs, labels = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            with program.backward():
                loss.backward()
            optimizer.step()
            with program.step():
                saved = comm.state_dict()
                if step == 3:
                    comm.load_state_dict(saved)
        with torch.inference_mode():  # the weights are gathered into tensors of this mode
            seen = model(batch(0, STEPS)[0])
        comm.close()
        return _named(model) | {
            "validated": seen.float(),
            **{str(i): r["values"] for i, r in enumerate(saved["residuals"])},
        }

    return run


def _served(pulls: str, barrier: str = "step") -> Callable[[Program], dict[str, torch.Tensor]]:
    def run(program: Program) -> dict[str, torch.Tensor]:
        model = make_model()
        model.register_buffer("seen", torch.zeros(3))
        local = _sgd(model)
        with program.construct():
            optimizer = ServerOptimizer(
                local,
                model=model,
                codec="3lc:s=1.5",
                pulls=pulls,
                barrier=barrier,
                buffers_from=0,
                buffers_every=1,
            )
            optimizer.connect()
        if optimizer.is_server:
            with program.step():
                optimizer.serve()
        while not optimizer.is_server and optimizer.version < STEPS:
            optimizer.zero_grad()
            inputs, labels = batch(dist.get_rank(), optimizer.version)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            model.get_buffer("seen").add_(1)
            with program.step():
                optimizer.step()
        with program.step():
            state = optimizer.state_dict()["gradwire"]
            if not optimizer.is_server:
                optimizer.close()
        return (_named(model) if pulls == "updates" or not optimizer.is_server else {}) | {
            "seen": model.get_buffer("seen"),
            **{str(i): entry["values"] for i, entry in enumerate(state["residuals"])},
        }

    return run


def _qsvrg(program: Program) -> dict[str, torch.Tensor]:
    chosen = finite_sums.least_squares()
    weight = nn.Parameter(torch.zeros(finite_sums.N))
    with program.construct():
        optimizer = chosen.optimizer(weight, steps=3)
    for _ in range(2):
        with program.step(arithmetic=False):  # it computes gradients
            optimizer.epoch()
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    return {"weight": weight}


def _group(program: Program) -> dict[str, torch.Tensor]:
    """The backend, and so the adapter for torchft, whose group it is."""
    store = _fresh_store()
    codecs: dict[str, str | None] = dict.fromkeys(
        ("all_reduce", "reduce_scatter", "all_gather"), "int8:bucket=256"
    )
    rules = Rules.of(codecs, 10, [torch.float32, torch.bfloat16], ExchangeSettings())
    size = dist.get_world_size()
    with program.construct():
        group = GradwireGroup(store, dist.get_rank(), size, rules, timedelta(seconds=60))
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        values = batch(dist.get_rank(), 0)[0].to(dtype).view(-1).clone()
        shard = torch.empty(values.numel() // size, dtype=dtype)
        whole = torch.empty(values.numel() * size, dtype=dtype)
        with program.step():
            group.reduce_scatter_single(shard, values).wait()
            group.all_gather_single(whole, values).wait()
            group.allreduce([values], dist.AllreduceOptions()).wait()
        found |= {f"{dtype} {i}": t for i, t in enumerate((values, shard, whole))}
    group.shutdown()
    return found


WAYS: dict[str, Callable[[Program], dict[str, torch.Tensor]]] = {
    "hook": _hook,
    "local": _wrapped(LocalSteps, every=2, codec="int8", synchronizes=True),
    "adamw": _wrapped(LocalSteps, _adamw, every=2, clip_norm=0.5, synchronizes=True),
    "late momentum": _wrapped(LocalSteps, _adamw, codec="3lc:s=1.5", synchronizes=True),
    "streaming": _wrapped(
        LocalSteps, every=3, fragments=2, delay=1, mix=0.5, codec="int8", synchronizes=True
    ),
    "back to back": _wrapped(LocalSteps, every=2, delay=2, codec="int8", synchronizes=True),
    "diloco": _wrapped(LocalSteps, every=2, outer=outer_nesterov(), synchronizes=True),
    "outer adam": _wrapped(
        LocalSteps, every=2, outer=lambda p: AdamW(p, lr=0.01), synchronizes=True
    ),
    "sparse_loco": _wrapped(LocalSteps, every=2, synchronizes=True, **sparse_loco(0.1)),
    "elastic": _wrapped(
        # Exact, because ranks are numbered in the order in which they come.
        LocalSteps,
        _adamw,
        every=2,
        codec="raw",
        on_lost="continue",
        synchronizes=True,
    ),
    "sharded raw": _wrapped(ShardedOptimizer, codec="raw"),
    "sharded": _wrapped(ShardedOptimizer, codec="3lc:s=1.5"),
    "sharded adam": _wrapped(
        ShardedOptimizer, lambda m: AdamW(m.parameters(), lr=1e-3), codec="int8"
    ),
    "server": _served("updates"),
    "server of gradients": _served("gradients"),
    "server by tensors": _served("updates", barrier="tensor"),
    "FSDP2": _fully_sharded(hybrid=False),
    "HSDP": _fully_sharded(hybrid=True),
    "QSVRG": _qsvrg,
    "backend": _group,
}
