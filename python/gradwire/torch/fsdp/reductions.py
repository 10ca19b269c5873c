"""Reductions of gradients that are under way in a backward pass, and gradients that no rank has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire.torch.network.engine import Unused


@dataclass
class Reduction:
    """deliver: puts the result of `future` where PyTorch expects it."""

    future: torch.futures.Future[torch.Tensor]
    deliver: Callable[[], None]
    unused: Unused
    parameters: list[nn.Parameter]


class Reductions:
    """Waits for the results, and takes off the zeros that FSDP2 leaves where no rank has a
    gradient. A backward pass may reduce a parameter more than once."""

    def __init__(self) -> None:
        self._under_way: deque[Reduction] = deque()
        self._blank: set[nn.Parameter] = set()  # their gradients may be zeros of no rank
        self._silenced: list[tuple[nn.Parameter, Any]] = []

    def begin(self) -> None:
        """Forgets a backward pass that ended with an error."""
        self.land(0)
        self._blank.clear()

    def note(self, unused: Iterable[nn.Parameter]) -> None:
        """This rank lacks the gradients of these, which are reduced now."""
        self._blank.update(p for p in unused if p.grad is None)

    def add(self, reduction: Reduction) -> None:
        self._under_way.append(reduction)

    def land(self, left: int) -> list[nn.Parameter]:
        """Waits for reductions, the oldest first, until so many are under way. Returns those
        parameters of the last that no rank has a gradient of."""
        unused: list[nn.Parameter] = []
        while len(self._under_way) > left:
            reduction = self._under_way.popleft()
            reduction.future.wait()
            reduction.deliver()
            unused = [reduction.parameters[place] for place in reduction.unused.everywhere()]
            self._blank -= set(reduction.parameters) - set(unused)
        return unused

    def silence(self, unused: Iterable[nn.Parameter]) -> None:
        """Until `end_silence`, an optimizer that steps in `backward()` leaves these out, to whose
        gradients PyTorch writes zeros now."""
        for parameter in unused:
            if hooks := parameter._post_accumulate_grad_hooks:
                self._silenced.append((parameter, hooks))
                parameter._post_accumulate_grad_hooks = {}

    def end_silence(self) -> None:
        for parameter, hooks in self._silenced:
            parameter._post_accumulate_grad_hooks = hooks
        self._silenced.clear()

    def end(self) -> None:
        """When backward ends."""
        self.land(0)
        self.end_silence()
        for parameter in self._blank:
            parameter.grad = None
        self._blank.clear()
