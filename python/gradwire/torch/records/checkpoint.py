"""Residuals as a checkpoint: saved for each rank, loaded again, moved to another world size.

A state is a dictionary of plain values and tensors (`torch.load(..., weights_only=True)` reads it):

    format      1
    codec       the codec of the training, as text
    rank, world_size, iterations
    loss_scale  the gradient scaler's scale, which the residuals have, too; None: no scaler
    ranks_per_machine   of a hierarchical exchange: the first of so many ranks keeps residuals. 1
                for the other exchanges, and if the entry is missing. None: no residuals exist yet
    auto        what `auto` codecs chose, and after how many steps; None, or missing: no such codec
    residuals   list of {"kind": "push" | "pull", "name": str, "offset": int, "values": f32[n]}:
                n values of the parameter `name`, from its flattened element `offset` on

The amount that is owed to an element is the mean of the ranks' push residuals (in a hierarchical
exchange: the mean over the machines) plus the pull residual of its owner. `reshard` keeps that
amount for another world size.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from gradwire._core import Exchange
from gradwire.torch.records.exchange_settings import check_machines

FORMAT = 1
_ENTRIES_OF_HOOK = {
    *("format", "codec", "rank", "world_size", "iterations", "loss_scale", "ranks_per_machine"),
    *("auto", "residuals"),
}
StateDict = dict[str, Any]


class Residual(NamedTuple):
    """Values of parameter `name` that were not sent, from its flattened element `offset` on.

    `kind`: "push" if this rank owes them to the owner, "pull" if the owner owes them to all ranks.
    """

    kind: str
    name: str
    offset: int
    values: npt.NDArray[np.float32]


def to_bytes(state: StateDict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(saved: bytes) -> StateDict:
    """Runs no code that the bytes may hold."""
    state: StateDict = torch.load(io.BytesIO(saved), weights_only=True)
    return state


def residuals_in(exchange: Exchange) -> list[Residual]:
    return [Residual(**entry) for entry in exchange.export_residuals()]


def make_state(
    codec: str, rank: int, world_size: int, residuals: Iterable[Residual], **more: Any
) -> StateDict:
    """A state of this rank. `more`: further entries of the state."""
    return {
        "format": FORMAT,
        "codec": codec,
        "rank": rank,
        "world_size": world_size,
        **more,
        "residuals": [
            residual._asdict() | {"values": torch.from_numpy(residual.values.copy())}
            for residual in residuals
        ],
    }


def check_place(
    state: StateDict, rank: int, world_size: int, codec: str | None = None, hint: str = ""
) -> None:
    """Raises ValueError if another rank saved the state, or a rank of another world size.

    `codec`: if given, a state of another codec is refused, too. `hint`: ends the message.
    """
    residuals_of(state)  # raises if it is no state
    here = {"rank": rank, "world_size": world_size, "codec": codec or state["codec"]}
    if any(state[key] != value for key, value in here.items()):
        say = "rank {rank} of {world_size}" + (" with {codec}" if codec else "")
        raise ValueError(
            f"the state is that of {say.format(**state)}, this is {say.format(**here)}{hint}"
        )


def check_optimizer(state: StateDict, optimizer: Optimizer) -> None:
    """Raises ValueError if the state's `optimizer_class` is another than that of `optimizer`, which
    would take over another algorithm's values without a word."""
    theirs, ours = state.get("optimizer_class"), type(optimizer).__name__
    if theirs != ours:
        raise ValueError(f"the state is that of the optimizer {theirs}, this one wraps {ours}")


def residuals_of(state: StateDict) -> list[Residual]:
    """The state's residuals. Raises ValueError if it is not a dictionary of this format."""
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
    """The hook's states of ranks 0 to N - 1, rewritten for ranks 0 to world_size - 1.

    Every new rank gets the whole owed amount as its push residual. The mean over the ranks is then
    the owed amount, whichever rank owns an element. With the same world size the states come back
    unchanged.
    `ranks_per_machine`: of a hierarchical exchange, where only the first rank of each machine keeps
    residuals; 1 for the other exchanges; None: that of the states.
    Raises ValueError if the states are not those of all ranks of one run, or not the hook's:
    optimizers also have a state on each rank.
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
    others = sorted({key for state in states for key in state} - _ENTRIES_OF_HOOK)
    if others:
        raise ValueError(
            "only the states of a GradwireState can be moved to another number of ranks; these "
            f"also have {', '.join(others)}"
        )
    ranks = [state["rank"] for state in states]
    sizes = {state["world_size"] for state in states}
    if ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"the states of all ranks are needed, in order: got ranks {ranks} "
            f"of a world of {sorted(sizes)}"
        )
    for key in ("format", "iterations", "loss_scale", "ranks_per_machine", "auto"):
        values = [state.get(key) for state in states]
        if any(value != values[0] for value in values):
            raise ValueError(f"the states were saved at different times: {key} is {values}")
