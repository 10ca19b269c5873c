"""A worker's loop: it pushes gradients to the servers, and pulls the versions that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire._core import Layout, WorkerSide
from gradwire.torch.link.errors import CommunicationError
from gradwire.torch.link.wire import Kind, LostError
from gradwire.torch.server.group_options import encode_options
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink


class Working:
    """One worker. Its methods are called inside `ServerLink.guard`."""

    link: ServerLink

    def __init__(
        self, layout: Layout, part: ServerPart, rank: int, servers: range, **options: Any
    ) -> None:
        """`options`: further arguments of WorkerSide."""
        self.exchange = WorkerSide(layout, rank, part.apply, **options)
        self.part = part
        self.peers = servers
        self.values_pulled = 0
        self._sent_options = b""
        self._over: set[int] = set()  # servers that make no further version

    @property
    def version(self) -> int:
        return min(self.exchange.version(server) for server in self.peers)

    def begin(self, link: ServerLink, version: int) -> None:
        """Receives the servers' model and their version; `version` is not used."""
        self.link = link
        with link.guard("waiting for the model"):
            self._receive_models(self.exchange.set_version)

    def step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Pushes the gradients, and waits until the next ones may be computed."""
        self.link.wire.flush()
        self.part.fill_with_gradients()
        self._send_options(groups)
        self.exchange.start(self.part.bucket, step)
        for server, push in self.exchange.outgoing():
            self.link.wire.send(server, Kind.PACKET, push)
        while not self.exchange.done:
            waiting = self.exchange.awaiting()
            self._check_not_over(waiting)
            self._take(waiting)
        while not self.link.arrived.empty():
            self._take(())

    def leave(self) -> None:
        """Waits until the other workers leave, and takes over the servers' models."""
        for server in self.peers:
            self.link.wire.send(server, Kind.LEAVE)
        self._receive_models(None)

    def _receive_models(self, on_version: Callable[[int, int], None] | None) -> None:
        """Receives every server's model, and calls `on_version` with the server and its version.

        `on_version` is None when the worker leaves. Other messages that are still on their way are
        ignored then.
        """
        missing = set(self.peers)
        while missing:
            try:
                message = self.link.take(sorted(missing))
            except LostError as lost:
                if missing.isdisjoint(lost.peers):
                    continue  # that server has left
                raise
            if on_version is None and message.kind in (Kind.PACKET, Kind.OVER, Kind.CATCH_UP):
                continue
            if message.kind is not Kind.MODEL or message.peer not in missing:
                raise self.link.refuse(message)
            version = self.part.load_model(message.peer, message.payload)
            if on_version is not None:
                on_version(message.peer, version)
            missing.discard(message.peer)

    def _send_options(self, groups: list[dict[str, Any]]) -> None:
        options = encode_options(groups)
        if options.tobytes() == self._sent_options:
            return
        self._sent_options = options.tobytes()
        for server in self.peers:
            self.link.wire.send(server, Kind.OPTIONS, options)

    def _take(self, waiting: Sequence[int]) -> None:
        """Handles one message."""
        message = self.link.take(waiting)
        if message.kind is Kind.OVER:
            self._over.add(message.peer)
        elif message.kind is Kind.CATCH_UP:
            version = self.part.load_model(message.peer, message.payload)
            self.exchange.catch_up(message.peer, version)
        elif message.kind is Kind.PACKET:
            self.values_pulled += self.part.numel(message.peer)
            self.exchange.receive(message.peer, message.payload)
        else:
            raise self.link.refuse(message)

    def _check_not_over(self, waiting: Sequence[int]) -> None:
        over = self._over.intersection(waiting)
        if over:
            raise CommunicationError(
                f"rank {min(over)} makes no further version, because too few workers are left; "
                "train with `while optimizer.version < steps`, so that all leave at one version",
                tuple(sorted(over)),
            )
