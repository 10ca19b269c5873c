"""What a program sets for its own tensors changes nothing in those of gradwire."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import gradwire
from cluster import Cluster
from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import PerRank, reshard
from gradwire.torch.backend.collective import Rules
from gradwire.torch.backend.process_group import GradwireGroup
from gradwire.torch.exchange_settings import ExchangeSettings
from training import batch, loss_of, make_model
from ways import WAYS, Program, build, fresh_store

STEPS, SAVED_AT = 5, 3
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


class Settings(Program):
    """Enters the settings around the construction, around the steps, or around both."""

    def __init__(self, setting: str = "none", scope: str = "all") -> None:
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
    found = {"none": _digest(_train(way, Settings()))}
    for setting, scopes in zip(list(SETTINGS)[1:], SCOPES, strict=True):
        for scope in scopes:
            found[f"{setting}; {scope}"] = _digest(_train(way, Settings(setting, scope)))
    return found


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu", name
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _adamw(parameters: list[nn.Parameter]) -> AdamW:
    """It has stepped: its first step would make tensors on the default device."""
    optimizer = AdamW(parameters, lr=2e-3, betas=(0.9, 0.99))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def _train(name: str, program: Settings) -> dict[str, torch.Tensor]:
    """Trains; what can be saved is saved and loaded on the way."""
    if name == "backend":
        return _group(program)
    way, model = WAYS[name], make_model()
    options: dict[str, Any] = {"codec": "3lc:s=1.5"} if way.codecs else {}
    if way.kind == "server":
        model.register_buffer("seen", torch.zeros(3))
        options |= {"buffers_from": 0, "buffers_every": 1}
    if way.replicas > 1:
        way = replace(way, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    inner = _adamw if way.adam and way.kind == "local" else None
    training = build(way, model, inner, program, **options)
    source, saves = training.source, way.kind != "server" and not way.is_elastic
    wraps = way.kind in ("local", "sharded")

    def on_step(step: int) -> None:
        if way.kind == "server":
            model.get_buffer("seen").add_(1)
        elif step == SAVED_AT:
            training.settle()
        elif step == SAVED_AT + 1 and saves:
            with program.step():
                saved = PerRank(source) if wraps else source
                saved.load_state_dict(saved.state_dict())

    training.run(STEPS, loss_of, on_step)
    training.settle()
    with program.step():
        state = source.state_dict()
        moved = reshard(_gathered(state), 3) if wraps and saves else []
        if way.kind != "qsvrg":
            source.stats().report()
    found = training.values() | dict(model.named_buffers())
    if way.kind == "fsdp":
        with torch.inference_mode():  # the weights are gathered into tensors of this mode
            found["validated"] = training.module(batch(0, STEPS)[0]).float()
    with program.step():
        training.close()
    if way.is_elastic:
        return found  # this rank may be another member the next time, with other residuals
    return found | {
        f"residual {place} of {rank}": entry["values"]
        for rank, each in enumerate([state, *moved])
        for place, entry in enumerate(each.get("gradwire", each)["residuals"])
    }


def _gathered(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of this rank in the place of all ranks."""
    return [state | {"rank": rank} for rank in range(dist.get_world_size())]


def _group(program: Settings) -> dict[str, torch.Tensor]:
    """The backend, and so the adapter for torchft, whose group it is."""
    store = fresh_store()
    codecs: dict[str, str | None] = dict.fromkeys(
        ("all_reduce", "reduce_scatter", "all_gather"), "int8:bucket=256"
    )
    rules = Rules(codecs, 10, [torch.float32, torch.bfloat16], ExchangeSettings())
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


PACKAGE = Path(gradwire.__file__).parent
# Functions that make a tensor of the default dtype, or on the default device.
FACTORIES = {function.__name__ for function in _device_constructors()}
# They follow a default, and have no argument against it.
FORBIDDEN = {
    *("Tensor", "FloatTensor", "get_default_dtype", "get_default_device"),
    *("no_grad", "set_grad_enabled"),  # gradwire/torch/parameters.py has more than these
}
# In `ordinary_tensors` itself, and in a thread, which has no mode of the program's.
ALLOWED = {("parameters.py", "torch.no_grad"), ("connection.py", "torch.set_grad_enabled")}


# The exchanges of these differ in C++ alone, or in where a server is.
ALIKE = ("hook, ring", "hook, broadcast", "hook, terngrad", "hook, hierarchical", "servers, two")


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ALIKE])
def test_no_setting_of_the_program_changes_a_bit(cluster: Cluster, way: str) -> None:
    world = WAYS[way].ranks[0]
    for found in cluster.run(world, train_under_each, way):
        assert found == dict.fromkeys(found, found["none"])


def faults_of(source: str) -> Iterator[str]:
    """The calls of functions of torch that follow a default of the program."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        function = node.func
        if not isinstance(function.value, ast.Name) or function.value.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if function.attr in FACTORIES and not {"dtype", "device"} <= given:
            yield f"line {node.lineno}: torch.{function.attr} needs dtype= and device="
        elif function.attr == "Generator" and "device" not in given:
            yield f"line {node.lineno}: torch.Generator needs device="
        elif function.attr in FORBIDDEN:
            yield f"line {node.lineno}: torch.{function.attr} follows the program"


def test_no_tensor_follows_a_default() -> None:
    found = []
    for path in (path for part in ("torch", "contrib") for path in (PACKAGE / part).rglob("*.py")):
        allowed = [function for name, function in ALLOWED if name == path.name]
        found += [
            f"{path.relative_to(PACKAGE)}, {fault}"
            for fault in faults_of(path.read_text())
            if not any(function in fault for function in allowed)
        ]
    assert not found
    assert list(faults_of("torch.zeros(3, dtype=torch.int8)")) == [
        "line 1: torch.zeros needs dtype= and device="
    ]
    assert len(list(faults_of("torch.Generator(); torch.no_grad()"))) == 2


def test_parameters_of_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"parameter 0 was made inside torch.inference_mode\(\)"):
        QSVRG([weight], lambda j: weight.sum(), 2, smoothness=1.0, convexity=1.0)
