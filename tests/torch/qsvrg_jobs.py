"""Jobs for the ranks of test_qsvrg.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import finite_sums
from gradwire.torch.errors import CommunicationError


def minimize(problem: str, epochs: int, steps: int) -> tuple[list[float], list[Any], int]:
    """Each rank holds its share of the functions. Returns weight, epochs and pushed bytes."""
    share = finite_sums.M // dist.get_world_size()
    first = dist.get_rank() * share
    chosen = finite_sums.PROBLEMS[problem]()
    weight = torch.nn.Parameter(torch.zeros(finite_sums.N))
    optimizer = chosen.optimizer(weight, share, first, steps=steps, seed=3)
    done = [optimizer.epoch() for _ in range(epochs)]
    return weight.tolist(), done, optimizer.stats().push_bytes


def differ(what: str) -> None:
    """Rank 1 has another count, or other parameters."""
    odd = dist.get_rank() == 1
    chosen = finite_sums.least_squares()
    weight = torch.nn.Parameter(torch.full((finite_sums.N,), float(odd and what == "parameters")))
    optimizer = chosen.optimizer(weight, 9 if odd and what == "count" else 10)
    optimizer.epoch()


def go_on_after_close() -> str:
    chosen = finite_sums.least_squares()
    weight = torch.nn.Parameter(torch.zeros(finite_sums.N))
    optimizer = chosen.optimizer(weight)
    optimizer.epoch()
    optimizer.close()
    try:
        optimizer.epoch()
    except CommunicationError as error:
        return str(error)
    return "it went on"
