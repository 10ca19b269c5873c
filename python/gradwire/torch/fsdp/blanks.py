"""Takes off the zeros that FSDP2 leaves where no rank has a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


class Blanks:
    """Keeps them of one backward pass, in which a parameter may be reduced more than once."""

    def __init__(self) -> None:
        self._parameters: set[nn.Parameter] = set()  # their gradients may be zeros of no rank
        self._silenced: list[tuple[nn.Parameter, Any]] = []

    def begin(self) -> None:
        """Forgets a backward pass that ended with an error."""
        self._parameters.clear()

    def note(self, unused: Iterable[nn.Parameter]) -> None:
        """This rank lacks the gradients of these, which are reduced now."""
        self._parameters.update(p for p in unused if p.grad is None)

    def settle(self, reduced: Sequence[nn.Parameter], unused: Sequence[nn.Parameter]) -> None:
        """Takes note that `reduced` were reduced, and that no rank has a gradient of `unused`."""
        self._parameters -= set(reduced) - set(unused)

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

    def take_off(self) -> None:
        """When backward ends."""
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters.clear()
