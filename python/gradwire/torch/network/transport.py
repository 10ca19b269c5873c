"""What moves messages between this rank and its peers: what every transport offers.

`wire.py` sends them over Gloo, and `loopback.py` passes them between the ranks of one process. An
exchange that is driven over either ends with the same bits, and counts the same bytes.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.torch.errors import PeerMismatchError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

PART_BITS = 16
OVERHEAD_BYTES = 16  # of a message: its word and its checksums (wire.py)
NOTHING = np.empty(0, dtype=np.uint8)
ENDLESS_SECONDS = 365 * 86400.0
_LOOK_SECONDS = 0.001  # between two looks whether threads have ended
ABORT_SECONDS = 8.0  # for a thread whose connections were closed: it may wait 5 s for the store


class Kind(IntEnum):
    """What a message holds."""

    PACKET = 0  # bytes that an exchange made, with its checksum
    HELLO = 1  # the description of an exchange, in UTF-8
    OPTIONS = 2  # the options of a worker's parameter groups, as JSON
    MODEL = 3  # a server's version (u64), then its tensors as float32
    LEAVE = 4  # a worker pushes no more
    OVER = 5  # a server finishes no further version
    CATCH_UP = 6  # the model as the workers of a version have it, from a server, in MODEL's form
    BUFFERS = 7  # a model's buffers
    TENSORS = 8  # a model that another rank takes over, outside of any exchange
    JOIN = 9  # a worker takes a free place: empty, then the first version that it pushes for (u64)
    EXPELLED = 10  # the servers took this worker for dead
    UNUSED = 11  # which tensors of the next packet's bucket have no gradient, by rank (Unused)
    ALIKE = 12  # digests of what must be equal in the next packet's step, by rank (Alike)
    ASK = 13  # what a receiver of weights wants of a folder, as JSON
    ANSWER = 14  # bytes of a file of that folder
    PUT = 15  # bytes of a file for that folder

    @property
    def label(self) -> str:
        """For errors."""
        return "catch-up" if self is Kind.CATCH_UP else self.name.lower()


# Which kinds of messages a peer may send now, and the most bytes of each. What a peer states as a
# length is not believed beyond that.
Limits = Mapping[Kind, int]

# The most bytes of a text whose length nobody knows beforehand: a description, which names each
# tensor of a model, or the options of parameter groups.
TEXT_BYTES = 1 << 26


class Received(NamedTuple):
    """A message; `part`: the part of the model that it is about, where the model has parts. One of
    a kind that must not come now has no payload. `stays`: its payload outlasts `release`. `ahead`:
    it was sent before its turn."""

    kind: Kind
    payload: Bytes
    part: int
    stays: bool = False
    ahead: bool = False


class LostError(Exception):
    """These peers (ranks of the group) are gone, or were silent for the timeout."""

    def __init__(self, peers: tuple[int, ...], silent: bool, why: str) -> None:
        super().__init__(why.partition("\n")[0])
        self.peers = peers
        self.silent = silent


class Transport(ABC):
    """Messages to and from every peer, in the order in which they were sent.

    One thread at a time may use it; only `receive` and `release` of different peers may overlap,
    and sending ahead.

    Attributes:
        waits_alone: Whether a thread that waits here lets the rank's other threads go on. If not,
            the rank has one thread, and what waits elsewhere runs where it is begun.
        rank, peers: As everything here counts them.
        timeout: Seconds.
        doing: For errors.
        turn: The bucket under way, counted modulo 65536: the `part` of its messages.
        ahead: What peers have sent before its turn, the next one. ahead_limits: what may come so.
        sent_bytes: Of messages, with OVERHEAD_BYTES each.
        waited_seconds: Blocked on the transport.
    """

    waits_alone = True

    def __init__(self, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self.peers = [peer for peer in ranks if peer != rank]
        self.timeout = timeout
        self.doing = ""
        self.turn = 0
        self.ahead: defaultdict[int, deque[Received]] = defaultdict(deque)
        self.ahead_limits: Limits = {}
        self.sent_bytes = 0
        self.waited_seconds = 0.0

    @property
    def next_turn(self) -> int:
        return (self.turn + 1) % (1 << PART_BITS)

    def begin_turn(self) -> None:
        """The next bucket has its turn. What was sent ahead for it counts as sent now."""
        self.turn = self.next_turn

    @abstractmethod
    def send(
        self, peer: int, kind: Kind, payload: Bytes = NOTHING, part: int = 0, in_turn: bool = False
    ) -> None:
        """Starts sending. `payload` (one-dimensional) must not change before the next `flush`.
        in_turn: `part` is the turn under way, or the next one, for which no `flush` waits before
        it."""

    @abstractmethod
    def receive(self, peer: int, limits: Limits, timeout: float | None = None) -> Received:
        """Waits for the next message of `peer`; its bytes stay valid until `release(peer)`.

        `timeout` replaces the transport's. A wait that times out closes all connections.
        Raises LostError. Raises DamagedMessageError for a message that is not what its sender sent,
        and PeerMismatchError for one that is longer than its limit, for which no memory is taken.
        After these, and after a message of a kind without a limit, nothing more can be received.
        """

    @abstractmethod
    def release(self, peer: int) -> None:
        """The bytes of the peer's last message become invalid, and its next one may come."""

    @abstractmethod
    def flush(self, peer: int | None = None, keep: int = 0) -> None:
        """Waits until the system has all sent bytes, which then arrive even if this rank leaves.

        `peer`: waits only for what was sent to that peer, without the last `keep` transfers.
        """

    @abstractmethod
    def closed_peers(self) -> tuple[int, ...]:
        """The peers whose connection is closed. Waits for no peer."""

    @abstractmethod
    def abort(self) -> None:
        """Closes all connections at once, so that waits in other threads end with an error."""

    @abstractmethod
    def drop(self) -> None:
        """Releases the connections. What was not flushed may be lost."""

    def listen(
        self, peer: int, limits: Limits, put: Callable[[Received | Exception], None]
    ) -> list[threading.Thread]:
        """From now on `put` is called with every message of the peer, whose payload it may keep,
        up to the last: LEAVE, one of a kind without a limit, or the error that ended the receiving.
        Returns the threads that do so."""
        thread = threading.Thread(
            target=self._listen, args=(peer, limits, put), name=f"gradwire-{peer}", daemon=True
        )
        thread.start()
        return [thread]

    def _listen(
        self, peer: int, limits: Limits, put: Callable[[Received | Exception], None]
    ) -> None:
        is_last = False
        try:
            while not is_last:
                # Without a timeout: a wait that times out closes all connections of its group, and
                # a slow peer must not close those of the others.
                message = self.receive(peer, limits, ENDLESS_SECONDS)
                is_last = self._is_last(message, limits)
                if not message.stays:
                    message = message._replace(payload=message.payload.copy(), stays=True)
                put(message)
                del message  # it would stay until the next one comes
                if not is_last:
                    self.release(peer)
        except Exception as error:  # nobody takes it where the transport was dropped meanwhile
            put(error)

    @staticmethod
    def _is_last(message: Received, limits: Limits) -> bool:
        return message.kind is Kind.LEAVE or message.kind not in limits

    def take_from(self, arrived: queue.SimpleQueue[T], seconds: float) -> T:
        """The next of what `listen` has put into a queue. Raises queue.Empty if nothing comes."""
        return arrived.get(timeout=seconds)

    def _check_length(self, peer: int, kind: Kind, length: int, limit: int) -> None:
        if length > limit:
            raise PeerMismatchError(
                f"rank {self.rank}: rank {peer} states a {kind.label} of {length} bytes, and one "
                f"of at most {limit} can come here: the two ranks have different versions "
                f"of gradwire, or rank {peer} is out of order",
                (peer,),
            )


_OWN_THREAD = re.compile("gradwire(?!-rank)")  # the name; a loopback's rank is the program's
_inherited: list[Callable[[], object]] = []  # of `only_here`, in a child


def only_here(call: Callable[[], object]) -> Callable[[], object]:
    """`call`, which does nothing in a child that is forked from this process: there the threads
    are gone, and the connections are the parent's, whom any use of them would disturb. A child
    keeps what `call` knows, because Gloo's destructors would wait for the threads.

    Python drops what is in a cycle in any thread. In one of gradwire's own, a new thread runs
    `call`, which would wait for that thread, or for a lock that it has."""
    process = os.getpid()

    def run() -> None:
        if os.getpid() != process:
            _inherited.append(call)
        elif _OWN_THREAD.match(threading.current_thread().name):
            threading.Thread(target=call, name="gradwire-end").start()
        else:
            call()

    return run


def join(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Waits until the threads have ended, except the calling one; False if one takes longer. (After
    an interrupt of their own join, Python 3.11 takes threads for ended.)"""
    end = time.monotonic() + seconds
    others = [thread for thread in threads if thread is not threading.current_thread()]
    while any(thread.is_alive() for thread in others):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


@runtime_checkable
class MakesTransports(Protocol):
    """A process group that has transports of its own, in place of those over Gloo."""

    def make_transport(self, timeout: float) -> tuple[Transport, Store]:
        """A transport between its ranks, and a store of it alone. Every rank must call this. Raises
        PeerLostError if one does not."""


def ranks_in_world(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the group's processes; empty if the group was made outside a world."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return []
