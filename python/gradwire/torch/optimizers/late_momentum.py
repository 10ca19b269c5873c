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

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from gradwire.torch.optimizer_list import each_parameter, parts_of
from gradwire.torch.parameters import ordinary_tensors, wide_of
from gradwire.torch.staging.moves import overwrite


def momentum_of_each(optimizer: Optimizer) -> list[float]:
    """The first of `betas` for each parameter; 0 for those that no Adam steps."""
    return [
        float(group["betas"][0]) if isinstance(part, Adam) else 0.0
        for part, group, _ in each_parameter(optimizer)
    ]


@contextlib.contextmanager
def without_momentum(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the first of each Adam's `betas` is 0. (Outside it is the user's: schedulers and
    checkpoints of the optimizer read it.)"""
    adams = [part for part in parts_of(optimizer) if isinstance(part, Adam)]
    groups = [group for part in adams for group in part.param_groups]
    kept = [group["betas"] for group in groups]
    for group, (momentum, *others) in zip(groups, kept, strict=True):
        group["betas"] = (momentum * 0, *others)  # which may be tensors
    try:
        yield
    finally:
        for group, betas in zip(groups, kept, strict=True):
            group["betas"] = betas


def check_momentum(optimizer: Optimizer, agreed: Sequence[float]) -> None:
    """Raises RuntimeError unless each parameter has the momentum on which all ranks agreed."""
    if momentum_of_each(optimizer) != agreed:
        raise RuntimeError(
            "the first of betas was changed in a parameter group, but LocalSteps applies it to the "
            "averaged changes, with the values that all ranks agreed on when it was made. If a "
            "scheduler sets it, give the scheduler cycle_momentum=False, as OneCycleLR and "
            "CyclicLR take it. late_momentum=False would help, too, but then no momentum smooths "
            "the codec's error. (In a step it is 0: call state_dict() between two steps)"
        )


class LateMomentum:
    """Moving averages of the averaged changes of some tensors, one beta for each, with Adam's
    correction of the first steps: equal on all ranks. The changes were made with the learning rates
    and the weight decay of their own steps."""

    @ordinary_tensors()
    def __init__(self, betas: Sequence[float], tensors: Sequence[Tensor]) -> None:
        self.betas = list(betas)
        self.velocities = [torch.zeros_like(t, requires_grad=False) for t in tensors]
        self.steps = [0] * len(tensors)  # of each

    def smooth(
        self, averages: Sequence[Tensor], steps: int = 1, unused: Collection[int] = ()
    ) -> None:
        """Turns the average sums of the changes of some steps into the changes to apply, in place.
        unused: the places of tensors that no rank had a gradient of, which Adam does not step.

        Each of the steps has an equal part p of the sum. With v as the velocity before, the i-th
        step makes it beta^i v + (1 - beta^i) p, and changes the parameters by this velocity / (1 -
        beta^t), where t counts all steps.
        """
        places = zip(averages, self.velocities, self.betas, strict=True)
        for place, (average, velocity, beta) in enumerate(places):
            if place in unused or beta == 0:
                continue
            decays = [beta**i for i in range(1, steps + 1)]
            weights = [1.0 / (1.0 - beta ** self.steps[place] * decay) for decay in decays]
            kept = sum(w * d for w, d in zip(weights, decays, strict=True))
            new = sum(w * (1.0 - d) for w, d in zip(weights, decays, strict=True))
            part = average / steps
            torch.add(velocity * kept, part, alpha=new, out=average)
            velocity.lerp_(part, 1.0 - decays[-1])
            self.steps[place] += steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "velocities": [v.clone() for v in self.velocities]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])
        overwrite(self.velocities, state["velocities"])


class LocalMomentum:
    """The same moving averages on one rank, from one exchange to the next.

    sums        of the changes since the last exchange, f32
    parameters  of this rank
    anchors     the parameters at the last exchange, f32
    """

    @ordinary_tensors()
    def __init__(
        self, shared: LateMomentum, parameters: Sequence[Tensor], anchors: Sequence[Tensor]
    ) -> None:
        self.sums = [torch.zeros_like(a, requires_grad=False) for a in anchors]
        self._velocities = [torch.zeros_like(total) for total in self.sums]
        self._shared = shared
        self._parameters = parameters
        # What the parameters would be with 32 bits: small steps are not lost by rounding.
        self._exact = [
            p if p.dtype == a.dtype else a.detach().clone()
            for p, a in zip(parameters, anchors, strict=True)
        ]
        self._anchors = anchors

    def copy_parameters(self) -> list[Tensor]:
        """For `go_on`, before the optimizer's step."""
        return [parameter.detach().clone() for parameter in self._parameters]

    @ordinary_tensors()
    def go_on(self, before: Sequence[Tensor], steps: int, used: Sequence[bool]) -> None:
        """Replaces the change that the optimizer has made in this step, without momentum, by one
        with momentum. steps: those since the last exchange, with this one. used: of each parameter,
        whether it has a gradient."""
        for place, (parameter, old, exact, total, velocity, beta) in enumerate(
            zip(
                self._parameters,
                before,
                self._exact,
                self.sums,
                self._velocities,
                self._shared.betas,
                strict=True,
            )
        ):
            change = wide_of(old) - wide_of(parameter)
            if not used[place] and not change.any():
                continue
            total.add_(change)
            if beta == 0:  # without momentum, the step is as it was
                continue
            count = self._shared.steps[place] + steps
            velocity.lerp_(change, 1.0 - beta)
            alpha = 1.0 / (1.0 - beta**count)
            if exact.dtype == parameter.dtype:  # the parameter itself
                torch.sub(old, velocity, alpha=alpha, out=parameter)
            else:
                parameter.copy_(exact.sub_(velocity, alpha=alpha))

    def restart(self) -> None:
        """After an exchange, or where one is given up: goes on from what all ranks share."""
        for total, velocity, shared in zip(
            self.sums, self._velocities, self._shared.velocities, strict=True
        ):
            total.zero_()
            velocity.copy_(shared)
        for exact, anchor, parameter in zip(
            self._exact, self._anchors, self._parameters, strict=True
        ):
            if exact.dtype != parameter.dtype:
                exact.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": [total.clone() for total in self.sums],
            "velocities": [velocity.clone() for velocity in self._velocities],
            "exact": [exact.clone() for exact in self.exact_of_16_bits()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = [*self.sums, *self._velocities, *self.exact_of_16_bits()]
        saved = [*state["sums"], *state["velocities"], *state.get("exact", ())]
        overwrite(mine, saved)

    def exact_of_16_bits(self) -> list[Tensor]:
        """What the parameters of 16 bits would be with 32."""
        places = zip(self._exact, self._parameters, strict=True)
        return [exact for exact, parameter in places if parameter.dtype != exact.dtype]
