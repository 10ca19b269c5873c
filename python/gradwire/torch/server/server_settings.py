"""Which settings of ServerOptimizer go together."""

from __future__ import annotations

from torch import nn

from gradwire.torch.options import Members
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


def check_members(members: Members, pulls: str) -> None:
    """Raises ValueError for settings with which workers can't come and go, if they shall, and for
    those of other ways to train."""
    if members.goes_on and pulls == GRADIENTS:
        raise ValueError(
            "on_lost='continue' needs pulls='updates': with pulls='gradients' every version is "
            "the average of all workers"
        )
    if members.store is not None and members.role is None:
        raise ValueError("with store= each process says what it is: role= 'worker' or 'server'")
    if members.ranks_per_machine is not None:
        raise ValueError(
            "ranks_per_machine is for exchange='hierarchical', and ServerOptimizer has none"
        )
    if members.min_ranks != 1:
        raise ValueError(
            f"min_ranks={members.min_ranks} is for LocalSteps: versions of ServerOptimizer go on "
            "until no worker is left; leave it out"
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
