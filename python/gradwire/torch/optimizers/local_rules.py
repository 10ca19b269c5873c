"""What LocalSteps does to gradients and changes, and presets of it that papers describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from gradwire._core import spell_out_codec
from gradwire.errors import keeps_residual, sends_late
from gradwire.local_schedule import GATED_CODEC, Schedule
from gradwire.option_record import explains_arguments
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.optimizer_list import each_parameter, parts_of
from gradwire.torch.optimizers.replica import BESIDE
from gradwire.torch.options import NEEDS_STORE, Compression
from gradwire.torch.wrapping_optimizer import (
    OwnUse,
    copy_options,
    note_step,
    remake,
    step_alone,
)

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]
# Their steps shrink with the root of the second moment of the gradient that they are given.
_OF_SECOND_MOMENTS = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


@dataclass(frozen=True)
class LocalRules:
    """What LocalSteps does, apart from what is sent; the arguments of its constructor.

    Attributes:
        is_elastic: Whether ranks come and go.
    """

    schedule: Schedule
    outer: OuterFactory | None
    clip_norm: float | None
    correct_noise: bool
    late_momentum: bool
    residual_decay: float
    is_elastic: bool

    @property
    def has_noise(self) -> bool:
        """Whether the gradient's noise is estimated."""
        return self.correct_noise or self.clip_norm is not None

    def corrected(self, optimizer: Optimizer) -> list[bool]:
        """Whether `correct_noise` is for each parameter. In a list of optimizers it is for those
        that are known to divide by the root of a second moment, if there are some."""
        known = {id(part) for part in parts_of(optimizer) if isinstance(part, _OF_SECOND_MOMENTS)}
        return [
            self.correct_noise and (not known or id(part) in known)
            for part, _, _ in each_parameter(optimizer)
        ]

    def measures(self, is_corrected: bool) -> bool:
        """Whether the noise of a parameter's gradient matters: of all, to clip by their norm."""
        return is_corrected or self.clip_norm is not None

    def check_gradients(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor | None],
        corrected: Sequence[bool],
    ) -> None:
        """Raises TypeError for a sparse gradient whose noise matters: that is measured of dense
        ones alone."""
        for name, gradient, is_corrected in zip(names, gradients, corrected, strict=True):
            if gradient is None or gradient.layout == torch.strided:
                continue
            if self.measures(is_corrected):
                remedies = [] if self.clip_norm is None else ["leave out clip_norm"]
                remedies += ["give correct_noise=False"] * is_corrected
                raise TypeError(
                    f"the gradient of {name} is sparse ({gradient.layout}), and LocalSteps "
                    f"measures the noise of dense ones: {' and '.join(remedies)}, or make its "
                    "nn.Embedding or nn.EmbeddingBag with sparse=False"
                )

    @staticmethod
    def choose(
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        outer: OuterFactory | Optimizer | None,
        clip_norm: float | None,
        correct_noise: bool | None,
        late_momentum: bool | None,
        residual_decay: float,
        is_elastic: bool,
    ) -> LocalRules:
        """Raises ValueError for arguments that are out of range or exclude each other."""
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; a positive norm is needed")
        if schedule.mix > 0 and (correct_noise or late_momentum):
            raise ValueError(
                "correct_noise and late_momentum need whole changes since the last exchange, of "
                "which mix keeps a part: give mix=0, or neither of them"
            )
        replaces = outer is None and schedule.mix == 0
        parts = parts_of(optimizer)
        has_adam = any(isinstance(part, torch.optim.Adam) for part in parts)
        if correct_noise is None:
            divides = any(isinstance(part, _OF_SECOND_MOMENTS) for part in parts)
            correct_noise = replaces and divides and not schedule.is_seldom
        if late_momentum is None:
            late_momentum = replaces and has_adam
        elif late_momentum and (outer is not None or not has_adam):
            raise ValueError("late_momentum is that of torch.optim.Adam or AdamW, without outer=")
        rules = LocalRules(
            schedule,
            OuterLike(outer, optimizer) if isinstance(outer, Optimizer) else outer,
            clip_norm,
            correct_noise,
            late_momentum,
            residual_decay,
            is_elastic,
        )
        if rules.has_noise and isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS computes several gradients in a step, so clip_norm and correct_noise don't "
                "go with it"
            )
        return rules

    def with_codec(self, compression: Compression) -> Compression:
        """What is sent, with the codec that a gate needs if none is given."""
        if self.schedule.gate and not compression.codec:
            return replace(compression, codec=GATED_CODEC)
        return compression

    @property
    def _takes_late_changes(self) -> bool:
        return self.outer is None and not self.schedule.is_seldom

    def finer_codec(self) -> str:
        """In place of "small", which holds much back for the next exchange. Empty: "small" does."""
        return "" if self._takes_late_changes else spell_out_codec("half-byte")

    def describe_late_changes(self, codec: str) -> str:
        """What comes of a coarse codec whose residuals wait long for the next exchange; empty if
        these do not."""
        if self._takes_late_changes or self.residual_decay < 1 or not sends_late(codec):
            return ""
        outer = "" if self.outer is None else " and for an outer optimizer"
        return (
            f"{codec} sends many changes late. With an exchange every {self.schedule.every} "
            f"steps{outer} that costs much: such training ended with a higher loss than with 4 "
            "bits, or diverged (docs/results/evaluation/diloco.md). Take codec='half-byte', or "
            "sparse_loco(), whose residuals fade"
        )

    def complete(self, settings: ExchangeSettings) -> ExchangeSettings:
        """The settings of the exchanges under these rules. Raises ValueError if they do not fit."""
        if settings.goals and self.schedule.fragments > 1:
            raise ValueError(
                f"{settings.goals[0]} chooses codecs for the tensors of a whole model, which "
                "fragments exchange apart: give another codec, or fragments=1"
            )
        decay = self.residual_decay
        if not 0 < decay <= 1:
            raise ValueError(
                f"residual_decay is {decay}; a factor above 0, and at most 1, is needed"
            )
        codecs = [settings.codec, settings.pull_codec or settings.codec]
        if self.schedule.gate:
            check_gated([*codecs, *(rule[1] for rule in settings.rules)])
        elif decay < 1 and not any(map(keeps_residual, codecs)):
            raise ValueError(
                f"{settings.codec} keeps no residual that residual_decay could multiply: take a "
                "codec with error feedback, such as topk2bit, or leave residual_decay out"
            )
        less_often = f"To send less in all, exchange less often: every={2 * self.schedule.every}"
        beside = [BESIDE] if self.has_noise or self.is_elastic else []
        exclude = [*settings.exclude, *beside]
        return replace(settings, remedy=less_often, exclude=exclude, of_changes=True)

    def check_members(self, shards: dist.ProcessGroup | None, settings: ExchangeSettings) -> None:
        """Raises ValueError for settings with which ranks can't come and go, if they shall.
        shards: the ranks among which FSDP2 has sharded the model."""
        if settings.role is not None:
            raise ValueError("role is for ServerOptimizer: the ranks of LocalSteps are all alike")
        if not self.is_elastic:
            return
        if settings.store is None:
            raise ValueError(f"on_lost='continue' needs {NEEDS_STORE}")
        if shards is not None:
            raise ValueError(
                "on_lost='continue' does not go with a model that fully_shard has sharded: the "
                "ranks of a replica would have to come and go together"
            )
        if self.schedule.is_back_to_back:
            raise ValueError(
                f"on_lost='continue' needs a delay below every={self.schedule.every}: with "
                "delay=every the changes leave the model when they are sent, and would be lost "
                "with an exchange"
            )
        if settings.info["between_machines"]:
            raise ValueError(
                f"on_lost='continue' does not go with exchange='{settings.exchange}', which needs "
                "the same number of ranks on every machine"
            )
        if settings.goals:
            raise ValueError(
                f"on_lost='continue' does not go with {settings.goals[0]}: a newcomer does not "
                "know what the others measured. Give a codec"
            )

    def describe(self, betas: list[float]) -> list[str]:
        """What all ranks must be given alike. betas: the momenta that are applied late."""
        clipped = "not clipped" if self.clip_norm is None else f"clipped to norm {self.clip_norm}"
        corrected = "corrected" if self.correct_noise else "not corrected"
        return [
            *self.schedule.describe(),
            f"gradients {clipped}, changes {corrected} for noise",
            f"late momentum {betas or 'of none'}",
            f"residuals multiplied by {self.residual_decay}",
            "plain average" if self.outer is None else "outer optimizer",
        ]


class OuterLike:
    """Makes optimizers like the user's: of its class, with its options whatever they become, such
    as by a learning-rate scheduler. The user's own takes no steps.

    Raises:
        ValueError: It has several groups, and a fragment has one; it has a state; it lacks a
            parameter of `inner`, the optimizer that LocalSteps wraps; or no other one like it can
            take a step.
    """

    def __init__(self, optimizer: Optimizer, inner: Optimizer) -> None:
        name = type(optimizer).__name__
        if len(optimizer.param_groups) != 1:
            raise ValueError(
                f"outer is a {name} with {len(optimizer.param_groups)} groups of parameters, and "
                "has one in a fragment: give a function that makes an optimizer for a list of "
                "parameters"
            )
        if optimizer.state:
            raise ValueError(
                f"outer is a {name} that has a state already, which would be lost: give a new one"
            )
        parameters = optimizer.param_groups[0]["params"]
        known = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in known for _, _, parameter in each_parameter(inner)):
            raise ValueError(
                f"outer is a {name} that lacks parameters of the {type(inner).__name__}, and would "
                "step them all: give it the same parameters"
            )
        device = parameters[0].device
        trial = nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device=device))
        trial.grad = torch.zeros_like(trial)
        try:
            step_alone(remake(optimizer, [{**optimizer.param_groups[0], "params": [trial]}]))
        except Exception as error:  # of its own code
            raise ValueError(
                f"outer is a {name}, of which a copy can't take a step ({error}): give a function "
                "that makes an optimizer for a list of parameters"
            ) from error
        self._optimizer = optimizer
        self._own_use = OwnUse(optimizer, "LocalSteps")
        self._own_use.refuse_saving()
        self._own_use.refuse_loading("load the state of the LocalSteps")
        # The user's options, as each of those made knows them.
        self._known: WeakKeyDictionary[Optimizer, dict[str, Any]] = WeakKeyDictionary()

    def end(self) -> None:
        """Gives the user's optimizer back."""
        self._own_use.end()

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        options = self._optimizer.param_groups[0]
        made = remake(self._optimizer, [{**options, "params": parameters}])
        self._known[made] = copy_options(options)
        return made

    def lead(self, made: Optimizer) -> None:
        """Gives what was made the options that the user has changed. (Some optimizers count in
        their options.)"""
        note_step(self._optimizer)
        options = copy_options(self._optimizer.param_groups[0])
        known, self._known[made] = self._known[made], options
        changed = {n: v for n, v in options.items() if n not in known or not _equal(v, known[n])}
        made.param_groups[0].update(copy_options(changed))

    def follow(self, made: Optimizer) -> None:
        """Gives the user's optimizer the options with a state that was loaded."""
        self._optimizer.param_groups[0].update(copy_options(made.param_groups[0]))
        for each in self._known:
            self._known[each] = copy_options(self._optimizer.param_groups[0])


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)
    except (TypeError, ValueError, RuntimeError):
        return one is other


@explains_arguments
def outer_nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """DiLoCo's outer optimizer (Douillard et al. 2023, arXiv:2311.08105): SGD with Nesterov
    momentum, with the values that its authors found best."""
    return partial(SGD, lr=lr, momentum=momentum, nesterov=True)


@explains_arguments
def pulse_loco(lr: float = 0.7, momentum: float = 0.9) -> dict[str, Any]:
    """PULSELoCo (Miahi and Belilovsky 2026, arXiv:2602.03839), as arguments of LocalSteps:

        LocalSteps(adamw, model, every=30, **pulse_loco())

    DiLoCo whose ranks send exactly those changes that alter the model in bfloat16, and keep the
    others until they do (Schedule.gate). For small learning rates: how much is left out is a matter
    of the steps' size.

    lr, momentum   of the outer optimizer, see outer_nesterov
    """
    return {"gate": "bfloat16", "outer": outer_nesterov(lr, momentum)}


def check_gated(codecs: Iterable[str]) -> None:
    """Raises ValueError for a codec that does not go with a gate."""
    for codec in codecs:
        if keeps_residual(codec):
            raise ValueError(
                f"{codec} keeps a residual, and so it would send values that gate= holds back: "
                f"leave codec out, or take one without error feedback, such as {GATED_CODEC}"
            )


@explains_arguments
def sparse_loco(density: float = 0.02, decay: float = 0.95, lr: float = 1.0) -> dict[str, Any]:
    """SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706), as arguments of LocalSteps:

        LocalSteps(adamw, model, every=30, **sparse_loco())

    A rank adds its changes to its residual, sends the largest of each 4096 values in 2 bits, and
    keeps `decay` times the rest, which takes the place of an outer momentum. Every rank receives
    what each other rank sends (the exchange broadcast), so that nothing is compressed twice.

    density   the share of the values that is sent; the paper has 0.01 to 0.03
    decay     of the residuals, in (0, 1]
    lr        by which the average is multiplied
    """
    return {
        "codec": f"topk2bit:density={density}",
        "exchange": "broadcast",
        "residual_decay": decay,
        "outer": partial(SGD, lr=lr),
    }


def describe_lost_eps(optimizer: Optimizer) -> str:
    """For the warning of a change that is not finite: what an `eps` that is 0 in float16 has to do
    with it; empty if there is none. Then such an optimizer divides small gradients by 0."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            eps = float(group.get("eps") or 0.0)
            is_lost = eps > 0 and float(torch.tensor(eps, dtype=torch.float16, device="cpu")) == 0
            if is_lost and any(p.dtype == torch.float16 for p in group["params"]):
                name = type(part).__name__
                return f" (eps={eps:g} of {name} is 0 in float16: give it 1e-4, or take bfloat16)"
    return ""
