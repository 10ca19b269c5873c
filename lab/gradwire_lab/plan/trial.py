"""Real steps of a training, with an exchange and without one, on the links that it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire._core import spell_out_codec
from gradwire.errors import RECOMMENDED
from gradwire.local_schedule import Schedule
from gradwire.torch import GradwireState, LocalSteps, gradwire_hook
from gradwire.torch.optimizer_list import parts_of
from gradwire_lab.plan.fit import ALONE, HOOK, LOCAL
from gradwire_lab.plan.measure import KEPT_GRADIENTS, Gradients, gradients_of
from gradwire_lab.plan.predict import DDP
from gradwire_lab.plan.recorder import LEFT_OUT, Marks, StepRecorder, check_gradients

_BLOCKS = 2


class Trial:
    """Takes steps of a copy of the model, in one of several ways: ALONE, DDP, HOOK, LOCAL.

    Needs the default process group, of which all ranks make it, and take the same steps together.

    Args:
        model: Plain.
        step: Computes the loss with the module that it is given, and its gradients.
        optimizer: Steps in each way. None: nothing does.
        every: Of LOCAL, which needs an optimizer.

    Attributes:
        codec: Of HOOK and LOCAL: few bytes, so that steps are short on any link.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[nn.Module], Any],
        optimizer: Optimizer | Sequence[Optimizer] | None,
        every: int,
    ) -> None:
        self.codec = spell_out_codec("half-byte") if Schedule(every).is_seldom else RECOMMENDED
        self.gradients: list[Gradients] = []  # the last, of steps alone
        self._given, self._step, self._every = (model, optimizer), step, every
        self._model, copied = deepcopy(self._given)
        self._optimizers = [] if copied is None else parts_of(copied)
        self._recorder = StepRecorder(self._model)
        self._modules: dict[str, nn.Module] = {}
        self._local: LocalSteps | None = None
        self._state: GradwireState | None = None

    @property
    def marks(self) -> list[Marks]:
        """Of the steps alone."""
        return self._recorder.steps

    def take(self, steps: Mapping[str, int]) -> dict[str, list[float]]:
        """Seconds of so many steps of each way, of LOCAL `every` times as many. The ways take turns
        in blocks, whose first steps are left out: they make connections, and load caches."""
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        for block in range(_BLOCKS):
            for way, taken in seconds.items():
                left, turns = (1 if block else LEFT_OUT), self._every if way == LOCAL else 1
                count = left + ceil(steps[way] / _BLOCKS)
                taken += [self._time(way) for _ in range(turns * count)][turns * left :]
        return seconds

    def take_alone(self, steps: int) -> None:
        """For `marks` and `gradients`. Raises PlanError if a parameter got no gradient."""
        for _ in range(steps):
            self._time(ALONE)
            check_gradients(self._model, self.marks[-1])

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        if self._local is not None:
            self._local.close()

    def _time(self, way: str) -> float:
        module = self._modules[way] if way in self._modules else self._make(way)
        steppers = [self._local] if way == LOCAL else self._optimizers
        module.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        if way == ALONE:
            with self._recorder:
                self._recorder.begin_step()
                self._take(module, steppers)
                self._recorder.end_step()
        else:
            self._take(module, steppers)
        seconds = time.perf_counter() - began
        if way == ALONE:
            self.gradients = [*self.gradients, gradients_of(self._model)][-KEPT_GRADIENTS:]
        return seconds

    def _take(self, module: nn.Module, steppers: Sequence[Any]) -> None:
        self._step(module)
        for stepper in steppers:
            stepper.step()

    def _make(self, way: str) -> nn.Module:
        """The module that `step` gets. DDP around a model does nothing while it is not called."""
        if way == LOCAL:
            module, optimizer = deepcopy(self._given)
            assert optimizer is not None
            self._local = LocalSteps(optimizer, module, self.codec, every=self._every)
        else:
            module = DistributedDataParallel(self._model)
            if way == ALONE:
                module.register_comm_hook(None, noop_hook)
            elif way == HOOK:
                self._state = GradwireState(self.codec, start_iter=0, model=module)
                module.register_comm_hook(self._state, gradwire_hook)
            else:
                assert way == DDP
        self._modules[way] = module
        return module


def slowest(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each step, those of the rank that took longest. All ranks call it together."""
    found = {}
    for way, taken in seconds.items():
        of_all = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(of_all, dist.ReduceOp.MAX)
        found[way] = of_all.tolist()
    return found
