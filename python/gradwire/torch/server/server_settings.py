"""Which settings of ServerOptimizer go together."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from gradwire.torch.members.places import Role
from gradwire.torch.server.model_parts import GRADIENTS, PULLS, UPDATES


def exchange_text(pulls: str) -> str:
    """The exchange of states, as `gradwire train --exchange` has it."""
    return f"server:pulls={pulls}"


def check_pulls(pulls: str, who: str, backup: int, staleness: int, barrier: str) -> None:
    """Raises ValueError. who: this rank, with which the text begins."""
    if pulls not in PULLS:
        raise ValueError(f"{who}pulls is {pulls!r}; valid ones are {' and '.join(PULLS)}")
    if pulls == UPDATES:
        return
    for name, value, valid in (
        ("backup_workers", backup, 0),
        ("staleness", staleness, 0),
        ("barrier", barrier, "step"),
    ):
        if value != valid:
            raise ValueError(
                f"{who}pulls='gradients' averages the pushes of all workers in each "
                f"version; {name} is {value!r}, valid is {valid!r}"
            )


def check_on_lost(
    on_lost: str,
    pulls: str,
    given: Mapping[str, bool],
    store: Store | None,
    ranks: int | None,
    role: str | None,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Raises ValueError or TypeError for settings with which workers can't come and go. given:
    which of those for processes that join were given."""
    if on_lost not in ("stop", "continue"):
        raise ValueError(f"on_lost is '{on_lost}'; valid are 'stop' and 'continue'")
    if on_lost == "continue" and pulls == GRADIENTS:
        raise ValueError(
            "on_lost='continue' needs pulls='updates': with pulls='gradients' every version is "
            "the average of all workers"
        )
    names = [f"{name}=" for name, is_given in given.items() if is_given]
    if not names:
        return
    if on_lost == "stop":
        raise ValueError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for workers that come and "
            "go: give on_lost='continue', too, or leave out"
        )
    if store is None or ranks is None or role is None:
        raise ValueError(
            f"{' and '.join(names)}: processes can join with store=, where all meet although any "
            "worker may die, such as torch.distributed.TCPStore(host, port) of a process of its "
            "own, ranks=, the number of workers and servers, and role=, 'worker' or 'server'"
        )
    if role not in list(Role):
        raise ValueError(f"role is '{role}'; valid are 'worker' and 'server'")
    if process_group is not None:
        raise ValueError("with store= the ranks make groups of their own: leave out process_group")
    if not isinstance(store, Store):
        raise TypeError(
            f"store is a {type(store).__name__}; a store of torch.distributed is needed, such as "
            "TCPStore(host, port)"
        )


def check_barrier(barrier: str, model: nn.Module | None, backup: int, staleness: int) -> bool:
    """Whether the barrier is that of tensors. Raises ValueError."""
    if barrier not in ("step", "tensor"):
        raise ValueError(f"barrier is {barrier!r}; valid ones are 'step' and 'tensor'")
    if barrier == "step":
        return False
    if model is None:
        raise ValueError("barrier='tensor' needs model=, whose forward pass waits for the tensors")
    if backup or staleness:
        raise ValueError(
            f"barrier='tensor' takes the pushes of all workers for each tensor of a version; "
            f"backup_workers is {backup} and staleness is {staleness}, and both must be 0"
        )
    return True
