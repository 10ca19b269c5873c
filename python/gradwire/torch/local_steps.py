"""`LocalSteps`: every rank steps alone; every k-th step the ranks agree on a model again.

What a rank changed since the last time (anchor - parameters, the *pseudo-gradient*) is averaged
over the ranks, compressed with residuals, and applied to the anchor: the model all ranks had then.

plain   the average is subtracted. With `every=2` this is the "2 local steps" of 3LC (Lim, Andersen,
        Kaminsky; SysML 2019, section 4.2): state changes are transmitted every second step, unsent
        ones accumulate locally and go with the next. (There, workers can't step their model alone,
        so what accumulates are gradients of one model. That is gradient accumulation: the hook and
        DDP's `no_sync()`.)
outer   the average is the gradient of an outer optimizer, as in DiLoCo (Douillard et al. 2023,
        arXiv:2311.08105): SGD with Nesterov momentum, see `outer_nesterov`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from gradwire.torch import checkpoint
from gradwire.torch.coding import make_coding
from gradwire.torch.replica import Replica, name_parameters, refuse_gradient_scaler
from gradwire.torch.session import check_timeout
from gradwire.torch.shard import options_of
from gradwire.torch.stats import Stats, StepCounters

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


def outer_nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """DiLoCo's outer optimizer, with the values that its authors found best."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


@dataclass(frozen=True)
class LocalStats:
    """`exchanges`: bytes and times, as of a hook that runs in every `every`-th step alone."""

    every: int
    local_steps: int  # of this rank's own optimizer
    exchanges: Stats

    def as_dict(self) -> dict[str, Any]:
        own = {"every": self.every, "local_steps": self.local_steps}
        return {**self.exchanges.as_dict(), **own}

    def report(self) -> str:
        """A table for people. Its steps are exchanges."""
        return f"local      {self.local_steps} steps, an exchange every {self.every}\n" + (
            self.exchanges.report()
        )

    __str__ = report


class LocalSteps(Optimizer):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=8)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel. Every rank must construct it, step it and
    load it alike; on construction the ranks compare settings and tensors, and take over rank 0's
    parameters and buffers. After an exchange the parameters are the same bits on every rank;
    between two exchanges they are not. Buffers and the optimizer's state stay each rank's own.

    optimizer      any torch.optim optimizer; its groups and state are those of this one
    model          gives the parameters their names, which rules and errors speak of
    every          steps from one exchange to the next
    outer          makes the outer optimizer of the parameters it is given; None: plain average
    codec ... ranks_per_machine, timeout   as in GradwireState

    A change that is not finite on any rank: all ranks go back to the anchor, a NonFiniteStepWarning
    names it, stats() counts it, residuals are kept; the optimizer of that rank starts anew.
    Raises the errors of GradwireState in `step`; after one no step can be taken.
    """

    # So that a GradScaler calls `step`, which refuses it, whatever the gradients are.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int,
        outer: OuterFactory | None = None,
        codec: str | None = None,
        pull_codec: str | None = None,
        rules: Sequence[tuple[str, ...]] = (),
        exclude: Sequence[str] = (),
        min_numel: int = 256,
        process_group: dist.ProcessGroup | None = None,
        threads: int = 1,
        target: str = "auto",
        exchange: str = "sharded",
        ranks_per_machine: int | None = None,
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; an exchange every 1 step or more is needed")
        check_timeout(timeout)
        named = name_parameters(optimizer, model)
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        coding = make_coding(
            process_group,
            codec=codec,
            pull_codec=pull_codec,
            rules=rules,
            exclude=exclude,
            min_numel=min_numel,
            threads=threads,
            target=target,
            seed=seed,
            exchange=exchange,
            ranks_per_machine=ranks_per_machine,
        )
        self.every = every
        self._optimizer = optimizer
        self._anchors = [nn.Parameter(torch.empty_like(parameter)) for _, parameter in named]
        self._outer = None if outer is None else outer(self._anchors)
        self._exchanges = 0
        self._local_steps = 0
        self._since = 0
        self._replica = Replica(named, model, coding, process_group, timeout)
        self._replica.follow_rank_0([f"local steps, exchanged every {every}", *self._outer_text()])
        self._adopt_optimizer()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._replica.parameters, strict=True):
                anchor.copy_(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is constructed: the ranks have agreed on the parameters then."""
        if hasattr(self, "_optimizer"):
            raise RuntimeError(
                "LocalSteps takes no further parameters: make a new one, of an optimizer with all "
                "of them"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's model, and in every k-th step the common one; returns the loss."""
        refuse_gradient_scaler(self)
        if self.error is not None:
            raise self.error
        loss = None
        if closure is None:
            self._optimizer.step()
        else:
            loss = self._optimizer.step(closure)
        self._local_steps += 1
        self._since += 1
        if self._since == self.every:
            self.synchronize()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchanges now, unless nobody stepped since the last time: the ranks' models are equal
        then. For the end of a training; every rank must call it at the same step."""
        if self._since == 0:
            return
        replica = self._replica
        places = list(zip(replica.parameters, self._anchors, replica.parts, strict=True))
        for parameter, anchor, part in places:
            torch.sub(anchor, parameter, out=part)
        fault = replica.find_non_finite()
        finite = replica.exchange(self._exchanges, fault)
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

    @property
    def error(self) -> Exception | None:
        """What ended the communication; after it no step can be taken."""
        return self._replica.error

    def stats(self) -> LocalStats:
        """Sums over all steps of this rank, and what goes raw and why."""
        return LocalStats(self.every, self._local_steps, self._replica.stats())

    def last_step(self) -> dict[str, Any]:
        """Bytes and times of this rank's last exchange, as GradwireState.last_step(); nothing
        ("step" is -1) where the last step was a local one."""
        if self._since > 0 or self._exchanges == 0:
            return StepCounters().summary()
        return self._replica.last_step()

    def explain(self, error: BaseException) -> BaseException:
        """As GradwireState.explain."""
        return self._replica.explain(error)

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's optimizer, the anchor, the outer optimizer, residuals.

        Every rank saves its own, and its own parameters: between two exchanges they differ.
        """
        return {
            **self._replica.state_dict(self._exchanges),
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

        The result is that of the uninterrupted run, bit for bit. Raises ValueError if it was saved
        by another rank, for another world size, codec, model, `every` or `outer`.
        """
        self._replica.check_state(state)
        shapes = [list(anchor.shape) for anchor in self._anchors]
        for what, saved, here in (
            ("every", state["every"], self.every),
            ("an outer optimizer", state["outer"] is not None, self._outer is not None),
            ("parameters of the shapes", [list(a.shape) for a in state["anchors"]], shapes),
        ):
            if saved != here:
                raise ValueError(f"{what}: the state has {saved}, this rank has {here}")
        self._optimizer.load_state_dict(state["optimizer"])
        self._adopt_optimizer()
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        for anchor, values in zip(self._anchors, state["anchors"], strict=True):
            anchor.copy_(values)
        self._replica.load_state_dict(state)
        self._exchanges = int(state["iterations"])
        self._local_steps = int(state["local_steps"])
        self._since = int(state["since"])

    def close(self) -> None:
        """Ends the communication; happens by itself at exit, and when nobody refers to this."""
        self._replica.close()

    def _adopt_optimizer(self) -> None:
        """Groups and state are one and the same, whichever of the two a scheduler was given."""
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    def _outer_text(self) -> list[str]:
        if self._outer is None:
            return ["plain average"]
        name = type(self._outer).__name__
        return [f"outer {name} {options}" for options in options_of(self._outer.param_groups)]
