"""Where ranks meet, and how they connect there: a process group, a store, or one process."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from gradwire.job_key import VARIABLE
from gradwire.torch.errors import CommunicationError, JobKeyError, StoreLostError
from gradwire.torch.network.failure import GRACE_SECONDS, TIMEOUT_SPREAD_SECONDS, FailureBoard
from gradwire.torch.network.sealed_store import (
    STORE_SECONDS,
    SealedStore,
    StoreAccess,
    StoreUnreachableError,
    exist,
    prove,
    read,
    sealed,
    under,
)
from gradwire.torch.network.transport import MakesTransports, Transport, ranks_in_world
from gradwire.torch.network.wire import Wire

_PROBE_TAG = 0x67726164  # of receives that nobody answers, in a group that the program uses, too
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2  # seconds between two looks at the store
_INTERFACES = "GLOO_SOCKET_IFNAME"
_COUNT, _HERE, _ALL = "here", "here/{}", "all"  # keys of one call


@dataclass(frozen=True)
class Meeting:
    """Where `world_size` ranks meet, and which of them this one is.

    Attributes:
        store: Of these ranks alone (a PrefixStore), and of no earlier meeting.
        names: By which the program and errors know the ranks. Empty: their places, from 0 on.
        connect_seconds: The most that a connection may take, if the group's timeout is longer.
        numbers: The ranks that messages and errors are about, by place. Empty: the places.
        group: Of the same ranks, in the same order; over Gloo it shows at once that a process
            ended.
    """

    store: Store
    rank: int
    world_size: int
    names: Sequence[int] = ()
    connect_seconds: float = math.inf
    numbers: Sequence[int] = ()
    group: dist.ProcessGroup | None = None

    def make_group(
        self, make: Callable[[Store], dist.ProcessGroup], timeout: float
    ) -> tuple[dist.ProcessGroup, Store]:
        """Waits until every rank has come here as often as this one, and makes a group.

        Args:
            make: Makes it, over a store of this call alone.
            timeout: Seconds, for the ranks to come.

        Returns:
            The group, whose connections lead to processes with the job key if there is one, and the
            store; with a job key, that is sealed by a key that only these ranks have.

        Raises:
            PeerLostError: These ranks did not come, or broke off. Also PeerSilentError.
            StoreLostError: The store does not answer.
            JobKeyError: The ranks don't share a job key.
        """
        call = _RollCall(self, timeout)
        store = call.gather()
        try:
            group = make(store)
            if isinstance(store, SealedStore):
                prove(group, store.key, call.ranks, call.seconds)
        except JobKeyError:
            raise
        except RuntimeError as error:
            others = tuple(rank for rank in call.ranks if rank != call.rank)
            call.fail(call.closed_ranks() or others, str(error).partition("\n")[0])
        return group, store


class _RollCall:
    """How this rank learns that all ranks of a meeting have come."""

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        self.ranks = meeting.numbers or meeting.names or range(meeting.world_size)
        self.rank = self.ranks[meeting.rank]
        self.seconds = min(timeout, meeting.connect_seconds)
        group = meeting.group
        self._group = group if group is not None and _is_gloo(group) else None
        # Of the meeting, and then of this call alone.
        self._store = sealed(meeting.store)
        # The store may be on a machine that is stopped and never answers.
        self._access = StoreAccess(self.seconds + STORE_SECONDS)

    def gather(self) -> Store:
        """Waits until all ranks are there. Returns a store of theirs alone."""
        try:
            missing, store = self._access.ask(self._enter, meanwhile=self._require_connections)
        except StoreUnreachableError as error:
            time.sleep(GRACE_SECONDS)  # the connections of its host close one after another
            self.fail(self.closed_ranks(), str(error))
        finally:
            self._access.hurry()
        if missing:
            self.fail(missing, f"waited {self.seconds:g} s", silent=True)
        return store

    def _enter(self) -> tuple[tuple[int, ...], Store]:
        """Enters this rank in the store, and looks until all are there, or the time is over.
        Returns the ranks that are missing, and the store of `gather`."""
        end = time.monotonic() + self.seconds
        number = self._store.add(f"gradwire/calls/{self.rank}", 1)
        self._store = keys = under(self._store, f"gradwire/call/{number}")
        keys.set(_HERE.format(self.rank), secrets.token_hex(16))
        if keys.add(_COUNT, 1) >= len(self.ranks):
            keys.set(_ALL, "")
        here = {rank: _HERE.format(rank) for rank in self.ranks}
        pause = _FIRST_LOOK
        while not (exist(keys, [_ALL]) and exist(keys, list(here.values()))):
            if time.monotonic() >= end:
                missing = tuple(rank for rank, name in here.items() if not keys.check([name]))
                if missing:
                    return missing, keys
            if self._access.pause(pause):
                raise StoreUnreachableError("this rank is leaving")
            pause = min(2 * pause, _LAST_LOOK)
        return (), self._seal(keys, here)

    def _seal(self, keys: Store, here: dict[int, str]) -> Store:
        """Gives the records a key of these ranks and this call alone: it comes from a random number
        of each, so no record of an earlier call is valid."""
        if not isinstance(keys, SealedStore):
            return keys
        numbers = read(keys, list(here.values()))
        strangers = [rank for rank, number in zip(here, numbers, strict=True) if number is None]
        if strangers:
            raise JobKeyError(
                f"rank {self.rank}: what calls itself rank {', '.join(map(str, strangers))} has "
                f"not this job's key: give all ranks the same {VARIABLE}",
                tuple(strangers),
            )
        key = keys.key.derive("call", *(number.decode() for number in numbers if number))
        return keys.under("sealed", key)

    def _require_connections(self) -> None:
        if closed := self.closed_ranks():
            self.fail(closed, "its connection closed")

    def closed_ranks(self) -> tuple[int, ...]:
        """Those that have closed their connections of the meeting's group."""
        closed = []
        for place, rank in enumerate(self.ranks):
            if self._group is not None and rank != self.rank:
                try:
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    self._group.recv([nothing], place, _PROBE_TAG)
                except RuntimeError:
                    closed.append(rank)
        return tuple(closed)

    def fail(self, lost: tuple[int, ...], why: str, silent: bool = False) -> NoReturn:
        doing = f"rank {self.rank}, waiting for all {len(self.ranks)} ranks to connect"
        if not lost:
            raise StoreLostError(
                "the store where the ranks meet, hosted by rank 0 unless a launcher hosts it, does "
                f"not answer ({why}); {doing}"
            )
        board = FailureBoard(self._store, self.rank, self.ranks)
        patience = TIMEOUT_SPREAD_SECONDS if silent else GRACE_SECONDS
        error = board.diagnose(lost, silent, f"{doing}: {why}", () if silent else lost, patience)
        board.linger()
        raise error


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group carries tensors on the CPU, and over Gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    return isinstance(getattr(backend, "wrapped_pg", backend), ProcessGroupGloo)


Where = dist.ProcessGroup | Meeting | None  # None: all ranks of the world


def connect(where: Where, timeout: float) -> tuple[Transport, Sequence[int], Store]:
    """Every rank must call this, in the same order.

    Returns:
        A transport between the ranks, by what names the program and errors know them, and a store
        of these ranks alone.

    Raises:
        CommunicationError: As Meeting.make_group.
    """
    if isinstance(where, Meeting):
        meeting = where
    else:
        world, place = require_group(where)
        names = ranks_in_world(world)
        if isinstance(world, MakesTransports):
            wire, store = world.make_transport(timeout)
            return wire, names, store
        assert place is not None, "other groups have one"
        require_gloo(f" beside {world.name()}")
        meeting = Meeting(place, world.rank(), world.size(), names, group=world)

    def make(store: Store) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, meeting.rank, meeting.world_size)
        add_gloo(group, store, timedelta(seconds=min(timeout, meeting.connect_seconds)))
        return group

    group, store = meeting.make_group(make, timeout)
    return Wire(group, timeout, meeting.numbers), meeting.names, store


def require_group(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, Store | None]:
    """The group (None: all ranks of the world) and its store, which one that makes transports does
    not need. Raises CommunicationError if there is none."""
    group = group or dist.group.WORLD
    if group is None:
        raise CommunicationError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise CommunicationError(
            "this rank is not in the process group, of which new_group() gave it no part "
            "(GroupMember.NON_GROUP_MEMBER): leave it to the group's ranks to call this"
        )
    # A group that is written in Python does not know its store, but the world does.
    known = distributed_c10d._world.pg_map.get(group)
    store = group.get_group_store() or (known and known[1])
    if store is None and not isinstance(group, MakesTransports):
        raise CommunicationError(
            f"the process group {group.name()} has no store, where gradwire's ranks meet: make "
            "it by torch.distributed.init_process_group or new_group"
        )
    return group, store


def require_gloo(beside: str = "") -> None:
    """Raises CommunicationError where Gloo finds no network interface, which is no other rank's
    fault. beside: for the message, beside which group."""
    interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    try:
        for interface in interfaces:
            ProcessGroupGloo.create_device(interface=interface)
        if not interfaces:
            ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CommunicationError(
            "gradwire's messages go between tensors of the CPU, over a Gloo group"
            f"{beside}, and Gloo finds no network interface here ({reason}): set "
            f"{_INTERFACES} to the one that leads to the other ranks, such as eth0"
        ) from error


def add_gloo(group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
    """Gives a new group its backend for tensors on the CPU. Every rank must call this."""
    kind = dist.ProcessGroup.BackendType.GLOO
    gloo = ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    group._register_backend(torch.device("cpu"), kind, gloo)
    # Last: from here on the group asks its backend, from PyTorch 2.14 on also for its rank.
    group._set_default_backend(kind)
