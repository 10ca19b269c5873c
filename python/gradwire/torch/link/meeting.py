"""Ranks that meet over a store, without a world of torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from gradwire.torch.link.roll_call import RollCall


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

    def connect(self, timeout: float) -> Connected:
        """Every rank must call this.

        Raises PeerLostError, PeerSilentError or StoreLostError, if not all of them come within
        `timeout` and `connect_seconds`, and JobKeyError for a process without the job's key.
        """
        ranks = self.numbers or self.names or range(self.world_size)
        seconds = min(timeout, self.connect_seconds)
        return connect_all(RollCall(self.store, ranks[self.rank], ranks, seconds))


class Connected(NamedTuple):
    """A Gloo group, and the store of its ranks alone."""

    group: dist.ProcessGroup
    store: Store


def connect_all(call: RollCall) -> Connected:
    """See Meeting.connect."""
    with call.connecting() as gathering:
        store, size = gathering.store, len(call.ranks)
        group = dist.ProcessGroup(store, call.ranks.index(call.rank), size)
        add_gloo(group, store, timedelta(seconds=call.timeout))
        gathering.prove(group, call.timeout)
    return Connected(group, store)


def add_gloo(group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
    """Gives a new group its backend for tensors on the CPU. Every rank must call this."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo = ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, gloo)
