"""Finds out which ranks share a machine."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from gradwire.torch.link.engine import agree, gather
from gradwire.torch.link.transport import Transport
from gradwire.torch.records.exchange_settings import ExchangeSettings, check_machines

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # of torchrun: its processes on this machine


def agree_on_machines(settings: ExchangeSettings, wire: Transport) -> int:
    """The number of ranks on one machine, which is the same on every rank of the wire.

    It is the number in the settings, or torchrun's number if the wire has all ranks, or else it is
    found by host names. Raises PeerMismatchError if ranks were given different numbers. Raises
    ValueError if the number does not divide the ranks, if hosts have different numbers of ranks, or
    if the ranks of a host are not consecutive.
    """
    origin, given = "ranks_per_machine", settings.ranks_per_machine
    # torchrun counts all ranks
    whole = dist.is_initialized() and wire.world_size == dist.get_world_size()
    if given is None and whole and LOCAL_WORLD_SIZE in os.environ:
        origin, given = f"{LOCAL_WORLD_SIZE} of torchrun", int(os.environ[LOCAL_WORLD_SIZE])
    size = "found by host names" if given is None else given
    agree(f"exchange {settings.info['name']}, ranks_per_machine {size}", wire)
    if given is not None:
        check_machines(given, wire.world_size, origin)
        return given
    hosts = gather(socket.gethostname(), wire)
    given = hosts.count(hosts[0])
    if hosts != [host for host in dict.fromkeys(hosts) for _ in range(given)]:
        raise ValueError(
            "the exchange needs the same number of consecutive ranks on every machine; "
            f"ranks 0 to {len(hosts) - 1} are on {', '.join(hosts)}. Start them so, "
            "or give ranks_per_machine"
        )
    return given
