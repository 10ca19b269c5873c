"""What users do to the optimizer and the module that they have given to a way to train."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler

from gradwire.torch.errors import CommunicationError

AfterStep = Callable[[], None]
Training = Any  # a `ways.Training` of a Tied
Deed = Callable[[Training], AfterStep | None]


class Tied(nn.Module):
    """`second` and `third` share their weight."""

    keeps_graph = False

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


def loss_of(model: Any, *args: int) -> torch.Tensor:
    """The same on each rank and in each step."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 6, generator=generator), torch.arange(16) % 3
    loss = nn.functional.cross_entropy(model(x.to(model.first.weight.dtype)), y)
    if model.keeps_graph:
        loss.backward = partial(loss.backward, create_graph=True)  # type: ignore[method-assign]
    return loss


def two_steps_after(
    deed: Deed, training: Training, steps: int = 2, loss: Callable[..., torch.Tensor] = loss_of
) -> nn.Module | str | None:
    """Takes some steps, does the deed, takes two more, and ends the training. Returns the model, or
    the text of the error; None on a server."""
    try:
        if getattr(training.source, "is_server", False):
            with contextlib.suppress(CommunicationError):  # the worker raised
                training.run(1, loss)
            return None
        if training.way.servers:
            training.optimizer.connect()
        for _ in range(steps):
            training.step(loss)
        after_step = deed(training) or (lambda: None)
        for _ in range(2):
            training.step(loss)
            after_step()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if training.source is not None:
            training.close()
    model: nn.Module = training.model
    return model


def _load_in_inner(t: Training) -> None:
    other = torch.optim.SGD(t.model.parameters(), lr=0.02, momentum=0.9)
    t.inner.load_state_dict(other.state_dict())


def _replace_groups(t: Training) -> None:
    t.inner.param_groups = [dict(group, lr=0.01) for group in t.inner.param_groups]


def _replace_own_groups(t: Training) -> None:
    t.optimizer.param_groups = [dict(group, lr=0.01) for group in t.optimizer.param_groups]


def _schedule_before_load(t: Training) -> AfterStep:
    schedule = lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    _load_in_inner(t)
    return schedule.step


def _schedule_inner(t: Training) -> AfterStep:
    return lr_scheduler.StepLR(t.inner, 1, 0.5).step


def _cycle_momentum(t: Training) -> AfterStep:
    return lr_scheduler.OneCycleLR(t.inner, 0.3, total_steps=9).step


def _take_tensor_lr(t: Training) -> None:
    t.inner.param_groups[0]["lr"] = torch.tensor(0.03)


def _zero_inner(t: Training) -> None:
    loss_of(t.module).backward()
    t.inner.zero_grad()
    assert all(parameter.grad is None for parameter in t.model.parameters())
    t.optimizer.zero_grad = t.inner.zero_grad


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
    t.module.keeps_graph = True


def _own_hooks(t: Training) -> None:
    t.inner.register_step_post_hook(lambda *args: None)


# The training goes on as that of the optimizer alone.
FOLLOWED: dict[str, Deed] = {
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
    loss_of(t.module).backward()
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
REFUSED: dict[str, tuple[Deed, str]] = {
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
