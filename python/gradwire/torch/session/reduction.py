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


def write_shard(reduced: torch.Tensor, output: torch.Tensor, rank: int, world_size: int) -> None:
    """Writes what a reduce-scatter gives this rank: `reduced` (flat) holds one shard after the
    other."""
    output.view(-1).copy_(reduced.view(world_size, -1)[rank])
