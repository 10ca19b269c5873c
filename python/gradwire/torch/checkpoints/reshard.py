"""States of all ranks of a training, rewritten for another number of ranks.

An average is over all ranks, so one rank's push residual r counts r / N in it. What is *owed* to an
element of a parameter is what later steps will still add to its average, if nothing else is sent:

    the mean of the ranks' push residuals (of a hierarchical exchange: over the machines)
    + the pull residual of the element's owner, where pulls are averages (the hook, LocalSteps,
      replicas of FSDP2, servers of gradients)

Every new rank's state has the whole owed amount, as residuals of kind "owed", and the rank takes
its share when it makes its exchange (session/shares.py). So the amount is kept, whichever rank owns
an element now.

Where pulls are changes of the model, as those of ShardedOptimizer, their residuals are what the
replicas lack of the exact values. They stay with the elements, and go to the new owners. Servers
whose workers are others give these the exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from gradwire.torch.checkpoints.complete import check_complete
from gradwire.torch.checkpoints.meshes import reshard_mesh
from gradwire.torch.checkpoints.owed import all_residuals, entries_of, sum_residuals, weigh
from gradwire.torch.checkpoints.servers import reshard_servers
from gradwire.torch.optimizers.shard import join_shards
from gradwire.torch.records.checkpoint import StateDict, ranks_per_machine_of, with_clean_names
from gradwire.torch.records.exchange_settings import check_machines
from gradwire.torch.records.modes import ordinary_tensors


class Target(TypedDict, total=False):
    """How the new training differs, beside its world size. See reshard."""

    ranks_per_machine: int | None
    shards: int | None
    servers: int | None
    codec: str | None
    exchange: str | None


@ordinary_tensors()
def reshard(
    states: Sequence[StateDict],
    world_size: int,
    ranks_per_machine: int | None = None,
    *,
    shards: int | None = None,
    servers: int | None = None,
    codec: str | None = None,
    exchange: str | None = None,
) -> list[StateDict]:
    """The states of ranks 0 to N - 1, rewritten for ranks 0 to world_size - 1.

    What is owed to each parameter stays the same. With the same world and settings the states come
    back unchanged.

    states     what `state_dict()` of each rank gave, in the order of ranks and at the same step: of
               a GradwireState, ShardedOptimizer, LocalSteps, FullyShardComm, ServerOptimizer or
               QSVRG
    ranks_per_machine   of a hierarchical exchange, where only the first rank of each machine keeps
               residuals; 1 for the other exchanges. None: that of the states
    shards     of a FullyShardComm: the ranks that share a model. world_size: a mesh of one
               dimension. None: as many as in the states if these have replicas, else all
    servers    of a ServerOptimizer: how many ranks are servers. None: as in the states
    codec      with which the training goes on, as text, with ", pull CODEC" for a pull_codec. None:
               that of the states. (Loading refuses a state of another codec.)
    exchange   the same for the exchange

    LocalSteps must have been saved after `synchronize()`, or in a step that exchanged all changes;
    then every rank's model is the same, and any of them is to be loaded. New rank r gets the state
    of rank r % N's local optimizer. QSVRG draws its functions anew.

    Raises ValueError unless the states are those of all ranks at one step, and for a world to which
    they can't be moved.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; at least 1 is needed")
    states = [with_clean_names(state) for state in states]
    own = [state.get("gradwire", state) for state in states]  # a server's are beside others
    check_complete(own)
    source = own[0].get("source", "GradwireState")
    for name, given, valid in (
        ("shards", shards, "FullyShardComm"),
        ("servers", servers, "ServerOptimizer"),
    ):
        if given is not None and source != valid:
            raise ValueError(f"{name} goes with states of a {valid}; these are of a {source}")
    if exchange is not None and source in ("ServerOptimizer", "ShardedOptimizer", "QSVRG"):
        raise ValueError(f"a {source} has one exchange alone; leave out exchange='{exchange}'")
    if source == "ServerOptimizer":
        moved = reshard_servers(states, world_size, servers)
        return [s | {"gradwire": _go_on_with(s["gradwire"], codec, exchange)} for s in moved]
    before = ranks_per_machine_of(states[0])
    after = before if ranks_per_machine is None else ranks_per_machine
    if source == "FullyShardComm":
        moved = reshard_mesh(states, world_size, shards, after)
    else:
        check_machines(after, world_size, "ranks_per_machine")
        if world_size == len(states) and before == after:
            moved = list(states)
        else:
            moved = [
                {**state, "rank": r, "world_size": world_size, "ranks_per_machine": after}
                | ({"residuals": []} if r % after else {})
                for r, state in enumerate(_WAYS[source](states, world_size))
            ]
    return [_go_on_with(state, codec, exchange) for state in moved]


def _go_on_with(state: StateDict, codec: str | None, exchange: str | None) -> StateDict:
    given = {"codec": codec, "exchange": exchange}
    changed = {name: text for name, text in given.items() if text not in (None, state.get(name))}
    return state | changed


def _average(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    """All that a rank keeps is owed to the average."""
    weights = weigh(len(states) // ranks_per_machine_of(states[0]), pulls=True)
    owed = entries_of(sum_residuals(all_residuals(states), weights), "owed")
    return [{**states[rank % len(states)], "residuals": owed} for rank in range(world_size)]


def _sharded(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    """Every rank gets all shards, and keeps its own."""
    residuals = all_residuals(states)
    owed = entries_of(sum_residuals(residuals, weigh(len(states), pulls=False)), "owed")
    lacking = entries_of(sum_residuals(residuals, {"pull": 1.0}), "pull")
    whole = {
        "shard": join_shards([state["shard"] for state in states]),
        "residuals": owed + lacking,
    }
    return [{**states[0], **whole} for _ in range(world_size)]


def _local(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    for state in states:
        for fragment in state["fragments"]:
            if fragment["steps"] or fragment["under_way"]:
                raise ValueError(
                    f"the state of rank {state['rank']} has changes of {fragment['steps']} local "
                    "steps that were not exchanged, "
                    + ("and an exchange under way, " if fragment["under_way"] else "")
                    + "which other ranks would not have: to move a training to another number of "
                    "ranks, save it after synchronize(), or in a step that exchanged all changes"
                )
    return _average(states, world_size)


def _drawn(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    return [{**state, "draws": None} for state in _average(states, world_size)]


_WAYS: dict[str, Callable[[Sequence[StateDict], int], list[Any]]] = {
    "GradwireState": _average,
    "ShardedOptimizer": _sharded,
    "LocalSteps": _local,
    "QSVRG": _drawn,
}
