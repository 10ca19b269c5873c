"""The momentum of Adam, applied to averaged changes instead of to each rank's gradient.

Adam averages the gradient over the last steps and divides it by the root of its second moment. The
second moment changes slowly, so that the quotient may as well be averaged: u = average of (g / root
of v). Then the ranks exchange the changes of an Adam without momentum: the learning rate times a
quotient, and decoupled weight decay. All of them average the decoded changes over the last steps
alike. Momentum so smooths what a coarse codec leaves out and sends later, too.

In Adam the learning rate and the decay come after this average, here they are in it. So a new
learning rate takes effect over the next 1 / (1 - beta) steps, not at once, and a model still moves
for about as many steps after the learning rate became 0.

With several steps from one exchange to the next, a rank steps on with the momentum that all ranks
had at the last exchange, and takes in its own changes alone. What it exchanges is their sum. Then
all ranks take the same steps again from the model on which they agreed last, as if each of the
changes had been the average of all.

Changes are those that are subtracted from parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.torch.records.modes import ordinary_tensors


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
            "the first of betas was set in a parameter group, but LocalSteps applies it to the "
            "averaged changes. If a scheduler sets it, give the scheduler cycle_momentum=False, as "
            "OneCycleLR and CyclicLR take it. late_momentum=False would help, too, but then no "
            "momentum smooths the codec's error"
        )


class LateMomentum:
    """Moving averages of the averaged changes of some tensors, one beta for each, with Adam's
    correction of the first steps: equal on all ranks. The changes were made with the learning rates
    and the weight decay of their own steps."""

    @ordinary_tensors()
    def __init__(self, betas: Sequence[float], tensors: Sequence[Tensor]) -> None:
        self.betas = list(betas)
        self.velocities = [torch.zeros_like(t, requires_grad=False) for t in tensors]
        self.steps = 0

    def smooth(self, averages: Sequence[Tensor], steps: int = 1) -> None:
        """Turns the average sums of the changes of some steps into the changes to apply, in place.

        Each of the steps has an equal part p of the sum. With v as the velocity before, the i-th
        step makes it beta^i v + (1 - beta^i) p, and changes the parameters by this velocity / (1 -
        beta^t), where t counts all steps.
        """
        for average, velocity, beta in zip(averages, self.velocities, self.betas, strict=True):
            decays = [beta**i for i in range(1, steps + 1)]
            weights = [1.0 / (1.0 - beta**self.steps * decay) for decay in decays]
            kept = sum(w * d for w, d in zip(weights, decays, strict=True))
            new = sum(w * (1.0 - d) for w, d in zip(weights, decays, strict=True))
            part = average / steps
            torch.add(velocity * kept, part, alpha=new, out=average)
            velocity.lerp_(part, 1.0 - decays[-1])
        self.steps += steps

    def state_dict(self) -> dict[str, Any]:
        velocities = [velocity.clone() for velocity in self.velocities]
        return {"betas": list(self.betas), "steps": self.steps, "velocities": velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state's betas, too, as optimizers do with the options of their groups."""
        self.betas = list(state["betas"])
        self.steps = int(state["steps"])
        for velocity, values in zip(self.velocities, state["velocities"], strict=True):
            velocity.copy_(values)


class LocalMomentum:
    """The same moving averages on one rank, from one exchange to the next.

    sums        of the changes since the last exchange
    parameters  of this rank; a tensor may have leading dimensions that the shared one lacks
    """

    @ordinary_tensors()
    def __init__(self, shared: LateMomentum, parameters: Sequence[Tensor]) -> None:
        self.sums = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        self._velocities = [torch.zeros_like(total) for total in self.sums]
        self._shared = shared
        self._parameters = parameters

    def copy_parameters(self) -> list[Tensor]:
        """For `go_on`, before the optimizer's step."""
        return [parameter.detach().clone() for parameter in self._parameters]

    @ordinary_tensors()
    def go_on(self, before: Sequence[Tensor], steps: int) -> None:
        """Replaces the change that the optimizer has made in this step, without momentum, by one
        with momentum. steps: those since the last exchange, with this one."""
        count = self._shared.steps + steps
        places = zip(
            self._parameters, before, self.sums, self._velocities, self._shared.betas, strict=True
        )
        for parameter, old, total, velocity, beta in places:
            change = old - parameter
            total.add_(change)
            velocity.lerp_(change, 1.0 - beta)
            torch.sub(old, velocity, alpha=1.0 / (1.0 - beta**count), out=parameter)

    def restart(self) -> None:
        """After an exchange, or where one is given up: goes on from what all ranks share."""
        for total, velocity, shared in zip(
            self.sums, self._velocities, self._shared.velocities, strict=True
        ):
            total.zero_()
            velocity.copy_(shared)

    def state_dict(self) -> dict[str, Any]:
        places = {"sums": self.sums, "velocities": self._velocities}
        return {name: [tensor.clone() for tensor in tensors] for name, tensors in places.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in ((self.sums, state["sums"]), (self._velocities, state["velocities"])):
            for tensor, values in zip(mine, saved, strict=True):
                tensor.copy_(values)
