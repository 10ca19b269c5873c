"""Residuals that wait for an exchange with their parameters.

DDP cuts its gradients into new buckets after the first iteration, and a checkpoint is loaded before
there is any bucket. So a residual is kept by parameter, and handed to whichever exchange comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Residual:
    """`values` of parameter `name` from its flattened element `offset` on.

    `kind` is "push" (what this rank owes) or "pull" (what the owner owes to all).
    """

    kind: str
    name: str
    offset: int
    values: npt.NDArray[np.float32]


class ResidualPool:
    """The residuals that belong to no exchange at the moment."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Residual]] = {}

    def add(self, residuals: Iterable[Residual]) -> None:
        for residual in residuals:
            self._waiting.setdefault(residual.name, []).append(residual)

    def take(self, names: Iterable[str]) -> list[Residual]:
        """The residuals of these parameters, which leave the pool."""
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
