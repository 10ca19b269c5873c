"""The momentum of Adam, applied to averaged changes instead of to each rank's gradient.

Adam averages the gradient over the last steps and divides it by the root of its second moment. The
second moment changes slowly, so that the quotient may as well be averaged: u = average of (g / root
of v). Then the ranks exchange the quotients, and all of them average the decoded results alike.
Momentum so smooths what a coarse codec leaves out and sends later, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def take_momentum(optimizer: Optimizer) -> list[float]:
    """Sets the first of `betas` to 0 in all groups of Adam or AdamW. Returns it for each of their
    parameters."""
    taken: list[float] = []
    for group in optimizer.param_groups:
        momentum, other = group["betas"]
        taken += [float(momentum)] * len(group["params"])
        group["betas"] = (0.0, other)
    return taken


def check_taken(groups: Sequence[dict[str, Any]]) -> None:
    """Raises RuntimeError if a group has a momentum again."""
    if any(group["betas"][0] != 0.0 for group in groups):
        raise RuntimeError(
            "the first of betas was set in a parameter group (by a scheduler?), but LocalSteps "
            "applies it to the averaged changes: give late_momentum=False"
        )


class LateMomentum:
    """Moving averages of the averaged changes of some tensors, one decay for each, with Adam's
    correction of the first steps."""

    def __init__(self, betas: Sequence[float], tensors: Sequence[torch.Tensor]) -> None:
        self._betas = list(betas)
        self._velocities = [torch.zeros_like(t, requires_grad=False) for t in tensors]
        self._steps = 0

    def smooth(self, averages: Sequence[torch.Tensor]) -> None:
        """Turns averaged changes into the changes to apply, in place."""
        self._steps += 1
        places = zip(averages, self._velocities, self._betas, strict=True)
        for average, velocity, beta in places:
            velocity.lerp_(average, 1.0 - beta)
            torch.div(velocity, 1.0 - beta**self._steps, out=average)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "velocities": [v.clone() for v in self._velocities]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        for velocity, values in zip(self._velocities, state["velocities"], strict=True):
            velocity.copy_(values)
