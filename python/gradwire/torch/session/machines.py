"""Finds out which ranks share a machine."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from gradwire.torch.link.engine import agree
from gradwire.torch.link.wire import Wire
from gradwire.torch.records.exchange_settings import ExchangeSettings, check_machines

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # of torchrun: its processes on this machine


def agree_on_machines(settings: ExchangeSettings, wire: Wire) -> int:
    """The number of ranks on one machine, which is the same on every rank of the wire.

    It is the number that was given, or that of torchrun if the wire has all ranks, or else it is
    found by host names. Raises PeerMismatchError if ranks were given different numbers. Raises
    ValueError if the number does not divide the ranks, if hosts have different numbers of ranks, or
    if the ranks of a host are not consecutive.
    """
    origin, given = "ranks_per_machine", settings.ranks_per_machine
    whole = wire.world_size == dist.get_world_size()  # torchrun does not know a part
    if given is None and whole and LOCAL_WORLD_SIZE in os.environ:
        origin, given = f"{LOCAL_WORLD_SIZE} of torchrun", int(os.environ[LOCAL_WORLD_SIZE])
    machines = _Machines(wire.rank, settings.info["name"], given)
    agree(machines, wire)
    if given is None:
        return _equal_runs([machines.hosts[rank] for rank in range(wire.world_size)])
    check_machines(given, wire.world_size, origin)
    return given


class _Machines:
    """What a rank knows of its machine: the number of ranks on it, or only the host's name."""

    def __init__(self, rank: int, exchange: str, given: int | None) -> None:
        self._rank = rank
        self._on = f"exchange {exchange}, ranks_per_machine found by host names, this is "
        host = socket.gethostname()
        stated = f"exchange {exchange}, ranks_per_machine {given}"
        self._text = f"{self._on}{host}" if given is None else stated
        self.hosts = {rank: host}

    def describe(self) -> str:
        return self._text

    def check_peer(self, peer: int, text: str) -> None:
        if self._text.startswith(self._on) and text.startswith(self._on):
            self.hosts[peer] = text.removeprefix(self._on)
            return
        mine, theirs = (line.partition("\n")[0] for line in (self._text, text))
        if mine != theirs:
            raise ValueError(
                f"ranks {self._rank} and {peer} can't exchange: rank {self._rank} has '{mine}', "
                f"rank {peer} has '{theirs}'"
            )


def _equal_runs(hosts: list[str]) -> int:
    """How many ranks each host has. `hosts`: the host of each rank."""
    size = hosts.count(hosts[0])
    for first in range(0, len(hosts), size):
        run = hosts[first : first + size]
        if hosts.count(hosts[first]) != size or set(run) != {hosts[first]}:
            raise ValueError(
                "the exchange needs the same number of consecutive ranks on every machine; "
                f"ranks 0 to {len(hosts) - 1} are on {', '.join(hosts)}. Start them so, "
                "or give ranks_per_machine"
            )
    return size
