"""Residuals as a checkpoint: saved for each rank, loaded again, moved to another world size.

A state is a dictionary of plain values and tensors (`torch.load(..., weights_only=True)` reads it):

    format      1
    codec       the codec it was made with, as text
    rank, world_size, iterations
    loss_scale  of the gradient scaler to which the residuals belong, or None
    ranks_per_machine   of a hierarchical exchange, where one of so many ranks keeps residuals; else
                1, also where it is missing; None: no rank has kept any yet
    residuals   list of {"kind": "push" | "pull", "name": str, "offset": int, "values": f32[n]}:
                n values of the parameter `name`, from its flattened element `offset` on

What is still owed to the parameters is, per element, the mean of the ranks' push residuals plus the
pull residual of its owner; of a hierarchical exchange, over the machines.
That amount survives another world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire.torch.coding import check_machines
from gradwire.torch.residuals import Residual

FORMAT = 1
StateDict = dict[str, Any]


def residuals_to_list(residuals: Iterable[Residual]) -> list[dict[str, Any]]:
    return [
        {
            "kind": residual.kind,
            "name": residual.name,
            "offset": residual.offset,
            "values": torch.from_numpy(residual.values.copy()),
        }
        for residual in residuals
    ]


def residuals_of(state: StateDict) -> list[Residual]:
    """Raises ValueError if `state` is not a state dictionary of this format."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"not a gradwire state of format {FORMAT}: its format is {state.get('format')!r}"
        )
    return [
        Residual(
            entry["kind"],
            entry["name"],
            int(entry["offset"]),
            entry["values"].detach().to("cpu", torch.float32).contiguous().numpy().copy(),
        )
        for entry in state["residuals"]
    ]


def ranks_per_machine_of(state: StateDict) -> int:
    return state.get("ranks_per_machine", 1) or 1


def reshard(
    states: Sequence[StateDict], world_size: int, ranks_per_machine: int | None = None
) -> list[StateDict]:
    """The states of ranks 0..N-1, rewritten for ranks 0..world_size-1.

    Every new rank gets all that is owed as its push residual, so the mean of them is what was owed,
    whoever owns which element then. With the same world size the states come back unchanged.
    `ranks_per_machine`: of a hierarchical exchange, where only the first rank of each machine keeps
    residuals; 1 for the other exchanges; None: as it was.
    Raises ValueError if the states are not those of all ranks of one run.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; at least 1 is needed")
    _check_complete(states)
    before = ranks_per_machine_of(states[0])
    after = before if ranks_per_machine is None else ranks_per_machine
    check_machines(after, world_size, "ranks_per_machine")
    if world_size == len(states) and before == after:
        return list(states)
    owed: dict[str, torch.Tensor] = {}
    for state in states:
        for residual in residuals_of(state):
            values = torch.from_numpy(residual.values).double()
            share = values * before / len(states) if residual.kind == "push" else values
            end = residual.offset + values.numel()
            total = owed.setdefault(residual.name, torch.zeros(0, dtype=torch.float64))
            if total.numel() < end:
                total = torch.cat([total, torch.zeros(end - total.numel(), dtype=torch.float64)])
                owed[residual.name] = total
            total[residual.offset : end] += share
    entries = [
        {"kind": "push", "name": name, "offset": 0, "values": total.float()}
        for name, total in owed.items()
    ]
    return [
        {
            **states[0],
            "rank": rank,
            "world_size": world_size,
            "ranks_per_machine": after,
            "residuals": entries if rank % after == 0 else [],
        }
        for rank in range(world_size)
    ]


def _check_complete(states: Sequence[StateDict]) -> None:
    ranks = [state["rank"] for state in states]
    sizes = {state["world_size"] for state in states}
    if ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"the states of all ranks are needed, in order: got ranks {ranks} "
            f"of a world of {sorted(sizes)}"
        )
    for key in ("format", "iterations", "loss_scale", "ranks_per_machine"):
        values = [state.get(key) for state in states]
        if any(value != values[0] for value in values):
            raise ValueError(f"the states are of different moments: {key} is {values}")
