"""Connects workers and servers: the messages of different peers come in any order.

Gloo cannot tell which of several receives is done: `is_completed()` is false until somebody waits,
and a receive from any source does not notice that a peer is gone. So one thread waits for each
peer. It waits without a timeout: a Gloo wait that times out closes all connections of its group,
and a slow peer must not close those of the others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from gradwire.torch.link.connection import Connection
from gradwire.torch.link.engine import agree
from gradwire.torch.link.errors import (
    CommunicationError,
    DamagedMessageError,
    PeerMismatchError,
)
from gradwire.torch.link.thread import ABORT_SECONDS, join
from gradwire.torch.link.wire import Bytes, Kind, LostError

_CONNECT_SECONDS = 60.0  # processes may start that much apart, however small the timeout is
_ENDLESS = 365 * 86400.0


@dataclass(frozen=True)
class Message:
    peer: int
    kind: Kind
    payload: Bytes
    part: int
    at: float  # when it arrived, by time.perf_counter


class ServerLink(Connection):
    """Lasts from the comparison of setups to `close`, or to the first error, which ends it."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        description: str,
        peers: Sequence[int],
    ) -> None:
        """`description`: of the setup, equal on all ranks. `peers`: ranks that send to this one."""
        super().__init__(process_group, timeout, _CONNECT_SECONDS)
        self.wire_seconds = 0.0  # that `take` waited
        self.arrived: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        with self.guard("comparing setups"):
            agree(description, self.wire)
        self.wire.timeout = timeout
        self.readers = [
            threading.Thread(target=self._read, args=(p,), name=f"gradwire-{p}", daemon=True)
            for p in peers
        ]
        for thread in self.readers:
            thread.start()

    def take(self, awaited: Sequence[int]) -> Message:
        """The next message of any peer.

        Raises LostError naming the peer whose connection broke, or the `awaited` peers if nothing
        comes for the timeout; DamagedMessageError naming the sender. Any other exception of a
        thread that receives is raised as it is.
        """
        start = time.perf_counter()
        message: Message | Exception
        try:
            message = self.arrived.get(timeout=self.wire.timeout)
        except queue.Empty:
            message = LostError(tuple(awaited), True, f"waited {self.wire.timeout:g} s")
        self.wire_seconds += time.perf_counter() - start
        if isinstance(message, Exception):
            raise message
        return message

    def refuse(self, message: Message) -> PeerMismatchError:
        return PeerMismatchError(
            f"rank {message.peer} sent a message ({message.kind.words}) for which rank {self.rank} "
            "has no use now",
            (message.peer,),
        )

    def close(self) -> None:
        """Leaves without an error, when all messages have arrived and none will come."""
        if self.error is None:
            self.leave(CommunicationError("the ServerOptimizer was closed"))

    def drop_with(self, owner: object) -> None:
        """When `owner` is dropped, and at exit, leaves without a message: the peers see that this
        rank is gone."""
        self.finish_with(owner, self._drop, partial(join, self.readers, ABORT_SECONDS))

    def _drop(self) -> None:
        self.abandon(CommunicationError("the ServerOptimizer was dropped"))
        self.warn_of_threads(self.disconnect())

    def _read(self, peer: int) -> None:
        kind = Kind.HELLO
        try:
            while kind is not Kind.LEAVE:
                kind, payload, part = self.wire.receive(peer, _ENDLESS)
                self.arrived.put(Message(peer, kind, payload.copy(), part, time.perf_counter()))
                if kind is not Kind.LEAVE:
                    self.wire.release(peer)
        except Exception as error:  # nobody takes it where the wire was dropped meanwhile
            self.arrived.put(error)
