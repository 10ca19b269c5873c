"""Whether states are those of all ranks of one training, at one step."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.torch.records.checkpoint import StateDict, residuals_of

# Entries that all ranks have alike; a source has some of them.
_COMMON = (
    *("format", "source", "codec", "exchange", "tensors", "iterations", "version", "loss_scale"),
    *("ranks_per_machine", "auto", "optimizer_class", "schedule", "local_steps", "clock"),
    *("replicas", "workers"),
)


def check_complete(states: Sequence[StateDict]) -> None:
    """Raises ValueError unless they are, in the order of ranks."""
    for state in states:
        residuals_of(state)  # raises if it is none
    if states and "replicas" in states[0]:
        _check_mesh(states)
    else:
        _check_ranks(states)
    for key in _COMMON:
        values = [state.get(key) for state in states]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"the states are not those of one training at one step: {key} is {values}"
            )


def _check_ranks(states: Sequence[StateDict]) -> None:
    ranks = [state["rank"] for state in states]
    sizes = {state["world_size"] for state in states}
    if not states or ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"the states of all ranks are needed, in order: got ranks {ranks} "
            f"of a world of {sorted(sizes)}"
        )
    shards = {state["shard"] for state in states if isinstance(state.get("shard"), str)}
    if len(shards) > 1:
        raise ValueError(
            f"the states are of the shards {', '.join(sorted(shards))}: LocalSteps exchanges each "
            "shard among its replicas, whose states belong together"
        )


def _check_mesh(states: Sequence[StateDict]) -> None:
    """Checks FullyShardComm's states. With replicas, `rank` and `world_size` are among these."""
    replicas = states[0]["replicas"] or 1
    shards = len(states) // replicas
    expected = [
        (replica, f"{shard} of {shards}") for replica in range(replicas) for shard in range(shards)
    ]
    found = [(state["rank"] if state["replicas"] else 0, state["shard"]) for state in states]
    if found != expected:
        listed = ", ".join(f"replica {replica}, shard {shard}" for replica, shard in found)
        raise ValueError(f"the states of all ranks are needed, in order: got {listed}")
