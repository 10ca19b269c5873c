"""Where ranks meet, and how they connect there: a process group, a store, or one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from gradwire.torch.errors import PeerLostError
from gradwire.torch.link.loopback import LoopbackGroup
from gradwire.torch.link.roll_call import RollCall
from gradwire.torch.link.transport import LostError, Transport
from gradwire.torch.link.wire import Wire


@dataclass(frozen=True)
class Meeting:
    """Where `world_size` ranks meet, and which of them this one is.

    store   of these ranks alone (a PrefixStore), and of no earlier meeting
    names   by which the program and errors know the ranks; empty: by their places, from 0 on
    connect_seconds   the most that a connection may take, if the group's timeout is longer
    numbers   the ranks that messages and errors are about, by place; empty: the places themselves
    """

    store: Store
    rank: int
    world_size: int
    names: Sequence[int] = ()
    connect_seconds: float = math.inf
    numbers: Sequence[int] = ()


Where = dist.ProcessGroup | Meeting | None  # None: all ranks of the world


class Connected(NamedTuple):
    """A transport between ranks, by what names the program and errors know them, and the store of
    these ranks alone."""

    wire: Transport
    names: Sequence[int]
    store: Store


def connect(where: Where, timeout: float) -> Connected:
    """Every rank must call this, in the same order.

    Raises PeerLostError, PeerSilentError or StoreLostError, if not all of them come within
    `timeout` (seconds), and JobKeyError for a process without the job's key.
    """
    if isinstance(where, Meeting):
        ranks = where.numbers or where.names or range(where.world_size)
        seconds = min(timeout, where.connect_seconds)
        call = RollCall(where.store, ranks[where.rank], ranks, seconds)
        return _connect_over_gloo(call, timeout, where.names, where.numbers)
    world = where or dist.group.WORLD
    assert world is not None, "init_process_group was not called"
    if isinstance(world, LoopbackGroup):
        names = world.names()
        try:
            wire, store = world.connect(timeout)
        except LostError as lost:
            absent = tuple(names[peer] for peer in lost.peers)
            raise PeerLostError(f"ranks {absent} do not connect: {lost}", absent) from lost
        return Connected(wire, names, store)
    names = dist.get_process_group_ranks(world)
    call = RollCall(world.get_group_store(), names[world.rank()], names, timeout, world)
    return _connect_over_gloo(call, timeout, names, ())


def _connect_over_gloo(
    call: RollCall, timeout: float, names: Sequence[int], numbers: Sequence[int]
) -> Connected:
    """timeout: of the messages. numbers: see Meeting."""
    with call.connecting() as gathering:
        store, size = gathering.store, len(call.ranks)
        group = dist.ProcessGroup(store, call.ranks.index(call.rank), size)
        add_gloo(group, store, timedelta(seconds=call.timeout))
        gathering.prove(group, call.timeout)
    return Connected(Wire(group, timeout, numbers), names, store)


def add_gloo(group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
    """Gives a new group its backend for tensors on the CPU. Every rank must call this."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo = ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, gloo)
