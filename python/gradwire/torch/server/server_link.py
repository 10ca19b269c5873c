"""What connects workers and servers: a connection, an inbox, and the handling of errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch.distributed as dist

from gradwire._core import Exchange
from gradwire.torch.link.connection import Connection, LostError
from gradwire.torch.link.engine import agree
from gradwire.torch.link.errors import CommunicationError, PeerMismatchError
from gradwire.torch.link.wire import Bytes, Kind, Traffic, WireBrokenError
from gradwire.torch.server.inbox import Inbox, Message

_CONNECT_SECONDS = 60.0  # processes may start that much apart, however small the timeout is
_NOTHING = np.empty(0, dtype=np.uint8)


class ServerLink:
    """Lasts from the comparison of setups to `close`, or to the first error, which ends it."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        exchange: Exchange,
        peers: list[int],
    ) -> None:
        """`peers`: the ranks that send messages here."""
        self.wire_seconds = 0.0  # that `take` waited
        self._connection = Connection(process_group, timeout, _CONNECT_SECONDS)
        self.rank = self._connection.rank
        self._wire = self._connection.wire
        self._inbox: Inbox | None = None
        with self.guard("comparing setups"):
            agree(exchange, self._wire)
        self._wire.timeout = timeout
        self._inbox = Inbox(self._wire, peers)
        self._connection.readers = self._inbox.threads

    @property
    def error(self) -> Exception | None:
        """What ended the link; None while it lasts."""
        return self._connection.error

    @property
    def traffic(self) -> Traffic:
        return self._wire.traffic

    def send(self, peer: int, kind: Kind, payload: Bytes = _NOTHING) -> None:
        """`payload` must not change any more."""
        self._wire.send(peer, kind, payload)

    def flush(self, peer: int | None = None, keep: int = 0) -> None:
        self._wire.flush(peer, keep)

    def take(self, awaited: Sequence[int]) -> Message | WireBrokenError:
        """The next message of any peer, or which connection broke.

        Raises LostError naming the `awaited` peers if nothing comes for the timeout.
        """
        start = time.perf_counter()
        assert self._inbox is not None, "setups are compared"
        message = self._inbox.take(self._wire.timeout)
        self.wire_seconds += time.perf_counter() - start
        if message is None:
            raise LostError(tuple(awaited), True, f"waited {self._wire.timeout:g} s")
        return message

    def take_ready(self) -> Message | WireBrokenError | None:
        assert self._inbox is not None, "setups are compared"
        return self._inbox.take_ready()

    def refuse(self, message: Message) -> PeerMismatchError:
        return PeerMismatchError(
            f"rank {message.peer} sent a {message.kind.name.lower()} for which rank {self.rank} "
            "has no use now",
            (message.peer,),
        )

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """See Connection.guard."""
        return self._connection.guard(doing)

    def close(self) -> None:
        """Leaves in peace, when everything sent has arrived and nothing more will come."""
        if self.error is None:
            self._connection.leave(CommunicationError("the ServerOptimizer was closed"))

    def abandon(self) -> None:
        """Leaves without a message: to the others this rank is gone. Nothing comes after this."""
        self._connection.abandon(CommunicationError("the ServerOptimizer was dropped"))
        self._connection.warn_of_threads(self._connection.disconnect())
