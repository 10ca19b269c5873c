"""Finds out which optimizer steps certain parameters, and warns where that goes badly.

Adam and its kin divide each gradient by the root of a mean of its squares. A coarse codec sends
what is due to a value in rare bursts. Their sum is right, but their squares are too large, and the
optimizer learns several times too slowly.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire._core import AutoGoal, Layout, is_coarse, is_goal
from gradwire.torch.link.errors import CoarseGradientsWarning

# The line to write instead, for an optimizer and a codec.
INSTEAD = "optimizer = LocalSteps({optimizer}(...), model, codec='{codec}')"

# Entries of a parameter's state that are made of squares or magnitudes: those of Adam, AdamW, NAdam
# and RAdam; Adamax; RMSprop and Adadelta; Adagrad; Adafactor. Optimizers from elsewhere mostly use
# the same names.
_SQUARES = {"exp_avg_sq", "exp_inf", "square_avg", "sum", "row_var", "variance"}


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps means of squares. It must have taken a step."""
    return any(_SQUARES & state.keys() for state in optimizer.state.values())


def usual_push_codec(layout: Layout) -> str:
    """The codec, or the `auto` text, that most values are pushed with."""
    sent: Counter[str] = Counter()
    for segment in layout.segments:
        sent[segment["push_goal"] or segment["push_codec"]] += segment["numel"]
    return sent.most_common(1)[0][0]


class OptimizerWatch:
    """If `codec`, which sends the parameters' gradients, is coarse: waits for the first step on any
    of the parameters.

    After that step it costs nothing. It is stopped when it is dropped.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], codec: str) -> None:
        self.remarks: tuple[str, ...] = ()  # the warning, if there was one
        self._codec = codec
        self._watched = {id(parameter) for parameter in parameters}
        if not (AutoGoal(codec).is_coarse if is_goal(codec) else is_coarse(codec)):
            return
        me = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (watch := me()) is not None:
                watch._look_at(optimizer)

        # The registry is PyTorch's own and lasts for ever, so it must not hold this object.
        handle = register_optimizer_step_post_hook(after_step)
        self._stop = weakref.finalize(self, handle.remove)

    def _look_at(self, optimizer: Optimizer) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if self._watched.isdisjoint(map(id, stepped)):
            return
        self._stop()
        if not is_adaptive(optimizer):
            return
        name = type(optimizer).__name__
        remark = (
            f"{name} divides gradients by the root of their squares, and {self._codec} sends a "
            "value rarely, or with an error as large as the value: so the training learns several "
            "times too slowly. Compress its updates instead: "
            f"{INSTEAD.format(optimizer=name, codec=self._codec)}, with a model that is not in DDP "
            "(docs/training.md). Or take a codec that sends every gradient closely, such as bf16, "
            "int8 or qsgd:bits=4"
        )
        self.remarks = (remark,)
        warnings.warn(remark, CoarseGradientsWarning, stacklevel=2)
