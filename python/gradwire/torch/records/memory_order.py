"""The order in which a bucket of DDP holds the elements of a parameter.

DDP lays a dense parameter into its bucket as the parameter lies in memory, which is another order
for one in `channels_last`. A residual belongs to elements: an exchange keeps it in the bucket's
order, and all else (states, buckets that come later) has it row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from gradwire.torch.records.checkpoint import Residual

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MemoryOrder:
    """shape: of the tensor. dims: its dimensions as they lie in memory, the outermost first; those
    of one element, whose place means nothing, come before all others."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], dims: Iterable[int]) -> MemoryOrder:
        return MemoryOrder(tuple(shape), tuple(sorted(dims, key=lambda dim: shape[dim] > 1)))

    @staticmethod
    def of_strides(tensor: torch.Tensor) -> MemoryOrder:
        """As DDP does: row-major for a tensor whose elements do not fill its memory exactly."""
        shape, strides = tensor.shape, tensor.stride()
        rows = MemoryOrder.of(shape, range(len(shape)))
        found = MemoryOrder.of(shape, sorted(rows.dims, key=lambda dim: -strides[dim]))
        filled = 1
        for dim in reversed(found.dims):
            if shape[dim] > 1 and strides[dim] != filled:
                return rows
            filled *= shape[dim]
        return found

    @property
    def is_row_major(self) -> bool:
        return self == MemoryOrder.of(self.shape, range(len(self.shape)))

    def to_rows(self, values: Values) -> Values:
        """All values of the tensor, from this order to row-major."""
        in_memory = values.reshape([self.shape[dim] for dim in self.dims])
        return in_memory.transpose(np.argsort(self.dims)).reshape(-1)

    def from_rows(self, values: Values) -> Values:
        """The reverse of `to_rows`."""
        return values.reshape(self.shape).transpose(self.dims).reshape(-1)

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Flat values in this order, as the tensor."""
        in_memory = values.view([self.shape[dim] for dim in self.dims])
        return in_memory.permute([self.dims.index(dim) for dim in range(len(self.dims))])


Orders = Mapping[str, MemoryOrder]  # of the tensors that are not row-major, by their names


def to_rows(residuals: Iterable[Residual], orders: Orders) -> list[Residual]:
    """Residuals of an exchange whose bucket has these orders. Consecutive values of a tensor in
    another order are none among its rows, so its residuals become whole tensors, with zeros where
    there is none."""
    return list(_reordered(residuals, orders, MemoryOrder.to_rows))


def from_rows(residuals: Iterable[Residual], orders: Orders) -> list[Residual]:
    """The reverse of `to_rows`."""
    return list(_reordered(residuals, orders, MemoryOrder.from_rows))


def _reordered(
    residuals: Iterable[Residual],
    orders: Orders,
    reorder: Callable[[MemoryOrder, Values], Values],
) -> Iterator[Residual]:
    whole: dict[tuple[str, str], Values] = {}
    for residual in residuals:
        order = orders.get(residual.name)
        if order is None:
            yield residual
            continue
        key = residual.kind, residual.name
        values = whole.setdefault(key, np.zeros(prod(order.shape), np.float32))
        end = residual.offset + residual.values.size
        values[residual.offset : end] += residual.values
    for (kind, name), values in whole.items():
        yield Residual(kind, name, 0, reorder(orders[name], values))
