"""Finds the order in which each parameter lies in DDP's buckets, which DDP does not tell.

DDP takes over a parameter's strides when it makes a bucket. If the parameter gets other strides
later (`model.to(memory_format=...)`), the bucket keeps its own, and DDP copies the average of that
parameter to the wrong elements, with or without a hook, unless gradients are views of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.torch.records.memory_order import MemoryOrder

# Beside row-major, by the number of dimensions: transposed, and channels_last.
_USUAL = {2: (1, 0), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


@dataclass
class _Known:
    """A bucket as it was when its orders were found."""

    address: int
    strides: list[tuple[int, ...]]
    orders: list[MemoryOrder]


class BucketOrders:
    """Keeps the orders of all buckets of one model, as long as they last."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def find(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        values: torch.Tensor,
    ) -> list[MemoryOrder]:
        """Returns the order of each parameter in bucket `index`, which holds `values`.

        Complex values count as pairs.

        Raises RuntimeError for a parameter that has other strides than the bucket. It looks at
        values only if the bucket, or strides, are new.
        """
        gradients = [p if p.grad is None else p.grad for p in parameters]
        address, strides = values.data_ptr(), [t.stride() for t in (*parameters, *gradients)]
        known = self._known.get(index)
        if known is not None and (known.address, known.strides) == (address, strides):
            return known.orders
        orders, start = [], 0
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            lying, wanted = _as_real(parameter), _as_real(gradient)
            part = values[start : start + lying.numel()]
            start += part.numel()
            if wanted.data_ptr() == part.data_ptr():  # DDP's gradient_as_bucket_view
                orders.append(MemoryOrder.of_strides(wanted))
                continue
            orders.append(MemoryOrder.of_strides(lying))
            if parameter.grad is not None and _lies_otherwise(part, wanted, orders[-1]):
                raise RuntimeError(
                    f"{name} lies in memory in another order than when DistributedDataParallel "
                    "made its buckets, so that DDP would copy averages to the wrong elements: call "
                    "model.to(memory_format=...) before DistributedDataParallel(model), or wrap "
                    "the model again"
                )
        self._known[index] = _Known(address, strides, orders)
        return orders


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values as DDP has them in a bucket."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _lies_otherwise(values: torch.Tensor, gradient: torch.Tensor, order: MemoryOrder) -> bool:
    """Whether the values are the gradient in another order than this one."""
    shape, gradient = gradient.shape, gradient.to(values.dtype)
    rows = tuple(range(len(shape)))
    others = {MemoryOrder.of(shape, dims) for dims in (rows, _USUAL.get(len(shape), rows))}
    others.discard(order)
    if not others or torch.equal(order.view(values), gradient):
        return False
    return any(torch.equal(other.view(values), gradient) for other in others)
