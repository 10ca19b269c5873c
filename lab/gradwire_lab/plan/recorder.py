"""Measures a model's steps, layer by layer, for a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch.parameters import named_parameters
from gradwire_lab.plan.profile import Layer, PlanError, Profile

_FORWARD, _END, _GRADIENT = "forward", "end", "gradient of "
LEFT_OUT = 3  # first steps, in which memory is taken

# Seconds from the beginning of a step to its marks: the loss, each gradient, the end.
Marks = dict[str, float]


class StepRecorder:
    """Notes when the gradient of each parameter comes, in each step inside its `with` block:

        with StepRecorder(model) as recorder:
            for _ in range(20):
                recorder.begin_step()
                take_step()            # forward, backward, optimizer
                recorder.end_step()
        profile = profile_of("mine", model, [recorder.steps])

    The times of a GPU are those of its stream.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[Marks] = []
        self._model = model
        self._on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        self._hooks = ExitStack()
        self._marks: list[tuple[str, Any]] = []  # seconds, or an event of the GPU

    def __enter__(self) -> Self:
        hooks = [self._model.register_forward_hook(partial(self._mark, _FORWARD))]
        for name, parameter in named_parameters(self._model):
            if parameter.requires_grad:
                note = partial(self._mark, _GRADIENT + name)
                hooks.append(parameter.register_post_accumulate_grad_hook(note))
        for hook in hooks:
            self._hooks.enter_context(hook)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def begin_step(self) -> None:
        self._marks = []
        self._mark("begin")

    def end_step(self) -> None:
        self._mark(_END)
        if self._on_gpu:
            torch.cuda.synchronize()
        (_, first), *others = self._marks
        self.steps.append({name: self._seconds(first, mark) for name, mark in others})

    def _mark(self, name: str, *_: object) -> None:
        mark: Any = time.perf_counter()
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((name, mark))

    def _seconds(self, first: Any, mark: Any) -> float:
        return first.elapsed_time(mark) / 1e3 if self._on_gpu else mark - first


def without_exchange(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    beside: Callable[[], torch.futures.Future[Any] | None] = lambda: None,
) -> DistributedDataParallel:
    """DDP around the model, with a hook that hands back every bucket as it is: a step takes what
    it would take on a network without limits. Needs a process group; group: None: the default.
    beside: called when the last bucket is there, which is handed back when the future is done."""

    # DDP refuses annotations that are strings.
    def hand_back(state, bucket):  # type: ignore[no-untyped-def]
        values, future = bucket.buffer(), beside() if bucket.is_last() else None
        return noop_hook(state, bucket) if future is None else future.then(lambda _: values)

    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(None, hand_back)
    return ddp


def check_gradients(model: nn.Module, marks: Marks) -> None:
    """Raises PlanError if a parameter got no gradient in a step: DDP would wait for it."""
    trained = [name for name, p in named_parameters(model) if p.requires_grad]
    if missing := [name for name in trained if _GRADIENT + name not in marks]:
        raise PlanError(f"no gradient came for {', '.join(missing)}")


def profile_of(name: str, model: nn.Module, steps_of_ranks: Sequence[Sequence[Marks]]) -> Profile:
    """The profile of a model, without codecs and transport.

    steps_of_ranks: the steps of each rank, which began together. Every mark counts when the last
    rank has reached it, because an exchange waits for that rank; times are medians of all steps
    but the first three. Raises PlanError if there are too few steps, or if a parameter got no
    gradient (DDP would wait for it).
    """
    together = [
        {mark: max(one[mark] for one in ranks) for mark in ranks[0]}
        for ranks in zip(*steps_of_ranks, strict=True)
    ][LEFT_OUT:]
    if not together:
        raise PlanError(f"a profile needs more than {LEFT_OUT} steps")
    middle = {mark: median(step[mark] for step in together) for mark in together[-1]}
    trained = {n: p for n, p in named_parameters(model) if p.requires_grad}
    dims = {n: tuple(p.shape) for n, p in trained.items()}
    bits = {n: 8 * p.element_size() for n, p in trained.items()}
    check_gradients(model, middle)
    layers, before = [], middle[_FORWARD]
    for layer in sorted(dims, key=lambda n: middle[_GRADIENT + n]):
        come = max(before, middle[_GRADIENT + layer])
        layers.append(Layer(layer, dims[layer], come - before, bits[layer]))
        before = come
    return Profile(
        model=name,
        workers=len(steps_of_ranks),
        forward_seconds=middle[_FORWARD],
        rest_seconds=max(0.0, middle[_END] - before),
        layers=tuple(layers),
        codecs={},
    )
