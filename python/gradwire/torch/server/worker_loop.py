"""A worker's loop: it pushes gradients to the servers, and pulls the versions that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gradwire._core import WorkerSide
from gradwire.torch.checkpoint import held_back
from gradwire.torch.errors import CommunicationError, ExpelledError, PeerMismatchError
from gradwire.torch.network.transport import TEXT_BYTES, Kind, LostError
from gradwire.torch.parameters import Options
from gradwire.torch.server.buffers import ModelBuffers
from gradwire.torch.server.group_options import (
    apply_options,
    encode_options,
    options_message,
    read_options,
    read_unused,
    read_version,
    unused_message,
    version_message,
)
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import Message, ServerLink
from gradwire.torch.server.side import Side


class Working(Side[WorkerSide]):
    """One worker."""

    def __init__(
        self,
        parts: dict[int, ServerPart],
        rank: int,
        servers: range,
        buffers: ModelBuffers | None,
        optimizer: Optimizer | None,
        **options: Any,
    ) -> None:
        """optimizer: with pulls="gradients", that which steps the model here.
        `options`: further arguments of WorkerSide."""

        def note_average(server: int, version: int) -> None:
            self._averaged.append(server)

        super().__init__(
            parts,
            {
                n: WorkerSide(
                    p.layout, rank, p.apply if optimizer is None else note_average, **options
                )
                for n, p in parts.items()
            },
        )
        self._rank = rank
        self._optimizer = optimizer
        self._averaged: list[int] = []  # servers whose averages are in the bucket
        self._unused: set[str] = set()  # tensors that no worker has a gradient of
        self._buffers = buffers
        self._own_buffers = buffers if buffers is not None and buffers.sender == rank else None
        self.peers = servers
        # When each part's last pull arrived, and when it was applied, by time.perf_counter.
        self.arrivals: dict[int, tuple[float, float]] = {}
        self._sent_options = b""
        self._over: set[int] = set()  # servers that make no further version

    @property
    def version(self) -> int:
        """The version of the part and server that are furthest behind."""
        return min(e.version(server) for e in self.exchanges.values() for server in e.servers)

    def _names(self, part: ServerPart) -> Iterable[str]:
        return part.names

    def named_model(self) -> dict[str, torch.Tensor]:
        return {n: t for part in self.parts.values() for n, t in part.named_replica().items()}

    def begin(
        self, link: ServerLink, version: int, replica: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Receives the servers' model and their version. With pulls="gradients" it must be
        `version`, else PeerMismatchError: the optimizer's state here is of that version.

        replica: with this model the worker goes on, and the servers send none."""
        self._begin_listening(link)

        def on_model(number: int, server: int, servers_version: int) -> None:
            if self._optimizer is not None and servers_version != version:
                raise PeerMismatchError(
                    f"rank {server} goes on from version {servers_version}, rank {self._rank} from "
                    f"{version}: with pulls='gradients' every rank loads the state that it saved",
                    (server,),
                )
            self.exchanges[number].set_version(server, servers_version)

        with link.guard("waiting for the model"):
            self._receive_models(Kind.MODEL, on_model)
        if replica is not None:
            for part in self.parts.values():
                part.load_replica(replica)

    def join(self, link: ServerLink, groups: list[Options]) -> None:
        """Takes a free place: receives the model as the other workers have it, and the options of
        the last version, which it writes into `groups`.

        Servers may be at different versions. The first push is for the newest; what other servers
        lack until then is made without this worker.
        """
        self._begin_listening(link)
        begun: list[tuple[int, int, int]] = []  # version, part, server
        with link.guard("taking the place of another worker"):
            for server in self.peers:
                link.send(server, Kind.JOIN)
            options = self._receive_models(
                Kind.CATCH_UP,
                lambda number, server, version: begun.append((version, number, server)),
                groups,
            )
            first, _, newest = max(begun)
            if first not in options:
                raise PeerMismatchError(
                    f"rank {newest} sent a model of version {first}, and no options of it",
                    (newest,),
                )
            for version, number, server in begun:
                self.exchanges[number].set_version(server, version)
                self.exchanges[number].join(server, first, self.parts[number].bucket)
            for server in self.peers:
                link.send(server, Kind.JOIN, version_message(first))
            apply_options(groups, options[first])
            self.wait(self.parts)

    def _begin_listening(self, link: ServerLink) -> None:
        model = max(part.max_model_size for part in self.parts.values())
        limits = {Kind.MODEL: model, Kind.CATCH_UP: model, Kind.OPTIONS: TEXT_BYTES}
        if self._optimizer is not None:
            limits[Kind.UNUSED] = self._most_unused
        if self._buffers is not None:
            limits[Kind.BUFFERS] = self._buffers.nbytes
        self._listen(link, {**limits, Kind.OVER: 0, Kind.EXPELLED: 0})

    def step(self, step: int, groups: list[Options], factor: float) -> None:
        """Pushes all gradients times `factor`, and waits until the next ones may be computed."""
        self._averaged, self._unused = [], set()
        self.begin_step(groups, self.version)
        for number in self.parts:
            self.push(number, step, factor)
        self.wait(self.parts)
        self.take_arrived()
        self.wait(self.parts)  # one that came early waits for the versions before it
        if self._optimizer is not None and self._averaged:
            (part,) = self.parts.values()
            part.step_replica(self._optimizer, self._averaged, self._unused)

    def begin_step(self, groups: list[Options], version: int) -> None:
        """Sends what goes before the pushes for this version: the options, if they differ from
        those sent last, and the buffers, if it is time."""
        for server in self.peers:
            self.link.flush(server)
        if self._own_buffers is not None and version % self._own_buffers.every == 0:
            self._send_buffers(self._own_buffers)
        options = encode_options(groups)
        if options == self._sent_options:
            return
        self._sent_options = options
        for server in self.peers:
            self.link.send(server, Kind.OPTIONS, options_message(version, options))

    def sent_options_are(self, groups: list[Options]) -> bool:
        return encode_options(groups) == self._sent_options

    def _send_buffers(self, buffers: ModelBuffers) -> None:
        self.link.send(buffers.keeper, Kind.BUFFERS, buffers.pack())

    def push(self, number: int, step: int, factor: float = 1.0) -> None:
        """Pushes the gradients of a part, times `factor`."""
        part, exchange = self.parts[number], self.exchanges[number]
        part.fill_with_gradients(factor)
        unused = part.unused()
        if unused:
            message = unused_message(exchange.next_version, unused, len(part.names))
            for server in exchange.servers:
                self.link.send(server, Kind.UNUSED, message, number)
        # What is owed to these waits for a step that has a gradient.
        with held_back(exchange, part.names_at(unused)):
            exchange.start(part.bucket, step)
        self._send_all(number)

    def _send_all(self, number: int) -> None:
        for server, message in self.exchanges[number].outgoing():
            self.link.send(server, Kind.PACKET, message, number)

    def wait(self, numbers: Iterable[int]) -> None:
        """Waits until the next gradients of these parts may be computed."""
        for number in numbers:
            while not self.exchanges[number].done:
                waiting = self.exchanges[number].awaiting()
                self._check_not_over(waiting)
                self._take(waiting)

    def take_arrived(self) -> None:
        """Takes what has arrived, and waits for nothing."""
        while not self.link.arrived.empty():
            self._take(())

    def leave(self) -> None:
        """Waits until the other workers leave, and takes over the servers' models."""
        if self._own_buffers is not None:
            self._send_buffers(self._own_buffers)
        for server in self.peers:
            self.link.send(server, Kind.LEAVE)
        self._receive_models(Kind.MODEL, None)

    def _receive_models(
        self,
        kind: Kind,
        on_model: Callable[[int, int, int], None] | None,
        groups: Sequence[Options] = (),
    ) -> dict[int, list[Options]]:
        """Receives all parts from all their servers in messages of this kind, and calls `on_model`
        with the part's number, the server and its version. Returns the options for `groups` that
        came with them, by version.

        `on_model` is None when the worker leaves. Other messages that are still on their way are
        ignored then.
        """
        exchanges = self.exchanges.items()
        missing = {(kind, n, server) for n, e in exchanges for server in e.servers}
        if self._buffers is not None:
            missing.add((Kind.BUFFERS, 0, self._buffers.keeper))
        if kind is Kind.CATCH_UP:
            missing |= {(Kind.OPTIONS, 0, server) for server in self.peers}
        options = {}
        while missing:
            silent = {server for _, _, server in missing}
            try:
                message = self.link.take(sorted(silent))
            except LostError as lost:
                if silent.isdisjoint(lost.peers):
                    continue  # that server has left
                raise
            if on_model is None and message.kind in (Kind.PACKET, Kind.OVER, Kind.CATCH_UP):
                continue
            if (message.kind, message.part, message.peer) not in missing:
                raise self._refuse(message)
            missing.discard((message.kind, message.part, message.peer))
            with self.link.reading(message):
                if message.kind is Kind.BUFFERS:
                    assert self._buffers is not None
                    self._buffers.load(message.payload)
                    continue
                if message.kind is Kind.OPTIONS:
                    version = read_version(message.payload)
                    options[version] = read_options(message.payload, groups)
                    continue
                version = self.parts[message.part].load_model(message.peer, message.payload)
            if on_model is not None:
                on_model(message.part, message.peer, version)
        return options

    def _take(self, waiting: Sequence[int]) -> None:
        """Handles one message."""
        message = self.link.take(waiting)
        number = message.part
        if message.kind is Kind.OVER:
            self._over.add(message.peer)
        elif message.kind is Kind.CATCH_UP and number in self.parts:
            with self.link.reading(message):
                version = self.parts[number].load_model(message.peer, message.payload)
            self.exchanges[number].catch_up(message.peer, version)
        elif message.kind is Kind.UNUSED and number in self.parts:
            with self.link.reading(message):
                _, places = read_unused(message.payload, len(self.parts[number].names))
            self._unused = self.parts[number].names_at(places)
        elif message.kind is Kind.PACKET and number in self.parts:
            exchange = self.exchanges[number]
            exchange.receive(message.peer, message.payload)
            self._send_all(number)  # if these were scales: the push
            self.arrivals[number] = (message.at, time.perf_counter())
            self._note_non_finite(number, exchange.version(message.peer) - 1)
        else:
            raise self._refuse(message)

    def _refuse(self, message: Message) -> CommunicationError:
        """The error for a message that is not for a worker, or not now."""
        if message.kind is not Kind.EXPELLED:
            return self.link.refuse(message)
        return ExpelledError(
            f"rank {self._rank} was taken for dead: it sent nothing while rank {message.peer} "
            "waited for it (timeout), or another process has its place. The others went on "
            "without it. With store=, a new process may take a free place",
            (self._rank,),
        )

    def _check_not_over(self, waiting: Sequence[int]) -> None:
        over = self._over.intersection(waiting)
        if over:
            raise CommunicationError(
                f"rank {min(over)} makes no further version, because too few workers are left; "
                "train with `while optimizer.version < steps`, so that all leave at one version",
                tuple(sorted(over)),
            )
