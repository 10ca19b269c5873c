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
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from gradwire.torch.optimizers.gradient_noise import (
    SUMS,
    GradientNoise,
    correct_changes,
    count_decay,
)
from gradwire.torch.optimizers.late_momentum import (
    LateMomentum,
    LocalMomentum,
    check_taken,
    take_momentum,
)
from gradwire.torch.optimizers.replica import BESIDE, ReplicaOptimizer
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import ExchangeArguments, ExchangeSettings
from gradwire.torch.records.parameters import options_of, require_dense, split_like
from gradwire.torch.records.stats import Stats, StepCounters
from gradwire.torch.records.wrapping_optimizer import require_optimizer

_ADAMS = (Adam, AdamW)  # up to PyTorch 2.6 AdamW is no Adam
# Their steps shrink with the root of the second moment of the gradient that they are given.
_OF_SECOND_MOMENTS = (
    *_ADAMS,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


def outer_nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """DiLoCo's outer optimizer, with the values that its authors found best."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


@dataclass
class _Flight:
    """An exchange that has begun, or whose result has arrived and is not applied yet."""

    bucket: torch.Tensor
    steps: int  # whose changes it holds
    fault: str | None  # where this rank's values are not finite
    finite: bool | None = None  # the result; None: it has not arrived


@dataclass(frozen=True)
class LocalStats:
    """`exchanges`: bytes and times, which count each exchange as a step."""

    every: int
    local_steps: int  # of this rank's own optimizer
    left_out: int  # local steps that a GradScaler left out on this rank
    gains: tuple[float, ...]  # of the parameters, by which changes are multiplied; empty: by 1
    exchanges: Stats

    def as_dict(self) -> dict[str, Any]:
        own = {"every": self.every, "local_steps": self.local_steps, "left_out": self.left_out}
        return {**self.exchanges.as_dict(), **own, "gains": list(self.gains)}

    def report(self) -> str:
        """A table as text, which counts each exchange as a step."""
        left_out = f", {self.left_out} left out by a GradScaler" if self.left_out else ""
        lines = [f"local      {self.local_steps} steps{left_out}, an exchange every {self.every}"]
        if self.gains:
            least, *_, most = sorted([*self.gains, *self.gains])
            lines.append(f"gains      {least:.2f} to {most:.2f} for the gradient's noise")
        return "\n".join([*lines, self.exchanges.report()])

    __str__ = report


class LocalSteps(ReplicaOptimizer):
    """Wraps an optimizer of one process and keeps its interface.

        optimizer = LocalSteps(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
        ...
        loss.backward()
        optimizer.step()

    For a plain module, not in DistributedDataParallel. Every rank must construct it, step it and
    load it alike; on construction the ranks compare settings and tensors, and take over rank 0's
    parameters and buffers. After an exchange the parameters are the same bits on every rank;
    between two exchanges they are not. Buffers and the optimizer's state stay each rank's own.

    optimizer      any torch.optim optimizer (LBFGS without clip_norm and correct_noise); it shares
                   its groups and state with this one
    model          gives the parameters their names, which rules and errors mention
    every          steps from one exchange to the next
    outer          makes an outer optimizer for a list of parameters; None: plain average
    clip_norm      clips each rank's gradient by the norm of the *average* gradient, as
                   clip_grad_norm_ would do in DDP; that norm is estimated (gradient_noise.py).
                   None: no clipping
    correct_noise  multiplies each parameter's change by the gain that gradient_noise.py describes,
                   so that the average steps as far as one optimizer of the average gradient would.
                   Decoupled weight decay is left as it is. None: for the optimizers of PyTorch that
                   divide by the root of a second moment, without `outer`
    late_momentum  takes the momentum of Adam and AdamW (the first of `betas`) out of the optimizer,
                   whose groups then have 0 there, and applies it to the averaged changes, alike on
                   all ranks (late_momentum.py). It smooths the error of the codec, too. A new
                   learning rate takes effect over the next 1 / (1 - momentum) steps. None: for
                   these optimizers, without `outer`
    overlap        an exchange takes place while the next steps are computed, and its result is
                   applied when the next exchange begins; then all replicas are the same bits
    codec, settings   as in GradwireState: pull_codec, rules, exclude, exclude_last, min_numel,
                   exchange, ranks_per_machine, process_group, threads, target, seed, timeout

    If a change is not finite on any rank, all ranks go back to the anchor. A NonFiniteStepWarning
    names the rank, stats() counts the step, and residuals are kept. The optimizer of that rank
    loses its state. Sparse gradients may be used if the wrapped optimizer takes them, without
    clip_norm and correct_noise: only changes of parameters are sent.

    A torch.amp.GradScaler works as with any optimizer. Each rank has its own; where it finds a
    gradient that is not finite, this rank takes no step, and takes part in the exchange.

    `step` raises the errors of GradwireState; after an error no step can be taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 1,
        outer: OuterFactory | None = None,
        clip_norm: float | None = None,
        correct_noise: bool | None = None,
        late_momentum: bool | None = None,
        overlap: bool = False,
        codec: str | None = None,
        **settings: Unpack[ExchangeArguments],
    ) -> None:
        require_optimizer(optimizer, "the second is the model")
        if every < 1:
            raise ValueError(f"every is {every}; an exchange every 1 step or more is needed")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; a positive norm is needed")
        if correct_noise is None:
            correct_noise = outer is None and isinstance(optimizer, _OF_SECOND_MOMENTS)
        if late_momentum is None:
            late_momentum = outer is None and isinstance(optimizer, _ADAMS)
        elif late_momentum and (outer is not None or not isinstance(optimizer, _ADAMS)):
            raise ValueError("late_momentum is that of torch.optim.Adam or AdamW, without outer=")
        needs_gradients = correct_noise or clip_norm is not None
        if needs_gradients and isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS computes several gradients in a step, so clip_norm and correct_noise don't "
                "go with it"
            )
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        beside = SUMS * count if needs_gradients else 0
        less_often = f"To send less in all, exchange less often: every={2 * every}"
        exchange_settings = replace(ExchangeSettings.of(codec, settings), remedy=less_often)
        super().__init__(optimizer, model, exchange_settings, beside)
        self.every = every
        self._overlap = overlap
        self._clip_norm = clip_norm
        self._corrects = correct_noise
        numels = [parameter.numel() for parameter in self._parameters]
        self._noise = GradientNoise(numels, self._session.world_size) if beside else None
        self._anchors = [nn.Parameter(torch.empty_like(p)) for p in self._parameters]
        self._outer = None if outer is None else outer(self._anchors)
        betas = take_momentum(optimizer) if late_momentum else []
        self._momentum = LateMomentum(betas, self._anchors) if late_momentum else None
        self._local: LocalMomentum | None = None
        if self._momentum is not None and every > 1:
            self._local = LocalMomentum(self._momentum, self._parameters)
        self._exchanges = 0
        self._local_steps = 0
        self._left_out = 0
        self._since = 0
        self._kept = [1.0] * count  # by weight decay, since the last exchange
        self._gradients_count = True  # false after a step that a GradScaler left out
        self._spare = torch.zeros_like(self._bucket) if overlap else self._bucket
        self._flight: _Flight | None = None
        clipped = "not clipped" if clip_norm is None else f"clipped to norm {clip_norm}"
        follows = [
            f"local steps, exchanged every {every}",
            f"gradients {clipped}, changes {'corrected' if correct_noise else 'not corrected'} for "
            "noise",
            f"applied {'one exchange late' if overlap else 'at once'}",
            f"late momentum {betas or 'of none'}",
        ]
        self._follow_rank_0([*follows, *self._outer_text()])
        self._share_groups()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                anchor.copy_(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's model, and exchanges after every k-th step; returns the loss."""
        self._check_session()
        if self._momentum is not None:
            check_taken(self.param_groups)
        scale, not_finite = self._scaler_says()
        self._gradients_count = not not_finite
        before = [] if self._local is None else self._local.copy_parameters()
        if scale is None and self._noise is None and not not_finite:
            loss = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        else:
            loss = self._evaluate(closure)
            if not not_finite:
                self._scale_gradients(scale)
                self._optimizer.step()
        if self._gradients_count:
            if self._local is not None:
                self._local.go_on(before, self._since + 1)
            count_decay(self._optimizer, self._kept)
        self._left_out += not self._gradients_count
        self._local_steps += 1
        self._since += 1
        if self._since == self.every:
            self._exchange()
        return loss

    def synchronize(self) -> None:
        """Exchanges now, unless no step was taken since the last exchange, and applies the result.

        For the end of a training: after it the ranks' models are equal. Every rank must call it at
        the same step.
        """
        if self._since > 0:
            self._exchange()
        self._apply()

    def _scale_gradients(self, scale: float | None) -> None:
        """Divides them by the GradScaler's scale and clips them."""
        gradients = [parameter.grad for parameter in self._parameters]
        factor = 1.0 if scale is None else 1.0 / scale
        if self._noise is not None:
            for name, gradient in zip(self._names, gradients, strict=True):
                if gradient is not None:
                    require_dense(name, gradient)
        if self._noise is not None and self._clip_norm is not None:
            norm = factor * self._noise.average_norm(gradients)
            if norm > self._clip_norm:
                factor *= self._clip_norm / norm
        if factor != 1.0:
            torch._foreach_mul_([g for g in gradients if g is not None], factor)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Begins to average the changes since the last exchange; applies the result, or with
        `overlap` that of the exchange before."""
        if self._local is not None:
            torch._foreach_copy_(self._parts, self._local.sums)
        else:
            for parameter, anchor, part in zip(
                self._parameters, self._anchors, self._parts, strict=True
            ):
                torch.sub(anchor, parameter, out=part)
        fault = self._find_non_finite()
        if fault is not None:
            self._optimizer.state.clear()
        if self._flight is not None:
            self._arrive(self._flight)  # the noise takes in that exchange before this one
        if self._noise is not None:
            counted = self._gradients_count
            gradients = [p.grad if counted else None for p in self._parameters]
            self._noise.sketch(gradients, self._beside)
            if self._corrects and fault is None:
                gains = self._noise.gains()
                correct_changes(self._parts, self._anchors, gains, self._kept)
        self._kept = [1.0] * len(self._kept)
        if self._overlap:
            self._apply()
        self._start_exchange(self._exchanges)
        self._flight = _Flight(self._bucket, self._since, fault)
        self._exchanges += 1
        self._since = 0
        if self._overlap:
            self._use_bucket(self._spare)
        else:
            self._apply()

    def _arrive(self, flight: _Flight) -> bool:
        """Waits for the result of an exchange. Returns whether it is finite."""
        if flight.finite is None:
            flight.finite = self._finish_exchange(flight.bucket, flight.fault)
            if flight.finite and self._noise is not None:
                self._noise.update(flight.bucket[self._numel :])
        return flight.finite

    @torch.no_grad()
    def _apply(self) -> None:
        """Waits for the exchange under way, if there is one. Takes the model to the new anchor."""
        flight, self._flight = self._flight, None
        if flight is not None and self._arrive(flight):
            averages = split_like(flight.bucket[: self._numel], self._parameters)
            if self._momentum is not None:
                self._momentum.smooth(averages, flight.steps)
            for anchor, average in zip(self._anchors, averages, strict=True):
                if self._outer is None:
                    anchor.sub_(average)
                else:
                    anchor.grad = average
            if self._outer is not None:
                self._outer.step()
                for anchor in self._anchors:
                    anchor.grad = None
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            parameter.copy_(anchor)
        if self._local is not None:
            self._local.restart()
        if flight is not None:
            self._spare = flight.bucket

    def stats(self) -> LocalStats:
        """Sums over all steps of this rank, and the tensors that go raw, with the reasons."""
        gains = tuple(self._noise.gains()) if self._noise is not None and self._corrects else ()
        exchanges = self._session.stats()
        raw = tuple(tensor for tensor in exchanges.raw_tensors if tensor.name != BESIDE)
        exchanges = replace(exchanges, raw_tensors=raw)
        return LocalStats(self.every, self._local_steps, self._left_out, gains, exchanges)

    def last_step(self) -> dict[str, Any]:
        """The last exchange, as GradwireState.last_step(). Its "step" is -1 after a local step."""
        if self._since > 0 or self._exchanges == 0:
            return StepCounters().summary()
        return super().last_step()

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's optimizer, the anchor, the outer optimizer, and residuals.

        Every rank saves its own state and its own parameters: they differ between two exchanges.
        Waits for an exchange under way; its result is saved, too.
        """
        if (flight := self._flight) is not None:
            self._arrive(flight)
        return {
            **self._session.state_dict(self._exchanges),
            "every": self.every,
            "overlap": self._overlap,
            "local_steps": self._local_steps,
            "left_out": self._left_out,
            "since": self._since,
            "kept": list(self._kept),
            "noise": None if self._noise is None else self._noise.state_dict(),
            "momentum": None if self._momentum is None else self._momentum.state_dict(),
            "local_momentum": None if self._local is None else self._local.state_dict(),
            "under_way": (
                None if flight is None else (flight.bucket.clone(), flight.steps, flight.finite)
            ),
            "optimizer": self._optimizer.state_dict(),
            "outer": None if self._outer is None else self._outer.state_dict(),
            "anchors": [anchor.detach().clone() for anchor in self._anchors],
        }

    @torch.no_grad()
    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, and its model's parameters.

        The result is that of the uninterrupted run, bit for bit. Raises ValueError for a state of
        another rank, world size, codec, model, `every`, `overlap` or `outer`.
        """
        self._check_state(state)
        shapes = [list(anchor.shape) for anchor in self._anchors]
        for what, saved, here in (
            ("every", state["every"], self.every),
            ("overlap", state["overlap"], self._overlap),
            ("an outer optimizer", state["outer"] is not None, self._outer is not None),
            ("late momentum", state["momentum"] is not None, self._momentum is not None),
            ("the gradient's noise", state["noise"] is not None, self._noise is not None),
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
        self._left_out = int(state["left_out"])
        self._since = int(state["since"])
        self._kept = list(state["kept"])
        if self._noise is not None:
            self._noise.load_state_dict(state["noise"])
        if self._momentum is not None:
            self._momentum.load_state_dict(state["momentum"])
        if self._local is not None:
            self._local.load_state_dict(state["local_momentum"])
        if self._flight is not None:  # given up: its bucket is free again
            self._spare = self._flight.bucket
        self._flight = None
        if state["under_way"] is not None:
            bucket, steps, finite = state["under_way"]
            self._flight = _Flight(bucket.clone(), steps, None, finite)

    def _outer_text(self) -> list[str]:
        if self._outer is None:
            return ["plain average"]
        name = type(self._outer).__name__
        return [f"outer {name} {options}" for options in options_of(self._outer.param_groups)]
