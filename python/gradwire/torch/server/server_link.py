"""Connects workers and servers: the messages of different peers come in any order.

Gloo cannot tell which of several receives is done: `is_completed()` is false until somebody waits,
and a receive from any source does not notice that a peer is gone. So one thread waits for each
peer.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from gradwire.torch.errors import CommunicationError, PeerMismatchError
from gradwire.torch.members.places import Admissions, Places
from gradwire.torch.network.connection import Connection
from gradwire.torch.network.engine import agree, gather_bytes
from gradwire.torch.network.meeting import Meeting
from gradwire.torch.network.transport import (
    ABORT_SECONDS,
    NOTHING,
    TEXT_BYTES,
    Bytes,
    Kind,
    Limits,
    LostError,
    Received,
    join,
)

_GRACE_SECONDS = 1.0  # after the timeout, for what arrived while this process slept


@dataclass(frozen=True)
class Message:
    peer: int
    kind: Kind
    payload: Bytes
    part: int
    at: float  # when it arrived, by time.perf_counter


class ServerLink(Connection):
    """Lasts from the comparison of setups to `close`, or to the first error, which ends it.

    Where processes take the places of lost workers, each of them has a connection of its own with
    the servers, which are all of its group.
    """

    def __init__(
        self,
        where: dist.ProcessGroup | Meeting | None,
        timeout: float,
        description: str,
        saved: bytes = b"",
    ) -> None:
        """`description`: of the setup, equal on all ranks; those of a meeting have compared it.
        `saved`: describes the state with which this rank goes on, if it can go on exactly; b"": it
        can't."""
        super().__init__(where, timeout)
        self._limits: Limits = {}
        self.wire_seconds = 0.0  # that `take` waited
        self.all_go_on = False  # whether all ranks have the states that they saved at one version
        # Connection, peer, and its message, or an error. None: the peer has a new connection.
        self.arrived: queue.SimpleQueue[tuple[Connection, int, Message | Exception | None]] = (
            queue.SimpleQueue()
        )
        self._newer: dict[int, Connection] = {}  # of peers that have taken a place
        self._sent_before = 0  # bytes, over connections that others have replaced
        self._admissions: Admissions | None = None
        self._offered: set[int] = set()  # places that no other process has taken yet
        if not isinstance(where, Meeting):
            with self.guard("comparing setups"):
                agree(description, self.wire)
                told = gather_bytes(saved, self.wire, TEXT_BYTES)
                self.all_go_on = saved != b"" and all(other == saved for other in told)

    def listen(self, peers: Iterable[int], limits: Limits) -> None:
        """From now on the messages of these ranks arrive, if they keep the limits."""
        self._limits = limits
        for peer in peers:
            self._start_reader(self, peer)

    def let_join(self, places: Places) -> None:
        """On a server: gives the places that are `offer`ed to other processes."""

        def on_arrival(rank: int, connection: Connection) -> None:
            self.arrived.put((connection, rank, None))

        self._admissions = Admissions(places, self.wire.timeout, on_arrival)

    def offer(self, peer: int) -> None:
        """The peer is lost, and another process may have its place. A place that is offered
        already may have been given to a process by now, and is not offered twice."""
        if self._admissions is not None and peer not in self._offered:
            self._offered.add(peer)
            self._admissions.offer(peer)

    @property
    def sent_bytes(self) -> int:
        newer = sum(connection.wire.sent_bytes for connection in self._newer.values())
        return self.wire.sent_bytes + self._sent_before + newer

    def send(self, peer: int, kind: Kind, payload: Bytes = NOTHING, part: int = 0) -> None:
        """As Transport.send, to the process that has the place now."""
        self._of(peer).wire.send(peer, kind, payload, part)

    def flush(self, peer: int, keep: int = 0) -> None:
        """As Transport.flush."""
        self._of(peer).wire.flush(peer, keep)

    def expel(self, peer: int) -> None:
        """Tells a peer that was lost, and lives, that the others went on without it."""
        self._expel(self._of(peer), peer)

    def take(self, awaited: Sequence[int]) -> Message:
        """The next message of any peer.

        Raises LostError naming the peer whose connection broke, or the `awaited` peers if nothing
        comes for the timeout; DamagedMessageError and PeerMismatchError as Transport.receive. Any
        other exception of a thread that receives is raised as it is.
        """
        start = time.perf_counter()
        try:
            while True:
                source, peer, item = self._next()
                if item is None:
                    self._take_over(source, peer)
                elif source is self._of(peer):
                    break
                elif isinstance(item, Message) and source is self:
                    # It lives, and another process has its place. (A source that is not this link
                    # was told in `_take_over`, and its wire is gone.)
                    self._expel(source, peer)
        except queue.Empty:
            why = f"waited {self.wire.timeout:g} s"
            raise LostError(tuple(awaited), True, why) from None
        finally:
            self.wire_seconds += time.perf_counter() - start
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # it has this frame, and would keep the connection
        return item

    def _next(self) -> tuple[Connection, int, Message | Exception | None]:
        try:
            return self.wire.take_from(self.arrived, self.wire.timeout)
        except queue.Empty:
            # If this process was stopped, its readers have not had a chance yet.
            return self.wire.take_from(self.arrived, _GRACE_SECONDS)

    @contextlib.contextmanager
    def reading(self, message: Message) -> Iterator[None]:
        """A ValueError inside, about the message's content, becomes one that names its sender."""
        try:
            yield
        except ValueError as error:
            raise PeerMismatchError(
                f"rank {self.rank} can't read a message ({message.kind.label}) of rank "
                f"{message.peer}: {error}; the two ranks have different versions of gradwire, or "
                f"rank {message.peer} is out of order",
                (message.peer,),
            ) from error

    def close(self) -> None:
        """Leaves without an error, when all messages have arrived and none will come."""
        if self.error is None:
            self.leave(CommunicationError("the ServerOptimizer was closed"))

    def drop_with(self, owner: object) -> None:
        """When `owner` is dropped, and at exit, leaves without a message: the peers see that this
        rank is gone."""
        self.finish_with(owner, self._drop, partial(join, self.readers, ABORT_SECONDS))

    def abandon(self, error: Exception) -> None:
        super().abandon(error)
        for connection in self._newer.values():
            connection.abandon(error)

    def disconnect(self) -> bool:
        admissions, self._admissions = self._admissions, None
        ended = admissions is None or admissions.stop()
        newer = list(self._newer.values()) + self._not_taken()
        for connection in newer:
            connection.wire.abort()
        ended &= super().disconnect()  # ends the readers of all
        for connection in newer:
            connection.disconnect()
        return ended

    def _not_taken(self) -> list[Connection]:
        """Connections of processes of which nothing will be taken."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                source, _, item = self.arrived.get_nowait()
                if item is None:
                    found.append(source)
        return found

    def _judge(self, raised: Exception, doing: str) -> Exception:
        error = super()._judge(raised, doing)
        for connection in self._newer.values():
            connection.board.announce(error)
        return error

    def _drop(self) -> None:
        self.abandon(CommunicationError("the ServerOptimizer was dropped"))
        self.board.warn_of_threads(self.disconnect())

    def _take_over(self, newer: Connection, peer: int) -> None:
        """The process behind this connection has the peer's place from now on."""
        self._offered.discard(peer)
        older = self._newer.get(peer)
        self._newer[peer] = newer
        if older is not None:
            self._expel(older, peer)  # it may only have slept
            self._sent_before += older.wire.sent_bytes
            older.disconnect()
        self.readers[:] = [thread for thread in self.readers if thread.is_alive()]
        self._start_reader(newer, peer)

    def _of(self, peer: int) -> Connection:
        return self._newer.get(peer, self)

    def _expel(self, source: Connection, peer: int) -> None:
        with contextlib.suppress(LostError):
            source.wire.send(peer, Kind.EXPELLED)

    def _start_reader(self, source: Connection, peer: int) -> None:
        def put(found: Received | Message | Exception) -> None:
            at = time.perf_counter()
            if isinstance(found, Received):
                found = Message(peer, found.kind, found.payload, found.part, at)
            self.arrived.put((source, peer, found))

        self.readers += source.wire.listen(peer, self._limits, put)
