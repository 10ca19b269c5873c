"""`LocalSteps`: every rank steps alone; after every k-th step the ranks agree on a model again.

The *anchor* is the model on which all ranks agreed last. Each rank sends its change since then
(anchor - parameters, the *pseudo-gradient*), compressed and with residuals. The average over the
ranks is applied to the anchor, in one of two ways.

plain   the average is subtracted from the anchor: local SGD.
outer   the average is the gradient of an outer optimizer, as in DiLoCo (Douillard et al. 2023,
        arXiv:2311.08105): SGD with Nesterov momentum, see `outer_nesterov`.

The "2 local steps" of 3LC (Lim, Andersen, Kaminsky; SysML 2019, section 4.2) are different: the
workers do not step a model of their own, but accumulate gradients of the same model and send the
sum every second step. In gradwire that is gradient accumulation, with the hook and DDP's `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from gradwire.torch.optimizers.replica import ReplicaOptimizer
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import ExchangeArguments, ExchangeSettings
from gradwire.torch.records.parameters import options_of
from gradwire.torch.records.stats import Stats, StepCounters

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


def outer_nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """DiLoCo's outer optimizer, with the values that its authors found best."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


@dataclass(frozen=True)
class LocalStats:
    """`exchanges`: bytes and times, which count each exchange as a step."""

    every: int
    local_steps: int  # of this rank's own optimizer
    exchanges: Stats

    def as_dict(self) -> dict[str, Any]:
        own = {"every": self.every, "local_steps": self.local_steps}
        return {**self.exchanges.as_dict(), **own}

    def report(self) -> str:
        """A table as text, which counts each exchange as a step."""
        return f"local      {self.local_steps} steps, an exchange every {self.every}\n" + (
            self.exchanges.report()
        )

    __str__ = report


class LocalSteps(ReplicaOptimizer):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=8)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel. Every rank must construct it, step it and
    load it alike; on construction the ranks compare settings and tensors, and take over rank 0's
    parameters and buffers. After an exchange the parameters are the same bits on every rank;
    between two exchanges they are not. Buffers and the optimizer's state stay each rank's own.

    optimizer      any torch.optim optimizer; it shares its groups and state with this one
    model          gives the parameters their names, which rules and errors mention
    every          steps from one exchange to the next
    outer          makes an outer optimizer for a list of parameters; None: plain average
    codec, settings   as in GradwireState: pull_codec, rules, exclude, min_numel, exchange,
                   ranks_per_machine, process_group, threads, target, seed, timeout

    If a change is not finite on any rank, all ranks go back to the anchor. A NonFiniteStepWarning
    names the rank, stats() counts the step, and residuals are kept. The optimizer of that rank
    loses its state. Sparse gradients may be used if the wrapped optimizer takes them: only changes
    of parameters are sent.
    `step` raises the errors of GradwireState; after an error no step can be taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int,
        outer: OuterFactory | None = None,
        codec: str | None = None,
        **settings: Unpack[ExchangeArguments],
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; an exchange every 1 step or more is needed")
        super().__init__(optimizer, model, ExchangeSettings.of(codec, settings))
        self.every = every
        self._anchors = [nn.Parameter(torch.empty_like(p)) for p in self._parameters]
        self._outer = None if outer is None else outer(self._anchors)
        self._exchanges = 0
        self._local_steps = 0
        self._since = 0
        self._follow_rank_0([f"local steps, exchanged every {every}", *self._outer_text()])
        self._share_groups()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                anchor.copy_(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's model, and exchanges after every k-th step; returns the loss."""
        self._check_step()
        loss = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._local_steps += 1
        self._since += 1
        if self._since == self.every:
            self.synchronize()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchanges now, unless no step was taken since the last exchange.

        For the end of a training: after it the ranks' models are equal. Every rank must call it at
        the same step.
        """
        if self._since == 0:
            return
        places = list(zip(self._parameters, self._anchors, self._parts, strict=True))
        for parameter, anchor, part in places:
            torch.sub(anchor, parameter, out=part)
        fault = self._find_non_finite()
        finite = self._exchange_bucket(self._exchanges, fault)
        if fault is not None:
            self._optimizer.state.clear()
        if finite and self._outer is None:
            for _, anchor, part in places:
                anchor.sub_(part)
        elif finite and self._outer is not None:
            for _, anchor, part in places:
                anchor.grad = part
            self._outer.step()
            for _, anchor, _ in places:
                anchor.grad = None
        for parameter, anchor, _ in places:
            parameter.copy_(anchor)
        self._exchanges += 1
        self._since = 0

    def stats(self) -> LocalStats:
        """Sums over all steps of this rank, and the tensors that go raw, with the reasons."""
        return LocalStats(self.every, self._local_steps, self._session.stats())

    def last_step(self) -> dict[str, Any]:
        """The last exchange, as GradwireState.last_step(). Its "step" is -1 after a local step."""
        if self._since > 0 or self._exchanges == 0:
            return StepCounters().summary()
        return super().last_step()

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's optimizer, the anchor, the outer optimizer, and residuals.

        Every rank saves its own state and its own parameters: they differ between two exchanges.
        """
        return {
            **self._session.state_dict(self._exchanges),
            "every": self.every,
            "local_steps": self._local_steps,
            "since": self._since,
            "optimizer": self._optimizer.state_dict(),
            "outer": None if self._outer is None else self._outer.state_dict(),
            "anchors": [anchor.detach().clone() for anchor in self._anchors],
        }

    @torch.no_grad()
    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and its model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, codec, model, `every` or `outer`.
        """
        self._check_state(state)
        shapes = [list(anchor.shape) for anchor in self._anchors]
        for what, saved, here in (
            ("every", state["every"], self.every),
            ("an outer optimizer", state["outer"] is not None, self._outer is not None),
            ("parameters of the shapes", [list(a.shape) for a in state["anchors"]], shapes),
        ):
            if saved != here:
                raise ValueError(f"{what}: the state has {saved}, this rank has {here}")
        self._optimizer.load_state_dict(state["optimizer"])
        self._share_groups()
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        for anchor, values in zip(self._anchors, state["anchors"], strict=True):
            anchor.copy_(values)
        self._session.load_state_dict(state)
        self._exchanges = int(state["iterations"])
        self._local_steps = int(state["local_steps"])
        self._since = int(state["since"])

    def _outer_text(self) -> list[str]:
        if self._outer is None:
            return ["plain average"]
        name = type(self._outer).__name__
        return [f"outer {name} {options}" for options in options_of(self._outer.param_groups)]
