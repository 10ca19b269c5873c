"""States of all ranks of a training, rewritten for another number of ranks.

An average is over all ranks, so one rank's push residual r counts r / N in it. What is *owed* to an
element of a parameter is what later steps will still add to its average, if nothing else is sent:

    the mean of the ranks' push residuals (of a hierarchical exchange: over the machines)
    + the pull residual of the element's owner, where pulls are averages (the hook, LocalSteps,
      replicas of FSDP2, servers of gradients)

Every new rank's state has the whole owed amount, as residuals of kind "owed", and the rank takes
its share when it makes its exchange (buckets/residuals.py). So the amount is kept, whichever rank
owns an element now.

Where pulls are changes of the model, as those of ShardedOptimizer, their residuals are what the
replicas lack of the exact values. They stay with the elements, and go to the new owners. Servers
whose workers are others give these the exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict, Unpack

import torch
import torch.distributed as dist

from gradwire.option_record import explains_arguments
from gradwire.torch.checkpoint import (
    StateDict,
    from_bytes,
    ranks_per_machine_of,
    residuals_of,
    to_bytes,
    with_clean_names,
)
from gradwire.torch.exchange_settings import check_machines
from gradwire.torch.optimizers.shard import join_shards
from gradwire.torch.parameters import ordinary_tensors
from gradwire.torch.resharding.meshes import (
    all_residuals,
    entries_of,
    reshard_mesh,
    sum_residuals,
    weigh,
)
from gradwire.torch.server.server_settings import GRADIENTS, exchange_text

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


def reshard_servers(
    states: Sequence[StateDict], world_size: int, servers: int | None
) -> list[StateDict]:
    """See reshard. The states are complete.

    Every new server gets the tensors, the optimizer's state and the pull residuals of all servers,
    and keeps those of its own tensors. A worker has no model: workers get that of the servers, and
    so all that the servers' updates still owed them.
    """
    count = states[0]["gradwire"]["workers"]
    before = len(states) - count
    servers = before if servers is None else servers
    if not 1 <= servers < world_size:
        raise ValueError(
            f"servers is {servers}; a world of {world_size} ranks has 1 to {world_size - 1} servers"
        )
    if (world_size, servers) == (len(states), before):
        return list(states)
    new_count = world_size - servers
    of_workers, of_servers = states[:count], states[count:]
    own = [state["gradwire"] for state in states]
    owed = sum_residuals(all_residuals(own[:count]), weigh(count, pulls=False))
    pulls = sum_residuals(all_residuals(own[count:]), {"pull": 1.0})
    averages = own[0]["exchange"] == exchange_text(GRADIENTS)
    server = {
        **of_servers[0],
        "state": {index: s for state in of_servers for index, s in state["state"].items()},
        "gradwire": own[count]
        | {
            "model": {name: t for state in own[count:] for name, t in state["model"].items()},
            "residuals": entries_of(pulls, "pull") if averages else [],
        },
    }
    moved = []
    for rank in range(world_size):
        is_worker = rank < new_count
        state = of_workers[rank % count] if is_worker else server
        place = {"rank": rank, "world_size": world_size, "workers": new_count}
        entries = {"residuals": entries_of(owed, "owed"), "model": {}} if is_worker else {}
        moved.append({**state, "gradwire": state["gradwire"] | place | entries})
    return moved


class Target(TypedDict, total=False):
    """How the new training differs, beside its world size. See reshard."""

    ranks_per_machine: int | None
    shards: int | None
    servers: int | None
    codec: str | None
    exchange: str | None


@ordinary_tensors()
@explains_arguments
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
    of rank r % N's local optimizer. QSVRG draws its functions anew. Entries are not copied: ranks
    that are threads of one process load copies (`copy.deepcopy`).

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
    moved = _average(states, world_size)
    if states[0]["schedule"].get("gate"):
        fragments = _share_gates([state["fragments"] for state in states])
        pairs = [(state, zip(state["fragments"], fragments, strict=True)) for state in moved]
        moved = [state | {"fragments": [f | gate for f, gate in both]} for state, both in pairs]
    return moved


def _share_gates(ranks: Sequence[Sequence[StateDict]]) -> list[StateDict]:
    """Of each fragment the gate whose ranks all keep the mean of what the ranks have kept."""
    return [
        {
            "gate": {
                "kept": [
                    torch.stack(values).mean(dim=0)
                    for values in zip(*(state["gate"]["kept"] for state in states), strict=True)
                ],
                "next": None,
            }
        }
        for states in zip(*ranks, strict=True)
    ]


def _drawn(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    return [{**state, "draws": None} for state in _average(states, world_size)]


_WAYS: dict[str, Callable[[Sequence[StateDict], int], list[Any]]] = {
    "GradwireState": _average,
    "ShardedOptimizer": _sharded,
    "LocalSteps": _local,
    "QSVRG": _drawn,
}


class _Stateful(Protocol):
    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class PerRank:
    """Gives torch.distributed.checkpoint a state that differs from rank to rank:

        saved = {"model": model, "gradwire": PerRank(state)}
        torch.distributed.checkpoint.save(saved, checkpoint_id=folder)
        ...
        torch.distributed.checkpoint.load(saved, checkpoint_id=folder)

    Every rank saves its own state under a name of its own, as bytes. Given without PerRank, the
    states would have the same names, of which the checkpoint keeps one rank's.

    source   a GradwireState, LocalSteps, ShardedOptimizer, FullyShardComm, ServerOptimizer or
             QSVRG; with LocalSteps the model, too, because the ranks' models differ between two
             exchanges
    saved_world_size   how many ranks saved the checkpoint to load, if it was another number than
             now. Each rank then loads what `reshard` makes of all states
    process_group      the ranks that save; None: all
    target   ranks_per_machine, shards, servers, codec and exchange of the training that loads, as
             in `reshard`

    Raises ValueError, as `source.load_state_dict` does, for a state that does not fit. PyTorch says
    which name a checkpoint lacks, such as `rank 3 of 4`.
    """

    def __init__(
        self,
        source: _Stateful,
        *,
        saved_world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        **target: Unpack[Target],
    ) -> None:
        if saved_world_size is not None and saved_world_size < 1:
            raise ValueError(f"saved_world_size is {saved_world_size}; at least 1 is needed")
        self._source = source
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._saved_world_size = saved_world_size or self._world_size
        self._target = target

    def state_dict(self) -> dict[str, bytes]:
        """Also asked for by `load`, which fills in what the checkpoint has of these names."""
        return dict.fromkeys(self._names(), to_bytes(self._source.state_dict()))

    def load_state_dict(self, saved: dict[str, bytes]) -> None:
        states = [from_bytes(saved[name]) for name in self._names()]
        if self._reshards:
            states = [reshard(states, self._world_size, **self._target)[self._rank]]
        self._source.load_state_dict(states[0])
        self._saved_world_size, self._target = self._world_size, Target()  # for `save`

    @property
    def _reshards(self) -> bool:
        return self._saved_world_size != self._world_size or bool(self._target)

    def _names(self) -> list[str]:
        """Those of this rank's state, or of all that it is made of."""
        ranks = range(self._saved_world_size) if self._reshards else [self._rank]
        return [f"rank {rank} of {self._saved_world_size}" for rank in ranks]
