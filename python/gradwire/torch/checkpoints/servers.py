"""States of a ServerOptimizer for other numbers of workers and servers."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.torch.checkpoints.owed import all_residuals, entries_of, sum_residuals, weigh
from gradwire.torch.records.checkpoint import StateDict
from gradwire.torch.server.model_parts import GRADIENTS
from gradwire.torch.server.server_settings import exchange_text


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
