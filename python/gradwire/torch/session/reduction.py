"""The reductions of torch.distributed that an exchange's average can stand for."""

from __future__ import annotations

import torch
import torch.distributed as dist

Op = dist.ReduceOp | dist.ReduceOp.RedOpType
_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def is_reduction(op: Op) -> bool:
    """Whether it is a sum or an average."""
    # A ReduceOp equals a RedOpType, but not the reverse, on which `in` would rely.
    return any(op == valid for valid in _REDUCTIONS)


def factor_of(op: Op, world_size: int) -> int:
    """By which the average of all ranks is multiplied."""
    return world_size if op == dist.ReduceOp.SUM else 1


def write_shard(
    averages: torch.Tensor, output: torch.Tensor, rank: int, world_size: int, op: Op
) -> None:
    """Writes what a reduce-scatter gives this rank: `averages` (flat) hold one shard after the
    other."""
    own = averages.view(world_size, -1)[rank]
    torch.mul(own, factor_of(op, world_size), out=output.view(-1))
