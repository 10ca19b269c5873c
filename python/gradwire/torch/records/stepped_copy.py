"""A copy of an optimizer that has taken a step, to look at the state that a step makes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.torch.records.modes import ordinary_tensors
from gradwire.torch.records.optimizer_watch import keeps_squares

DEVICES = ("meta", "cpu")  # the second for optimizers that need values, which are freed at once


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer divides by means of squares of gradients; True if that is not known,
    because it can't be copied."""
    for device in DEVICES:
        with contextlib.suppress(Exception):  # of any optimizer's own code
            return keeps_squares(step_of_copy(optimizer, device))
    return True


@ordinary_tensors()
def step_of_copy(optimizer: Optimizer, device: str) -> Optimizer:
    """A copy without hooks that has taken a step of zeros. device: "meta", where tensors have no
    values, or "cpu", which a few optimizers need."""
    groups = []
    for group in optimizer.param_groups:
        places = [nn.Parameter(torch.zeros_like(p, device=device)) for p in group["params"]]
        for place in places:
            place.grad = torch.zeros_like(place)
        groups.append({**group, "params": places})
    copy = type(optimizer).__new__(type(optimizer))
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    copy.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
    copy.step()
    return copy
