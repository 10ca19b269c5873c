"""What takes the place of PyTorch's collectives in a unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.torch.fsdp.units import DefaultAllGather, DefaultReduceScatter
from gradwire.torch.session.reduction import Op
from gradwire.torch.session.work import ExchangeWork


class ShardedReduceScatter(DefaultReduceScatter):
    """`reduce(output, input, op)` fills the output."""

    def __init__(self, reduce: Callable[[torch.Tensor, torch.Tensor, Op], None]) -> None:
        self._reduce = reduce

    def __call__(  # type: ignore[override] # FSDP2 uses no result
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,
    ) -> None:
        self._reduce(output_tensor, input_tensor, op)


class ShardedAllGather(DefaultAllGather):
    """`gather(output)` begins to fill the output, in which this rank's input is already."""

    def __init__(self, gather: Callable[[torch.Tensor], ExchangeWork], world_size: int) -> None:
        self._gather = gather
        self._world_size = world_size

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if group.size() != self._world_size:
            # reshard_after_forward is a number: in backward so many ranks of a machine gather.
            return super().__call__(output_tensor, input_tensor, group, async_op)
        return self._gather(output_tensor)
