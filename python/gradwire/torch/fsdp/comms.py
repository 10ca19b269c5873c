"""What takes the place of PyTorch's collectives in a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gradwire.torch.fsdp.units import AllGather, ReduceScatter
from gradwire.torch.session.work import ExchangeWork

Op = dist.ReduceOp | dist.ReduceOp.RedOpType


class _Allocates:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ShardedReduceScatter(_Allocates, ReduceScatter):
    """`reduce(output, input, op)` fills the output."""

    def __init__(self, reduce: Callable[[torch.Tensor, torch.Tensor, Op], None]) -> None:
        self._reduce = reduce

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,
    ) -> None:
        self._reduce(output_tensor, input_tensor, op)


class ShardedAllGather(_Allocates, AllGather):
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
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return self._gather(output_tensor)
