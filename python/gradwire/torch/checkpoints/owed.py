"""What is owed to each parameter, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradwire.torch.records.checkpoint import Residual, StateDict, residuals_of

Sums = dict[str, torch.Tensor]  # f64, by parameter: a value for each element, flat


def sum_residuals(residuals: Iterable[Residual], weights: dict[str, float]) -> Sums:
    """Sums of the residuals for each element, each times the weight of its kind (none: left out).
    A parameter's sum ends with the last element that has a residual."""
    sums: Sums = {}
    for residual in residuals:
        if residual.kind not in weights:
            continue
        values = torch.from_numpy(residual.values).double() * weights[residual.kind]
        end = residual.offset + values.numel()
        total = sums.setdefault(residual.name, values.new_zeros(0))
        if total.numel() < end:
            missing = values.new_zeros(end - total.numel())
            total = sums[residual.name] = torch.cat([total, missing])
        total[residual.offset : end] += values
    return sums


def weigh(ranks: int, pulls: bool) -> dict[str, float]:
    """The weights with which residuals are owed to the average over so many ranks. pulls: whether
    the residuals of pulls are of averages, too."""
    share = 1.0 / ranks
    return {"push": share, "owed": share} | ({"pull": 1.0} if pulls else {})


def entries_of(sums: Sums, kind: str) -> list[StateDict]:
    """The entries of a state's `residuals`."""
    return [
        {"kind": kind, "name": name, "offset": 0, "values": values.float()}
        for name, values in sums.items()
    ]


def all_residuals(states: Sequence[StateDict]) -> list[Residual]:
    return [residual for state in states for residual in residuals_of(state)]
