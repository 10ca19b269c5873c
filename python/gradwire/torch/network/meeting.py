"""Where ranks meet, and how they connect there: a process group, a store, or one process."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from gradwire.job_key import VARIABLE
from gradwire.torch.errors import JobKeyError, PeerLostError, StoreLostError
from gradwire.torch.network.failure import GRACE_SECONDS, TIMEOUT_SPREAD_SECONDS, FailureBoard
from gradwire.torch.network.loopback import LoopbackGroup
from gradwire.torch.network.sealed_store import SealedStore, exist, prove, read, sealed, under
from gradwire.torch.network.store_access import StoreAccess, StoreUnreachableError
from gradwire.torch.network.transport import LostError, Transport
from gradwire.torch.network.wire import Wire

_PROBE_TAG = 0x67726164  # of receives that nobody answers, in a group that the program uses, too
_PROBE_SECONDS = 0.5  # between two looks at the connections
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2  # seconds between two looks at the store
_COUNT, _HERE, _ALL = "here", "here/{}", "all"  # keys of one call


@dataclass(frozen=True)
class Gathering:
    """The ranks that have come. store: of this call alone; with a job key, sealed by a key that
    only these ranks have."""

    store: Store
    ranks: Sequence[int]

    def prove(self, group: dist.ProcessGroup, timeout: float) -> None:
        """Checks that the other ends of a new group's connections have the job key, if the job has
        one. Every rank must call this. Raises JobKeyError."""
        if isinstance(self.store, SealedStore):
            prove(group, self.store.key, self.ranks, timeout)


@dataclass(frozen=True)
class RollCall:
    """Which ranks must come, and how this one learns of them.

    store    of these ranks alone
    rank     this one
    ranks    all of them, as errors name them
    timeout  seconds
    group    of the same ranks, in the same order; over Gloo it shows at once that a process ended
    """

    store: Store
    rank: int
    ranks: Sequence[int]
    timeout: float
    group: dist.ProcessGroup | None = None

    @contextlib.contextmanager
    def connecting(self) -> Iterator[Gathering]:
        """Waits until every rank has come here as often as this one. Inside, the ranks connect.

        Raises PeerLostError, PeerSilentError or StoreLostError, which name the ranks that did not
        come; also for a RuntimeError inside. Raises JobKeyError if they don't share a job key.
        """
        entry = _Entry(sealed(self.store), self.rank, self.ranks)
        entry.start()
        closed_ranks = self._look_at_connections()
        try:
            end = time.monotonic() + self.timeout
            while not entry.done.wait(_PROBE_SECONDS):
                if closed := closed_ranks():
                    self._fail(entry.keys, closed, "its connection closed")
                if time.monotonic() >= end and (missing := self._missing(entry.keys)):
                    self._fail(entry.keys, missing, f"waited {self.timeout:g} s", silent=True)
        finally:
            entry.stop()
        if isinstance(entry.error, JobKeyError):
            raise entry.error
        if entry.error is not None:
            time.sleep(GRACE_SECONDS)  # the connections of its host close one after another
            self._fail(entry.keys, closed_ranks(), str(entry.error).partition("\n")[0])
        assert entry.gathering is not None
        try:
            yield entry.gathering
        except JobKeyError:
            raise
        except RuntimeError as error:
            closed = closed_ranks() or tuple(rank for rank in self.ranks if rank != self.rank)
            self._fail(entry.keys, closed, str(error).partition("\n")[0])

    def _look_at_connections(self) -> Callable[[], tuple[int, ...]]:
        """Tells which ranks have closed their connections of the group."""
        group = self.group if self.group is not None and _is_gloo(self.group) else None

        def closed_ranks() -> tuple[int, ...]:
            closed = []
            for place, rank in enumerate(self.ranks):
                if group is not None and rank != self.rank:
                    try:
                        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                        group.recv([nothing], place, _PROBE_TAG)
                    except RuntimeError:
                        closed.append(rank)
            return tuple(closed)

        return closed_ranks

    def _missing(self, keys: Store | None) -> tuple[int, ...]:
        """Those that have not come. Raises StoreLostError if the store does not say."""
        others = tuple(rank for rank in self.ranks if rank != self.rank)
        try:
            if keys is None:
                raise StoreUnreachableError("no answer")
            return StoreAccess().ask(
                lambda: tuple(rank for rank in others if not keys.check([_HERE.format(rank)]))
            )
        except StoreUnreachableError as error:
            raise self._store_lost(str(error)) from None

    def _store_lost(self, why: str) -> StoreLostError:
        return StoreLostError(
            "the store where the ranks meet, hosted by rank 0 unless a launcher hosts it, does not "
            f"answer ({why}); rank {self.rank}, {self._doing}"
        )

    @property
    def _doing(self) -> str:
        return f"waiting for all {len(self.ranks)} ranks to connect"

    def _fail(
        self, keys: Store | None, lost: tuple[int, ...], why: str, silent: bool = False
    ) -> NoReturn:
        if not lost:
            raise self._store_lost(why)
        when = f"rank {self.rank}, {self._doing}: {why}"
        board = FailureBoard(keys or self.store, self.rank, self.ranks)
        patience = TIMEOUT_SPREAD_SECONDS if silent else GRACE_SECONDS
        error = board.diagnose(lost, silent, when, () if silent else lost, patience)
        board.linger()
        raise error


class _Entry(threading.Thread):
    """Enters this rank in the store and looks until all are there. The store may be on a machine
    that is stopped and never answers, so this is a thread of its own."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(name="gradwire-roll-call", daemon=True)
        self._store, self._rank, self._ranks = store, rank, ranks
        self._stopping = threading.Event()
        self.keys: Store | None = None  # of this call alone
        self.gathering: Gathering | None = None
        self.done = threading.Event()  # all are there, or there is an error
        self.error: RuntimeError | None = None  # the store's

    def run(self) -> None:
        try:
            number = self._store.add(f"gradwire/calls/{self._rank}", 1)
            self.keys = keys = under(self._store, f"gradwire/call/{number}")
            keys.set(_HERE.format(self._rank), secrets.token_hex(16))
            if keys.add(_COUNT, 1) >= len(self._ranks):
                keys.set(_ALL, "")
            pause = _FIRST_LOOK
            here = [_HERE.format(rank) for rank in self._ranks]
            while not (exist(keys, [_ALL]) and exist(keys, here)):
                if self._stopping.wait(pause):
                    return
                pause = min(2 * pause, _LAST_LOOK)
            self.gathering = self._gather(keys, here)
        except RuntimeError as error:
            self.error = error
        self.done.set()

    def stop(self) -> None:
        self._stopping.set()

    def _gather(self, keys: Store, here: list[str]) -> Gathering:
        """A key of these ranks and this call alone: it comes from a random number of each, so no
        record of an earlier call is valid."""
        if not isinstance(keys, SealedStore):
            return Gathering(keys, self._ranks)
        numbers = read(keys, here)
        strangers = [r for r, number in zip(self._ranks, numbers, strict=True) if number is None]
        if strangers:
            raise JobKeyError(
                f"rank {self._rank}: what calls itself rank {', '.join(map(str, strangers))} has "
                f"not this job's key: give all ranks the same {VARIABLE}",
                tuple(strangers),
            )
        key = keys.key.derive("call", *(number.decode() for number in numbers if number))
        return Gathering(keys.under("sealed", key), self._ranks)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group carries tensors on the CPU, and over Gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    return isinstance(getattr(backend, "wrapped_pg", backend), ProcessGroupGloo)


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
