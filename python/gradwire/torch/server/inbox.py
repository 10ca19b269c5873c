"""Messages of several peers, in the order in which they come.

Gloo cannot tell which of several receives is done: `is_completed()` is false until somebody waits,
and a receive from any source does not notice that a peer is gone. So one thread waits for each
peer. It waits without a timeout: a Gloo wait that times out closes all connections of its group,
and a slow peer must not close those of the others.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from gradwire.torch.link.wire import Bytes, Kind, Wire, WireBrokenError

_ENDLESS = 365 * 86400.0


@dataclass(frozen=True)
class Message:
    peer: int
    kind: Kind
    payload: Bytes


class Inbox:
    def __init__(self, wire: Wire, peers: list[int]) -> None:
        self._arrived: queue.SimpleQueue[Message | WireBrokenError] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(
                target=self._read, args=(wire, peer), name=f"gradwire-{peer}", daemon=True
            )
            for peer in peers
        ]
        for thread in self.threads:
            thread.start()

    def take(self, seconds: float) -> Message | WireBrokenError | None:
        """The next message, or the connection that broke; None if nothing came for `seconds`."""
        try:
            return self._arrived.get(timeout=seconds)
        except queue.Empty:
            return None

    def take_ready(self) -> Message | WireBrokenError | None:
        """The same as `take`, without waiting."""
        try:
            return self._arrived.get_nowait()
        except queue.Empty:
            return None

    def _read(self, wire: Wire, peer: int) -> None:
        kind = Kind.HELLO
        while kind is not Kind.LEAVE:
            try:
                kind, payload = wire.receive(peer, _ENDLESS)
            except WireBrokenError as broken:
                self._arrived.put(broken)
                return
            except (AssertionError, KeyError):
                return  # the wire was dropped meanwhile
            self._arrived.put(Message(peer, kind, payload.copy()))
            if kind is not Kind.LEAVE:
                wire.release(peer)
