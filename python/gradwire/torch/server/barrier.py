"""Fine-grained barriers: each part of a model goes its way as soon as it can (3LC, section 4.1).

A worker pushes a part while the backward pass still computes the gradients of other parts, and
waits for its pull only where the next forward pass needs it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwire.torch.server.model_parts import WorkerPart
from gradwire.torch.server.server_settings import INSTEAD
from gradwire.torch.server.worker_loop import Working
from gradwire.torch.shared_parameters import (
    ModuleHook,
    hookable_modules,
    remove_hooks,
    remove_hooks_of,
)


@dataclass
class PartTimes:
    """What a worker did with one part in one step. Times in seconds since the first gradients of
    the step were there; None: it did not come to that."""

    names: tuple[str, ...]  # of the tensors
    ready: float  # all gradients of the part were there
    pushed: float  # they were encoded and handed over
    arrived: float | None = None  # the last message of the pull was here
    needed: float | None = None  # the forward pass came to the part
    applied: float | None = None  # the part had its new values


class TensorBarrier:
    """The hooks on the model of a worker.

    A part is waited for at the modules that own its tensors. A module can use a tensor of another
    module, which is then not called itself (`nn.MultiheadAttention` does so). The first forward
    pass shows which modules are called. The tensors of the others are waited for at the nearest
    module around them that is called, or in `finish` if there is none.
    """

    def __init__(self, model: nn.Module, working: Working) -> None:
        """Raises ValueError if the parameters of `working` are not all in the model."""
        self.steps = 0
        self._version = 0  # see `version`
        self._working = working
        self._model = model
        self._part_of = {
            id(tensor): (name, part)
            for part in working.parts.values()
            for name, tensor in zip(part.names, part.tensors, strict=True)
        }
        lacking = self._part_of.keys() - {id(tensor) for tensor in model.parameters()}
        if lacking:
            name = min(self._part_of[key][0] for key in lacking)
            raise ValueError(f"the optimizer steps {name}, which is no parameter of model=")
        # Tensors whose gradients a part's push waits for; frozen ones get none.
        self._watched: dict[int, set[int]] = {}
        self._lock = threading.Lock()  # gradients of several devices come in several threads
        self._paused = False
        self._begun = False  # a gradient of this step has come, and `finish` has not
        self._pushes_for = 0  # the version for which this step pushes
        self._came: defaultdict[int, set[int]] = defaultdict(set)  # tensors with gradients, by part
        self._pushed: list[tuple[str, torch.Tensor, int]] = []  # gradients and their versions
        self._start = 0.0  # of the last step's gradients, by time.perf_counter
        self._times: dict[int, PartTimes] = {}  # of the last step
        self._timeline: list[PartTimes] = []  # of the step before
        self._called: set[int] | None = set()  # modules, until the first gradient
        self._noting: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []
        self._eager: set[int] = set()  # parts that `finish` waits for

    def attach(self) -> None:
        """Begins, when the link is open."""
        on_gradient = ModuleHook(self._on_gradient)
        for number, part in self._working.parts.items():
            trained = [tensor for tensor in part.tensors if tensor.requires_grad]
            self._handles += [t.register_post_accumulate_grad_hook(on_gradient) for t in trained]
            self._watched[number] = {id(tensor) for tensor in trained}
        before_state_dict = ModuleHook(self._before_state_dict)
        modules = list(hookable_modules(self._model))
        if self._model in modules:
            self._handles.append(self._model.register_state_dict_pre_hook(before_state_dict))
        note_call = ModuleHook(self._note_call)
        self._noting = [module.register_forward_pre_hook(note_call) for module in modules]
        remove_hooks_of(self, self._handles)

    @property
    def version(self) -> int:
        """The version of the model for which the next forward pass waits, if it is not newer."""
        return max(self._version, self._working.version)

    def timeline(self) -> list[PartTimes]:
        """The last step of which all is known: its parts in the order of their pushes."""
        return sorted(self._timeline, key=lambda times: times.pushed)

    def synchronize(self) -> None:
        """Waits until all parameters have the values of `version`, or newer ones. Between the first
        gradient and `finish` they keep the values for which the gradient is computed. After
        `detach` it waits for nothing."""
        if self._handles and not self._begun:
            with self._working.link.guard(f"step {self.steps - 1}, waiting for its pulls"):
                self._await(self._working.parts, self._working.wait_unless_over)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, gradients accumulate and are not pushed."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self, is_scaled: bool) -> None:
        """Ends the backward pass: pushes the parts that still lack gradients. Called inside
        `guard`. is_scaled: by a GradScaler."""
        if is_scaled:
            raise ValueError(
                "a GradScaler does not go with barrier='tensor', whose gradients are sent before "
                "the scaler can look at them. " + INSTEAD
            )
        self._check_unchanged()
        if not self._begun:
            self._begin()
        for number in sorted(self._working.parts.keys() - self._times.keys()):
            self._await([number])  # no module of it was called
            self._push(self._working.parts[number])
        self._begun = False
        self._came.clear()
        self._pushed.clear()
        self.steps += 1
        self._working.release()
        self._working.await_turn()
        # A worker that was late may have taken a step more than the others, who have left.
        self._await(self._eager, self._working.wait_unless_over)
        self._working.take_arrived()
        for number in self._eager:
            self._working.use(number)
        self._version = max(self._version, self._working.version_ahead)

    def detach(self) -> None:
        remove_hooks(self._handles)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.synchronize()

    def _note_call(self, module: nn.Module, inputs: object) -> None:
        if self._called is not None:
            self._called.add(id(module))

    def _on_gradient(self, tensor: torch.Tensor) -> None:
        if self._paused:
            return
        name, part = self._part_of[id(tensor)]
        with self._lock, self._working.link.guard(f"step {self.steps}, backward"):
            if not self._begun:
                self._begin()
            came = self._came[part.number]
            if id(tensor) in came:
                raise RuntimeError(
                    f"{name} got a second gradient before optimizer.step(), and the first is sent "
                    "already: compute all but the last inside `with optimizer.no_sync():`"
                )
            if not part.exchange.done:
                raise RuntimeError(
                    f"the gradient of {name} was computed with old values: the forward pass used "
                    "it, and did not call the module that owns it, as it did in the first step. "
                    + INSTEAD
                )
            came.add(id(tensor))
            if came == self._watched[part.number]:
                self._push(part)

    def _begin(self) -> None:
        if self._called is not None:
            self._place_waits(self._called)
            self._called = None
        self._begun = True
        self._complete_times()
        self._timeline, self._times = list(self._times.values()), {}
        self._start = time.perf_counter()
        self._pushes_for = self._working.version_to_push
        self._working.begin_step(self._pushes_for)

    def _push(self, part: WorkerPart) -> None:
        times = PartTimes(tuple(part.names), self._now(), 0.0)
        if part.exchange.next_version > self._pushes_for:
            self._working.hold_back(part)
        else:
            self._working.push(part, self.steps)
        times.pushed = self._now()
        self._times[part.number] = times
        for name, tensor in zip(part.names, part.tensors, strict=True):
            if tensor.grad is not None:
                self._pushed.append((name, tensor.grad, tensor.grad._version))

    def _await(
        self, numbers: Iterable[int], wait: Callable[[Iterable[int]], None] | None = None
    ) -> None:
        """Waits for the pulls of these parts, which the forward pass needs."""
        wait = wait or self._working.wait
        for number in numbers:
            times = self._times.get(number)
            if times is not None and times.needed is None:
                times.needed = self._now()
            wait([number])

    def _check_unchanged(self) -> None:
        """Raises if what was sent is no longer what the step should send."""
        if self._begun and not self._working.sent_options_hold():
            raise ValueError(
                "the options of a parameter group changed between the first gradient, with which "
                "they were sent, and optimizer.step(): change them after step(), as schedulers do. "
                + INSTEAD
            )
        for number, part in self._working.parts.items():
            for name, tensor in zip(part.names, part.tensors, strict=True):
                if tensor.requires_grad and id(tensor) not in self._watched[number]:
                    raise RuntimeError(
                        f"{name} required no gradient in connect() and requires one now, which was "
                        f"not sent: let it require one before connect(). {INSTEAD}"
                    )
        for name, gradient, version in self._pushed:
            if gradient._version != version:
                raise RuntimeError(
                    f"the gradient of {name} was changed (clipped, unscaled) after it was sent. "
                    + INSTEAD
                )

    def _complete_times(self) -> None:
        for number, times in self._times.items():
            if number in self._working.arrivals:
                arrived, applied = self._working.arrivals[number]
                if arrived > self._start:  # it was pushed
                    times.arrived, times.applied = arrived - self._start, applied - self._start

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _place_waits(self, called: set[int]) -> None:
        """Registers the hooks that wait, at modules among those that the forward pass called."""
        remove_hooks(self._noting)
        modules = dict(self._model.named_modules(remove_duplicate=False))
        numbers_at: defaultdict[str, set[int]] = defaultdict(set)
        for path, module in modules.items():
            own = self._part_of.keys() & {id(tensor) for tensor in module._parameters.values()}
            numbers = {self._part_of[key][1].number for key in own}
            place = path
            while place and id(modules[place]) not in called:
                place = place.rpartition(".")[0]
            if id(modules[place]) in called:
                numbers_at[place] |= numbers
            else:
                self._eager |= numbers
        for place, numbers in numbers_at.items():
            if numbers:
                hook = ModuleHook(self._before_forward, sorted(numbers))
                self._handles.append(modules[place].register_forward_pre_hook(hook))

    def _before_forward(self, numbers: Sequence[int], module: nn.Module, inputs: object) -> None:
        if not self._begun:  # a checkpointed module is called again in the backward pass
            # After the training a worker that was late may lack a version that nobody makes.
            wait = None if torch.is_grad_enabled() else self._working.wait_unless_over
            with self._working.link.guard(f"step {self.steps - 1}, waiting for its pulls"):
                self._await(numbers, wait)
            for number in numbers:
                self._working.use(number)
