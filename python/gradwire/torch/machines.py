"""Which ranks share a machine, found out by all of them together."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from gradwire.torch.coding import HIERARCHICAL, check_machines
from gradwire.torch.engine import agree
from gradwire.torch.wire import Wire

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # of torchrun: its processes on this machine


def agree_on_machines(given: int | None, wire: Wire) -> int:
    """Ranks on one machine, the same number on every rank of the wire.

    What was given, or what torchrun says of the whole world, or else as host names tell. Raises
    PeerMismatchError where ranks were told different numbers, ValueError for a number that does not
    divide the ranks, and for hosts with different numbers of ranks or with ranks that do not follow
    one another.
    """
    origin = "ranks_per_machine"
    whole = wire.world_size == dist.get_world_size()  # torchrun tells nothing of a part
    if given is None and whole and LOCAL_WORLD_SIZE in os.environ:
        origin, given = f"{LOCAL_WORLD_SIZE} of torchrun", int(os.environ[LOCAL_WORLD_SIZE])
    machines = _Machines(wire.rank, given)
    agree(machines, wire)
    if given is None:
        return _equal_runs([machines.hosts[rank] for rank in range(wire.world_size)])
    check_machines(given, wire.world_size, origin)
    return given


class _Machines:
    """What a rank knows of its machine: how many ranks one has, or only its host's name."""

    _GIVEN = f"exchange {HIERARCHICAL}, ranks_per_machine "
    _ON = f"exchange {HIERARCHICAL}, ranks_per_machine found by host names, this is "

    def __init__(self, rank: int, given: int | None) -> None:
        self._rank = rank
        host = socket.gethostname()
        self._text = f"{self._ON}{host}" if given is None else f"{self._GIVEN}{given}"
        self.hosts = {rank: host}

    def describe(self) -> str:
        return self._text

    def check_peer(self, peer: int, text: str) -> None:
        if self._text.startswith(self._ON) and text.startswith(self._ON):
            self.hosts[peer] = text.removeprefix(self._ON)
            return
        mine, theirs = (line.partition("\n")[0] for line in (self._text, text))
        if mine != theirs:
            raise ValueError(
                f"ranks {self._rank} and {peer} can't exchange: rank {self._rank} has '{mine}', "
                f"rank {peer} has '{theirs}'"
            )


def _equal_runs(hosts: list[str]) -> int:
    """How many ranks each host has. `hosts`: by rank."""
    size = hosts.count(hosts[0])
    for first in range(0, len(hosts), size):
        run = hosts[first : first + size]
        if hosts.count(hosts[first]) != size or set(run) != {hosts[first]}:
            raise ValueError(
                f"exchange='{HIERARCHICAL}' needs as many ranks on every machine, one behind the "
                f"other; ranks 0 to {len(hosts) - 1} are on {', '.join(hosts)}. Start them so, or "
                "give ranks_per_machine"
            )
    return size
