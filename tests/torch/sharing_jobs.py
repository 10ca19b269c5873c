"""What users do to the optimizer and the module that they have given to a way to train."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle  # pickle: to show that it is refused
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from gradwire.torch import Compression, LocalSteps, ServerOptimizer, ShardedOptimizer
from gradwire.torch.errors import CommunicationError
from gradwire.torch.options import grouped

RAW: dict[str, Any] = {"codec": "raw"}
SERVED: dict[str, Any] = RAW | {"timeout": 20.0}


class Tied(nn.Module):
    """`second` and `third` share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.last(x)


Make = Callable[[torch.optim.Optimizer, nn.Module], Any]


def _local(**options: Any) -> Make:
    return lambda inner, model: LocalSteps(inner, model, **grouped({**RAW, **options}))


def _served(**options: Any) -> Make:
    return lambda inner, model: ServerOptimizer(
        inner, model=model, **grouped({**SERVED, **options})
    )


# All of them take the steps of the optimizer alone, if the ranks have the same data.
WAYS: dict[str, Make] = {
    "local": _local(),
    "local, every 2": _local(every=2),
    "local, outer": _local(outer=lambda p: torch.optim.SGD(p, lr=1.0)),
    "local, fragments": _local(every=2, fragments=2),
    "sharded": lambda inner, model: ShardedOptimizer(inner, model, **grouped(RAW)),
    "sharded, owed": lambda inner, model: ShardedOptimizer(
        inner, model, "int8:ef=on,bucket=8", compression=Compression(min_numel=10**6)
    ),
    "served": _served(),
    "served by the tensor": _served(barrier="tensor"),
    "served gradients": _served(pulls="gradients"),
}


@dataclass
class Training:
    """`optimizer`: the way to train, or `inner` itself."""

    model: Tied
    inner: torch.optim.Optimizer
    optimizer: Any
    old: dict[str, Any]  # a state of `inner` with another learning rate
    after_step: Callable[[], None] = lambda: None
    zero_grad: Callable[[], None] | None = None
    keeps_graph: bool = False

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(16, 6, generator=generator), torch.arange(16) % 3
        x = x.to(self.model.first.weight.dtype)
        nn.functional.cross_entropy(self.model(x), y).backward(create_graph=self.keeps_graph)

    def step(self) -> None:
        (self.zero_grad or self.optimizer.zero_grad)()
        self.backward()
        self.optimizer.step()
        self.after_step()


def _load_in_inner(t: Training) -> None:
    t.inner.load_state_dict(t.old)


def _replace_groups(t: Training) -> None:
    t.inner.param_groups = [dict(group, lr=0.01) for group in t.inner.param_groups]


def _replace_own_groups(t: Training) -> None:
    t.optimizer.param_groups = [dict(group, lr=0.01) for group in t.optimizer.param_groups]


def _schedule_before_load(t: Training) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    t.inner.load_state_dict(t.old)
    t.after_step = schedule.step


def _schedule_inner(t: Training) -> None:
    t.after_step = torch.optim.lr_scheduler.StepLR(t.inner, 1, 0.5).step


def _cycle_momentum(t: Training) -> None:
    t.after_step = torch.optim.lr_scheduler.OneCycleLR(t.inner, 0.3, total_steps=9).step


def _take_tensor_lr(t: Training) -> None:
    t.inner.param_groups[0]["lr"] = torch.tensor(0.03)


def _zero_inner(t: Training) -> None:
    t.backward()
    t.inner.zero_grad()
    assert all(parameter.grad is None for parameter in t.model.parameters())
    t.zero_grad = t.inner.zero_grad


def _parametrize(t: Training) -> None:
    parametrize.register_parametrization(t.model.last, "weight", nn.Identity())


def _freeze(t: Training) -> None:
    t.inner.param_groups[0]["momentum"] = 0.0
    t.model.last.requires_grad_(False)


def _edit(t: Training) -> None:
    with torch.no_grad():
        t.model.first.weight.clamp_(-0.1, 0.1)


def _set_data(t: Training) -> None:
    t.model.first.weight.data = torch.full_like(t.model.first.weight.data, 0.1)


def _copy_swap(t: Training) -> None:
    """As averages of weights are evaluated."""
    kept = [p.data for p in t.model.parameters()]
    for parameter in t.model.parameters():
        parameter.data = torch.zeros_like(parameter.data)
    for parameter, values in zip(t.model.parameters(), kept, strict=True):
        parameter.data = values


def _load_model(t: Training) -> None:
    t.model.load_state_dict({n: 0.5 * v for n, v in t.model.state_dict().items()})


def _load_and_back(t: Training) -> None:
    kept = copy.deepcopy(t.model.state_dict())
    _load_model(t)
    t.model.load_state_dict(kept)


def _keep_graph(t: Training) -> None:
    t.keeps_graph = True


def _own_hooks(t: Training) -> None:
    t.inner.register_step_post_hook(lambda *args: None)


# The training goes on as that of the optimizer alone.
FOLLOWED: dict[str, Callable[[Training], None]] = {
    "nothing": lambda t: None,
    "state loaded into the wrapped optimizer": _load_in_inner,
    "the same under a scheduler": _schedule_before_load,
    "groups replaced": _replace_groups,
    "own groups replaced": _replace_own_groups,
    "scheduler of the wrapped optimizer": _schedule_inner,
    "momentum cycled": _cycle_momentum,
    "learning rate as a tensor": _take_tensor_lr,
    "zero_grad of the wrapped optimizer": _zero_inner,
    "parametrized": _parametrize,
    "frozen": _freeze,
    "edited": _edit,
    "data set": _set_data,
    "data swapped and back": _copy_swap,
    "model loaded": _load_model,
    "model loaded and back": _load_and_back,
    "hooks": _own_hooks,
    "gradients that have gradients": _keep_graph,
}


def _add_group(t: Training) -> None:
    t.model.extra = nn.Linear(2, 2)
    t.inner.add_param_group({"params": list(t.model.extra.parameters())})


def _append(t: Training) -> None:
    t.inner.param_groups[0]["params"].append(nn.Parameter(torch.ones(7)))


def _remove(t: Training) -> None:
    del t.inner.param_groups[0]["params"][-1]  # last.bias


def _reorder(t: Training) -> None:
    t.inner.param_groups[0]["params"].reverse()


def _step_inner(t: Training) -> None:
    t.backward()
    t.inner.step()


def _scale_inner(t: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(next(t.model.parameters()).sum()).backward()
    scaler.step(t.inner)


def _replace_parameter(t: Training) -> None:
    t.model.last.weight = nn.Parameter(torch.ones(3, 8))


def _assign(t: Training) -> None:
    t.model.load_state_dict(copy.deepcopy(t.model.state_dict()), assign=True)


def _replace_layer(t: Training) -> None:
    t.model.last = nn.Linear(8, 3)


def _untie(t: Training) -> None:
    t.model.third.weight = nn.Parameter(t.model.second.weight.detach().clone())


def _to_double(t: Training) -> None:
    t.model.double()


def _reshape(t: Training) -> None:
    t.model.last.bias.data = torch.zeros(1)


# The next step, or the deed itself, is refused with a text that has these words.
REFUSED: dict[str, tuple[Callable[[Training], None], str]] = {
    "group added": (_add_group, "extra.weight was added to the groups of the SGD"),
    "parameter added": (_append, "a parameter of shape [7] was added to the groups"),
    "parameter removed": (_remove, "last.bias was taken out of the groups of the SGD"),
    "parameters reordered": (_reorder, "the parameters of the SGD are in another order"),
    "stepped itself": (_step_inner, "SGD was stepped itself"),
    "stepped by a scaler": (_scale_inner, "SGD was stepped itself"),
    "parameter replaced": (_replace_parameter, "last.weight was replaced in the module"),
    "assigned": (_assign, "first.weight was replaced in the module"),
    "layer replaced": (_replace_layer, "last.weight left the module"),
    "untied": (_untie, "third.weight was replaced in the module"),
    "another dtype": (_to_double, "of torch.float32 on cpu and is [8, 6] of torch.float64"),
    "another shape": (_reshape, "last.bias was [3] of torch.float32 on cpu and is [1]"),
    "group added to the way": (lambda t: t.optimizer.add_param_group({}), "no further parameters"),
}
# What is not followed, but refused, by the ways whose name begins so.
UNLIKE: dict[tuple[str, str], str] = {
    ("sharded", "state loaded into the wrapped optimizer"): "SGD was given a state itself",
    ("sharded", "the same under a scheduler"): "SGD was given a state itself",
    ("local", "model loaded"): "the model's values were loaded after LocalSteps was made",
    ("served", "state loaded into the wrapped optimizer"): "SGD was given a state itself",
    ("served", "the same under a scheduler"): "SGD was given a state itself",
    ("served", "parametrized"): "last.weight was changed between two steps on rank 0",
    ("served", "edited"): "first.weight was changed between two steps on rank 0",
    ("served", "data set"): "first.weight was replaced after ServerOptimizer was made",
    ("served", "model loaded"): "the model's values were loaded after ServerOptimizer was made",
    ("served by the tensor", "model loaded"): "the model's values were loaded after",
    ("served by the tensor", "edited"): "first.weight was changed between two steps on rank 0",
}
DEEDS = FOLLOWED | {name: deed for name, (deed, _) in REFUSED.items()}


def do_all(way: str | None, deeds: list[str]) -> dict[str, list[np.ndarray] | str | None]:
    """By deed: the parameters of the model two steps after it, or the text of the error. None on a
    server."""
    return {deed: do(way, deed) for deed in deeds}


def do(way: str | None, deed: str) -> list[np.ndarray] | str | None:
    model = Tied()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    old = inner.state_dict()
    old["param_groups"][0]["lr"] = 0.02
    old = copy.deepcopy(old)
    optimizer: Any = inner if way is None else WAYS[way](inner, model)
    training = Training(model, inner, optimizer, old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # coarse gradients, schedulers before the first step
        try:
            if isinstance(optimizer, ServerOptimizer):
                optimizer.connect()
                if optimizer.is_server:
                    with contextlib.suppress(CommunicationError):  # the worker raised
                        optimizer.serve()
                    return None
            training.step()
            training.step()
            DEEDS[deed](training)
            training.step()
            training.step()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if way is not None:
                optimizer.close()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def copy_everything(way: str) -> dict[str, str]:
    """What is said by each way to copy."""
    model = Tied()
    optimizer: Any = WAYS[way](torch.optim.SGD(model.parameters(), lr=0.1), model)
    said = {}
    ways: dict[str, Callable[[Any], Any]] = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
        "torch.save": lambda o: torch.save(o, io.BytesIO()),
        "in a dictionary": lambda o: copy.deepcopy({"optimizer": o}),
    }
    for name, make in ways.items():
        try:
            make(optimizer)
            said[name] = "nothing"
        except TypeError as error:
            said[name] = str(error)
    copied = copy.deepcopy(model)
    torch.save(copied, io.BytesIO())
    optimizer.close()
    return said
