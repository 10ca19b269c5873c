"""What connects workers and servers: one process group, one inbox, and what becomes of an error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch.distributed as dist

from gradwire._core import ServerExchange
from gradwire.torch.engine import agree
from gradwire.torch.errors import CommunicationError, PeerMismatchError
from gradwire.torch.failure import FailureBoard
from gradwire.torch.inbox import Inbox, Message
from gradwire.torch.thread import ABORT_SECONDS, warn_of_thread
from gradwire.torch.wire import Bytes, Kind, Traffic, Wire, WireBrokenError

CONNECT_SECONDS = 60.0  # processes may start that much apart, however small the timeout is
_NOTHING = np.empty(0, dtype=np.uint8)


class LostError(Exception):
    """These peers are gone, or were silent for the timeout."""

    def __init__(self, peers: tuple[int, ...], silent: bool, why: str) -> None:
        super().__init__(why)
        self.peers = peers
        self.silent = silent


class ServerLink:
    """Lasts from the comparison of setups to `close`, or to the first error, which ends it."""

    def __init__(
        self, group: dist.ProcessGroup, timeout: float, exchange: ServerExchange, peers: list[int]
    ) -> None:
        """`group`: a Gloo group that nobody else uses. `peers`: those that send messages here."""
        self.rank = group.rank()
        self.world_size = group.size()
        self.error: Exception | None = None
        self.wire_seconds = 0.0  # that `take` waited
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = group
        self._board = FailureBoard(group.get_group_store(), group.rank(), group.size())
        self._wire = Wire(group, max(timeout, CONNECT_SECONDS))
        self._inbox: Inbox | None = None
        with self.guard("comparing setups"):
            agree(exchange, self._wire)
        self._wire.timeout = timeout
        self._inbox = Inbox(self._wire, peers)

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

        Raises LostError naming those that are awaited if nothing comes for the timeout.
        """
        start = time.perf_counter()
        assert self._inbox is not None, "setups are compared"
        message = self._inbox.take(self._timeout)
        self.wire_seconds += time.perf_counter() - start
        if message is None:
            raise LostError(tuple(awaited), True, f"waited {self._timeout:g} s")
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

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """What is raised inside ends the link; connections that broke become who is to blame."""
        if self.error is not None:
            raise self.error
        try:
            yield
        except (LostError, WireBrokenError) as lost:
            peers = lost.peers if isinstance(lost, LostError) else (lost.peer,)
            why = str(lost).splitlines()[0]
            when = f"rank {self.rank}, {doing}: {why}"
            closed = () if lost.silent else self._wire.closed_peers()
            error = self._board.diagnose(peers, lost.silent, when, closed)
            self._end(error)
            raise error from lost
        except Exception as error:
            self._board.announce(error)
            self._end(error)
            raise

    def close(self) -> None:
        """Leaves in peace, when what was sent has arrived and nothing more will come."""
        if self.error is None:
            self.error = CommunicationError("the ServerOptimizer was closed")
            self._board.leave()
            self._disconnect()

    def abandon(self) -> None:
        """Leaves without a word: to the others this rank is gone. Nothing is left but to exit."""
        self._board.hurry()
        if self.error is None:
            self.error = CommunicationError("the ServerOptimizer was dropped")
        ended = self._disconnect()
        if not (self._board.join(ABORT_SECONDS) and ended):
            warn_of_thread(self.rank)

    def _end(self, error: Exception) -> None:
        self.error = error
        # Only now: whoever sees the connection close must find this rank's report in the store.
        self._disconnect()
        culprits = error.ranks if isinstance(error, CommunicationError) else ()
        self._board.linger(frozenset(culprits))

    def _disconnect(self) -> bool:
        """False: a thread of the inbox does not end though its connection is closed."""
        self._wire.abort()
        ended = self._inbox is None or self._inbox.join(ABORT_SECONDS)
        self._wire.drop()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            # The program may have destroyed all its groups already.
            with contextlib.suppress(AssertionError, RuntimeError, ValueError):
                dist.destroy_process_group(group)
        return ended
