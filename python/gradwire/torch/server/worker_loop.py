"""A worker's loop: it pushes gradients to the servers, and pulls the versions that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradwire._core import WorkerSide
from gradwire.torch.link.errors import CommunicationError
from gradwire.torch.link.wire import Kind, WireBrokenError
from gradwire.torch.server.group_options import encode_options
from gradwire.torch.server.inbox import Message
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink


@dataclass
class Working:
    """One worker. Its methods are called inside `ServerLink.guard`."""

    link: ServerLink
    exchange: WorkerSide
    part: ServerPart
    servers: range
    _sent_options: bytes = b""
    _over: set[int] = field(default_factory=set)  # servers that make no further version

    def step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Pushes the gradients, and waits until the next ones may be computed."""
        self.link.flush()
        self.part.fill_with_gradients()
        self._send_options(groups)
        self.exchange.start(self.part.bucket, step)
        for server, push in self.exchange.outgoing():
            self.link.send(server, Kind.PACKET, push)
        while not self.exchange.done:
            waiting = self.exchange.awaiting()
            self._check_not_over(waiting)
            self._take(self.link.take(waiting))
        while (message := self.link.take_ready()) is not None:
            self._take(message)

    def receive_models(self, on_version: Callable[[int, int], None] | None) -> None:
        """Receives every server's model, and calls `on_version` with the server and its version.

        `on_version` is None when the worker leaves. Other messages that are still on their way are
        ignored then.
        """
        missing = set(self.servers)
        while missing:
            message = self.link.take(sorted(missing))
            if isinstance(message, WireBrokenError):
                if message.peer in missing:
                    raise message
                continue  # that server has left
            if on_version is None and message.kind in (Kind.PACKET, Kind.OVER, Kind.CATCH_UP):
                continue
            if message.kind is not Kind.MODEL or message.peer not in missing:
                raise self.link.refuse(message)
            version = self.part.load_model(message.peer, message.payload)
            if on_version is not None:
                on_version(message.peer, version)
            missing.discard(message.peer)

    def leave(self) -> None:
        """Waits until the other workers leave, too, and takes over the servers' models."""
        for server in self.servers:
            self.link.send(server, Kind.LEAVE)
        self.receive_models(None)

    def _send_options(self, groups: list[dict[str, Any]]) -> None:
        options = encode_options(groups)
        if options.tobytes() == self._sent_options:
            return
        self._sent_options = options.tobytes()
        for server in self.servers:
            self.link.send(server, Kind.OPTIONS, options)

    def _take(self, message: Message | WireBrokenError) -> None:
        if isinstance(message, WireBrokenError):
            raise message
        if message.kind is Kind.OVER:
            self._over.add(message.peer)
        elif message.kind is Kind.CATCH_UP:
            version = self.part.load_model(message.peer, message.payload)
            self.exchange.catch_up(message.peer, version)
        elif message.kind is Kind.PACKET:
            self.exchange.receive(message.peer, message.payload)
        else:
            raise self.link.refuse(message)

    def _check_not_over(self, waiting: list[int]) -> None:
        over = self._over.intersection(waiting)
        if over:
            raise CommunicationError(
                f"rank {min(over)} makes no further version, because too few workers are left; "
                "train with `while optimizer.version < steps`, so that all leave at one version",
                tuple(sorted(over)),
            )
