"""A worker's loop: it pushes gradients to the servers, and pulls the versions that they make."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch.optim import Optimizer

from gradwire.torch.checkpoint import StateDict, held_back, residuals_of
from gradwire.torch.errors import CommunicationError, ExpelledError, PeerMismatchError
from gradwire.torch.network.transport import TEXT_BYTES, Kind, LostError
from gradwire.torch.parameters import Options
from gradwire.torch.server.group_options import (
    apply_options,
    encode_options,
    read_options,
    read_unused,
    read_version,
    unused_message,
    version_message,
)
from gradwire.torch.server.model_parts import WorkerPart
from gradwire.torch.server.server_link import Message, ServerLink
from gradwire.torch.server.server_plan import ServerPlan
from gradwire.torch.server.server_settings import ANY
from gradwire.torch.server.side import Handlers, Side


class Working(Side[WorkerPart]):
    """One worker. With pulls="gradients", the optimizer steps the model here."""

    role = "worker"
    moved = ("push_bytes", "pull_bytes_received", "values_pushed", "values_received")

    def __init__(self, plan: ServerPlan, rank: int, optimizer: Optimizer) -> None:
        parts = [WorkerPart(i, part, rank, plan) for i, part in enumerate(plan.parts)]
        servers = range(plan.settings.workers, plan.settings.world_size)
        super().__init__(plan, rank, optimizer, servers, parts)
        # When each part's last pull arrived, and when it was applied, by time.perf_counter.
        self.arrivals: dict[int, tuple[float, float]] = {}
        self._sent_options = b""
        self._over: set[int] = set()  # servers that make no further version
        # Whether the next gradient is one more for the same version; None: it is not known yet.
        self._again: bool | None = None
        self._in_use: set[int] = set()  # parts that must not change now
        self._held: list[Message] = []  # for these
        self._replica: dict[str, torch.Tensor] = {}  # of a loaded state, until `begin`

    @property
    def version(self) -> int:
        exchanges = [part.exchange for part in self.parts.values()]
        return min(each.version(server) for each in exchanges for server in each.servers)

    @property
    def version_ahead(self) -> int:
        """The version that `version` has reached when `wait` has returned for all parts."""
        return max(self.version, self.version_to_push - self.settings.staleness)

    @property
    def version_to_push(self) -> int:
        """The version for which the next gradient is pushed: that of the parts furthest behind."""
        exchanges = [part.exchange for part in self.parts.values()]
        return min(e.next_version + (e.has_turn and not self._again) for e in exchanges)

    @property
    def has_state(self) -> bool:
        return bool(self._replica)

    def load_state(self, state: StateDict, of_optimizer: StateDict) -> None:
        self._optimizer.load_state_dict(of_optimizer)
        for part in self.parts.values():
            for server in part.exchange.servers:
                part.exchange.set_version(server, int(state["version"]))
        self._load_residuals(residuals_of(state))
        self._replica = state["model"]

    def begin(self, link: ServerLink) -> None:
        """With pulls="gradients" the servers' version must be that of the loaded state, else
        PeerMismatchError: the optimizer's state here is of that version."""
        own = self.version
        self._begin_listening(link)
        with link.guard("waiting for the model"):
            for part, server, version in self._receive_models(Kind.MODEL):
                if self.settings.pulls_gradients and version != own:
                    raise PeerMismatchError(
                        f"rank {server} goes on from version {version}, rank {self.rank} from "
                        f"{own}: with pulls='gradients' every rank loads the state that it saved",
                        (server,),
                    )
                part.exchange.set_version(server, version)
        if link.all_go_on:
            for part in self.parts.values():
                part.load_named(self._replica)
        self._replica = {}

    def join(self, link: ServerLink) -> None:
        """Takes a free place: receives the model as the other workers have it, and the options of
        the last version.

        Servers may be at different versions. The first push is for the newest; what other servers
        lack until then is made without this worker.
        """
        self._begin_listening(link)
        options: dict[int, list[Options]] = {}
        with link.guard("taking the place of another worker"):
            for server in self.peers:
                link.send(server, Kind.JOIN)
            begun = list(self._receive_models(Kind.CATCH_UP, options))
            first, newest = max((version, server) for _, server, version in begun)
            if first not in options:
                raise PeerMismatchError(
                    f"rank {newest} sent a model of version {first}, and no options of it",
                    (newest,),
                )
            for part, server, version in begun:
                part.exchange.set_version(server, version)
                part.exchange.join(server, first, part.bucket)
            for server in self.peers:
                link.send(server, Kind.JOIN, version_message(first))
            apply_options(self._optimizer.param_groups, options[first])
            self.wait(self.parts)

    def _begin_listening(self, link: ServerLink) -> None:
        model = max(part.max_model_size for part in self.parts.values())
        handlers: Handlers = {
            Kind.PACKET: (self._most_packet, self._take_pull),
            Kind.CATCH_UP: (model, self._take_catch_up),
            Kind.OVER: (0, self._take_over),
            # These come where the worker waits for them, and not between.
            Kind.MODEL: (model, self._refuse),
            Kind.OPTIONS: (TEXT_BYTES, self._refuse),
            Kind.EXPELLED: (0, self._refuse),
        }
        if self.settings.pulls_gradients:
            handlers[Kind.UNUSED] = self._most_unused, self._take_unused
        if self._buffers is not None:
            handlers[Kind.BUFFERS] = self._buffers.nbytes, self._refuse
        self._listen(link, handlers)

    def step(self, step: int, factor: float) -> None:
        """Pushes all gradients times `factor`, and waits until the next ones may be computed."""
        self.begin_step(self.version)
        for part in self.parts.values():
            self.push(part, step, factor)
        self.release()
        self.wait(self.parts)
        self.take_arrived()
        self.wait(self.parts)  # one that came early waits for the versions before it
        if self.settings.pulls_gradients:
            for part in self.parts.values():
                part.step_replica(self._optimizer)

    def check_unedited(self, was_loaded: bool) -> None:
        """See WorkerPart."""
        for part in self.parts.values():
            part.check_unedited(was_loaded)

    def begin_step(self, version: int) -> None:
        """Sends what goes before the pushes for this version: the options, if they differ from
        those sent last, and the buffers, if it is time."""
        for server in self.peers:
            self.link.flush(server)
        if self._buffers is not None and version % self._buffers.every == 0:
            self._send_buffers()
        if not self.sent_options_hold():
            self._sent_options = encode_options(self._optimizer.param_groups)
            message = version_message(version, self._sent_options)
            self._send((server, Kind.OPTIONS, message, 0) for server in self.peers)

    def sent_options_hold(self) -> bool:
        return encode_options(self._optimizer.param_groups) == self._sent_options

    def _send_buffers(self) -> None:
        if self._buffers is not None and self._buffers.sender == self.rank:
            self.link.send(self._buffers.keeper, Kind.BUFFERS, self._buffers.pack())

    def push(self, part: WorkerPart, step: int, factor: float = 1.0) -> None:
        """Pushes the gradients of a part, times `factor`."""
        part.fill_with_gradients(factor)
        unused = part.unused()
        if unused or self.settings.turns == ANY:  # of several pushes, all must say it
            message = unused_message(part.exchange.next_version, unused, len(part.names))
            servers = part.exchange.servers
            self._send((server, Kind.UNUSED, message, part.number) for server in servers)
        # What is owed to these waits for a step that has a gradient.
        with held_back(part.exchange, part.names_at(unused)):
            part.exchange.start(part.bucket, step)
        self._send_packets(part)

    def hold_back(self, part: WorkerPart) -> None:
        """Pushes no gradients of a part that is ahead of others."""
        part.exchange.hold_back()
        self._send_packets(part)

    def wait(self, numbers: Iterable[int]) -> None:
        """Waits until the next gradients of these parts may be computed."""
        for number in numbers:
            part = self.parts[number]
            while not self._is_ready(part):
                waiting = part.exchange.awaiting() or part.exchange.servers
                self._check_not_over(waiting)
                self._handle(self.link.take(waiting))

    def wait_unless_over(self, numbers: Iterable[int]) -> None:
        """As `wait`, but ends where no further version is made."""
        for number in numbers:
            part = self.parts[number]
            while not self._is_ready(part) and self._over.isdisjoint(part.exchange.servers):
                self._handle(self.link.take(part.exchange.servers))

    def await_turn(self) -> None:
        """Waits until it is known whether the next gradient is one more for the same version, or
        that no further version is made."""
        exchanges = [part.exchange for part in self.parts.values()]
        while self.settings.turns == ANY and not self._over:
            if any(map(self._is_ready, self.parts.values())) and self._again is not None:
                return
            self._handle(self.link.take(sorted({s for e in exchanges for s in e.servers})))

    def _is_ready(self, part: WorkerPart) -> bool:
        """A turn for the same version is taken with all parts or with none: as soon as all have
        one, unless one of them has pulled the version before."""
        exchange = part.exchange
        if not exchange.done:
            return False
        if self._again is None:
            turns = [other.exchange.has_turn for other in self.parts.values()]
            if all(turns) or not exchange.has_turn:
                self._again = all(turns)
        return not exchange.has_turn or self._again is True

    def use(self, number: int) -> None:
        """Until `release` the part keeps its values, for which a gradient is computed."""
        self._in_use.add(number)

    def release(self) -> None:
        """All gradients are pushed: takes what has come for the parts in use."""
        self._again = None
        self._in_use.clear()
        held, self._held = self._held, []
        for message in held:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.part in self._in_use and message.kind in (Kind.PACKET, Kind.CATCH_UP):
            self._held.append(message)
        else:
            super()._handle(message)

    def take_arrived(self) -> None:
        """Takes what has arrived, and waits for nothing."""
        while not self.link.arrived.empty():
            self._handle(self.link.take(()))

    def leave(self) -> None:
        """Waits until the other workers leave, and takes over the servers' models."""
        self._send_buffers()
        for server in self.peers:
            self.link.send(server, Kind.LEAVE)
        still_on_their_way = (Kind.PACKET, Kind.OVER, Kind.CATCH_UP)
        for _ in self._receive_models(Kind.MODEL, ignored=still_on_their_way):
            pass

    def _receive_models(
        self,
        kind: Kind,
        options: dict[int, list[Options]] | None = None,
        ignored: Collection[Kind] = (),
    ) -> Iterator[tuple[WorkerPart, int, int]]:
        """Receives all parts from all their servers, in messages of this kind, and the buffers.
        Yields part, server and its version. options: gets those of the servers, by version."""
        parts = self.parts.values()
        missing = {(kind, p.number, server) for p in parts for server in p.exchange.servers}
        if self._buffers is not None:
            missing.add((Kind.BUFFERS, 0, self._buffers.keeper))
        if options is not None:
            missing |= {(Kind.OPTIONS, 0, server) for server in self.peers}
        while missing:
            silent = {server for _, _, server in missing}
            try:
                message = self.link.take(sorted(silent))
            except LostError as lost:
                if silent.isdisjoint(lost.peers):
                    continue  # that server has left
                raise
            if message.kind in ignored:
                continue
            if (message.kind, message.part, message.peer) not in missing:
                self._refuse(message)
            missing.discard((message.kind, message.part, message.peer))
            if message.kind is kind:
                yield self._load_model(message)
                continue
            with self.link.reading(message):
                if self._buffers is not None and message.kind is Kind.BUFFERS:
                    self._buffers.load(message.payload)
                elif options is not None:
                    version, groups = read_version(message.payload), self._optimizer.param_groups
                    options[version] = read_options(message.payload, groups)

    def _load_model(self, message: Message) -> tuple[WorkerPart, int, int]:
        part = self._part_of(message)
        with self.link.reading(message):
            return part, message.peer, part.load_model(message.peer, message.payload)

    def _take_pull(self, message: Message) -> None:
        part = self._part_of(message)
        part.exchange.receive(message.peer, message.payload)
        self._send_packets(part)  # if these were scales: the push
        self.arrivals[part.number] = (message.at, time.perf_counter())
        self._note_non_finite(part, part.exchange.version(message.peer) - 1)

    def _take_catch_up(self, message: Message) -> None:
        part, server, version = self._load_model(message)
        part.exchange.catch_up(server, version)

    def _take_unused(self, message: Message) -> None:
        part = self._part_of(message)
        with self.link.reading(message):
            _, places = read_unused(message.payload, len(part.names))
        part.unused_everywhere = part.names_at(places)

    def _take_over(self, message: Message) -> None:
        self._over.add(message.peer)

    def _refuse(self, message: Message) -> NoReturn:
        if message.kind is not Kind.EXPELLED:
            super()._refuse(message)
        raise ExpelledError(
            f"rank {self.rank} was taken for dead: it sent nothing while rank {message.peer} "
            "waited for it (timeout), or another process has its place. The others went on "
            "without it. With store=, a new process may take a free place",
            (self.rank,),
        )

    def _check_not_over(self, waiting: Sequence[int]) -> None:
        over = self._over.intersection(waiting)
        if over:
            raise CommunicationError(
                f"rank {min(over)} makes no further version, because too few workers are left; "
                "train with `while optimizer.version < steps`, so that all leave at one version",
                tuple(sorted(over)),
            )
