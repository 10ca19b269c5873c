"""Finds out which optimizer steps certain parameters, and warns where that goes badly.

Adam and its kin divide each gradient by the root of a mean of its squares. A coarse codec sends
what is due to a value in rare bursts. Their sum is right, but their squares are too large, and the
optimizer learns several times too slowly.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire._core import Layout, is_goal
from gradwire.advice import RECOMMENDED, sends_coarsely
from gradwire.torch.errors import CoarseGradientsWarning

# Entries of a parameter's state that are made of squares or magnitudes: those of Adam, AdamW, NAdam
# and RAdam; Adamax; RMSprop and Adadelta; Adagrad; Adafactor. Optimizers from elsewhere mostly use
# the same names.
_SQUARES = {"exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"}


def keeps_squares(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps means of squares. It must have taken a step."""
    return any(_SQUARES & state.keys() for state in optimizer.state.values())


def usual_push_codec(layout: Layout) -> str:
    """The codec, or the `auto` text, that most values are pushed with; "raw" if there are none."""
    sent: Counter[str] = Counter()
    for segment in layout.segments:
        sent[segment["push_goal"] or segment["push_codec"]] += segment["numel"]
    return max(sent, key=sent.__getitem__, default="raw")


def describe_coarse_gradients(optimizer: str, codec: str, local_steps: bool = True) -> str:
    """What an adaptive optimizer makes of the gradients that a coarse codec sends, and the lines to
    write instead. local_steps: whether LocalSteps can take the place."""
    found = (
        f"{optimizer} learns several times too slowly from gradients compressed with {codec} "
        "(docs/guides/adam.md). "
    )
    if not local_steps:
        return found + "Take codec='int8'"
    instead = codec if is_goal(codec) else RECOMMENDED
    return found + (
        "Write instead: from gradwire.torch import LocalSteps; optimizer = "
        f"LocalSteps({optimizer}(...), model, codec='{instead}'), without DDP and with clip_norm= "
        "in place of clip_grad_norm_. Or take codec='int8'"
    )


class OptimizerWatch:
    """If `codec`, which sends the parameters' gradients, is coarse: waits for the first step of an
    adaptive optimizer on any of the parameters. Of all ranks, rank 0 warns.

    After that step, or when other optimizers have stepped all of the parameters, it only returns.
    It is removed when it is dropped: PyTorch takes no hook away while it calls them.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        codec: str,
        rank: int,
        local_steps: bool = True,
    ) -> None:
        """local_steps: see describe_coarse_gradients."""
        self.remarks: tuple[str, ...] = ()  # the warning, if there was one
        self._codec, self._rank, self._local_steps = codec, rank, local_steps
        self._watched = {id(parameter) for parameter in parameters}
        if not sends_coarsely(codec):
            return
        me = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (watch := me()) is not None and watch._watched:
                watch._look_at(optimizer)

        # The registry is PyTorch's own and lasts for ever, so it must not hold this object.
        handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, handle.remove)

    def _look_at(self, optimizer: Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._watched.isdisjoint(stepped):
            return
        if not keeps_squares(optimizer):
            self._watched -= stepped
            return
        self._watched.clear()
        remark = describe_coarse_gradients(type(optimizer).__name__, self._codec, self._local_steps)
        self.remarks = (remark,)
        if self._rank == 0:
            warnings.warn(remark, CoarseGradientsWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """The `stacklevel` of a warning that is given by the caller, so that it shows the line which
    called the optimizer: the first that is neither in gradwire nor in PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in ("gradwire", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
