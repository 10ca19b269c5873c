"""The base of gradwire's optimizers, which wrap an optimizer of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def require_optimizer(optimizer: object, others: str) -> None:
    """Raises TypeError for anything else, such as a model. others: what the other arguments are."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the first argument is the optimizer, and {others}; the first is a "
            f"{type(optimizer).__name__}"
        )


class WrappingOptimizer(Optimizer):
    """Keeps the interface of `optimizer`, which belongs to it from now on."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._optimizer = optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the ranks have agreed on the parameters."""
        if hasattr(self, "_optimizer"):
            raise RuntimeError(
                f"{type(self).__name__} takes no further parameters: make a new one, of an "
                "optimizer with all of them"
            )
        super().add_param_group(param_group)

    def _share_groups(self) -> None:
        """Makes groups and state the same objects as those of the wrapped optimizer.

        So a scheduler may be given either of the two.
        """
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    @staticmethod
    def _evaluate(closure: Callable[[], Any] | None) -> Any:
        """The closure's loss; None where there is no closure."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
