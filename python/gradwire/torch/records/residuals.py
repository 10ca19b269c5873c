"""Residuals that no exchange holds at the moment.

DDP cuts its gradients into new buckets after the first iteration, and a checkpoint is loaded before
there is any bucket. So residuals are kept by parameter, until an exchange with that parameter takes
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Residual:
    """Values of parameter `name` that were not sent, from its flattened element `offset` on.

    `kind`: "push" if this rank owes them to the owner, "pull" if the owner owes them to all ranks.
    """

    kind: str
    name: str
    offset: int
    values: npt.NDArray[np.float32]


class ResidualPool:
    """Residuals by the name of their parameter."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Residual]] = {}

    def add(self, residuals: Iterable[Residual]) -> None:
        for residual in residuals:
            self._waiting.setdefault(residual.name, []).append(residual)

    def take(self, names: Iterable[str]) -> list[Residual]:
        """Removes the residuals of these parameters from the pool and returns them."""
        return [residual for name in names for residual in self._waiting.pop(name, [])]

    def scale(self, factor: float) -> None:
        for residuals in self._waiting.values():
            for residual in residuals:
                np.multiply(residual.values, np.float32(factor), out=residual.values)

    def clear(self) -> None:
        self._waiting.clear()

    def __iter__(self) -> Iterator[Residual]:
        for residuals in self._waiting.values():
            yield from residuals
