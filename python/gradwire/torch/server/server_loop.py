"""A server's loop: it makes one version after the other, from pushes in any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gradwire._core import ServerSide
from gradwire.torch.checkpoint import Residual, held_back
from gradwire.torch.errors import WorkerJoinedWarning, WorkerLostWarning
from gradwire.torch.members.places import Places
from gradwire.torch.network.transport import NOTHING, TEXT_BYTES, Bytes, Kind, LostError
from gradwire.torch.server.buffers import ModelBuffers
from gradwire.torch.server.group_options import (
    VERSION_BYTES,
    Agreement,
    OptionsOfWorkers,
    UnusedOfWorkers,
    encode_options,
    options_message,
    read_options,
    read_version,
    unused_message,
    version_message,
)
from gradwire.torch.server.model_parts import GRADIENTS, ServerPart
from gradwire.torch.server.server_link import Message, ServerLink
from gradwire.torch.server.side import Side


class Serving(Side[ServerSide]):
    """One server. A version is made when all parts of it are."""

    def __init__(
        self,
        parts: dict[int, ServerPart],
        rank: int,
        workers: int,
        optimizer: Optimizer,
        buffers: ModelBuffers | None,
        *,
        pulls: str,
        backup: int,
        staleness: int,
        history: int,
        goes_on: bool,
        places: Places | None,
        **options: Any,
    ) -> None:
        """goes_on: without any worker that is lost, beside the backup workers. places: with which
        other processes take the places of lost workers; None: they can't. `options`: further
        arguments of ServerSide."""

        def make(number: int, part: ServerPart) -> ServerSide:
            return ServerSide(
                part.layout,
                rank,
                None if pulls == GRADIENTS else lambda: self._update(number),
                pulls=pulls,
                backup=backup,
                staleness=staleness,
                history=history,
                **options,
            )

        super().__init__(parts, {number: make(number, part) for number, part in parts.items()})
        self.workers = workers
        self.peers = range(workers)
        self.models = 0  # sent to workers that lack versions which are no longer kept
        self.lost: set[int] = set()  # workers that are gone without having left
        self.joined: list[int] = []  # places that other processes have taken, in this order
        self._places = places
        self._asking: list[int] = []  # places whose processes wait for the model
        self._pulls_gradients = pulls == GRADIENTS
        self._optimizer = optimizer
        self._buffers = buffers if buffers is not None and buffers.keeper == rank else None
        self._backup = backup
        self._goes_on = goes_on
        # Transfers to a worker that may still be under way when it pushes.
        self._keep_sends = 2 * history if staleness else 3 * (len(parts) - 1)
        # Without backup and staleness no worker is ahead of another. The schedule of a process that
        # joined may still differ, and must not end the training of all.
        agreement = Agreement.ERROR if places is None else Agreement.WARNING
        ahead = backup > 0 or staleness > 0
        self._options = OptionsOfWorkers(Agreement.NONE if ahead else agreement)
        self._unused = {number: UnusedOfWorkers(len(part.names)) for number, part in parts.items()}
        self._left: set[int] = set()
        self._ended_for: set[int] = set()  # workers that were sent OVER
        self._answered: set[int] = set()  # workers that were sent the last model

    @property
    def version(self) -> int:
        return min(exchange.version for exchange in self.exchanges.values())

    def named_model(self) -> dict[str, torch.Tensor]:
        return {n: t for part in self.parts.values() for n, t in part.named_model().items()}

    def _names(self, part: ServerPart) -> Iterable[str]:
        return part.own_names

    @property
    def own_names(self) -> set[str]:
        """The names of this server's tensors."""
        return {name for part in self.parts.values() for name in part.own_names}

    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Takes over the saved tensors of this server. Raises ValueError if there are not all."""
        if self._pulls_gradients:
            return
        if lacking := self.own_names - model.keys():
            raise ValueError(
                f"the state lacks {min(lacking)}, which this server has: its tensors are "
                f"{', '.join(sorted(model))}"
            )
        for part in self.parts.values():
            part.load_named(model)

    def begin(
        self, link: ServerLink, version: int, residuals: Sequence[Residual] | None = None
    ) -> None:
        """Sends the model, of this version, to every worker.

        residuals: what the workers' own models lack of this one. They have these models, saved at
        this version, and get none."""
        limits = {Kind.OPTIONS: TEXT_BYTES, Kind.UNUSED: self._most_unused, Kind.LEAVE: 0}
        if self._buffers is not None:
            limits[Kind.BUFFERS] = self._buffers.nbytes
        if self._places is not None:
            limits[Kind.JOIN] = VERSION_BYTES
        self._listen(link, limits)
        if self._places is not None:
            link.let_join(self._places)
        for exchange in self.exchanges.values():
            exchange.set_version(version)
        with link.guard("sending the model"):
            if residuals is None:
                self._send(self._exact_model(version, self.peers))
            else:
                self.load_residuals(residuals)
                self._send(self._version_alone(version))
        for part in self.parts.values():
            if self._pulls_gradients:
                part.drop_model()
            else:
                part.keep_model(with_replica=self._backup > 0 or self._places is not None)

    def run(self, on_version: Callable[[int], None]) -> None:
        """Runs until every worker has left or is lost; at most `backup` of them may be lost."""
        while not self._ended():
            self._let_in()
            for number, exchange in self.exchanges.items():
                exchange.start(self.parts[number].bucket, exchange.version)
                self._send_all(number)
            while not (self._done() or self._ended()):
                self._take()
            if self._done():
                for number, exchange in self.exchanges.items():
                    self._note_non_finite(number, exchange.version - 1)
                    if exchange.non_finite is None:
                        self.parts[number].follow()
                    self._help_those_behind(number)
                if self._pulls_gradients:  # then the workers' replicas must take the same steps
                    self._options.choose(self.version - 1, list(self.peers))
                on_version(self.version)
        self._answer_those_who_left()
        for worker in self._left:
            self._flush(worker)

    def _update(self, number: int) -> None:
        """Steps the optimizer, as the part's bucket holds the averages of this server's tensors."""
        exchange = self.exchanges[number]
        options = self._options.choose(exchange.version, exchange.pushed)
        unused = self._unused[number].everywhere(exchange.version, exchange.pushed)
        part = self.parts[number]
        part.step(self._optimizer, options, part.names_at(unused))

    def _unused_with(self, number: int, worker: int) -> list[int]:
        """With pulls="gradients", when the push of `worker` ends a version: the places of the
        part's tensors that no worker has a gradient of."""
        exchange = self.exchanges[number]
        pushed = {*exchange.pushed, worker}
        if not self._pulls_gradients or len(pushed) < self.workers:
            return []
        return self._unused[number].everywhere(exchange.version, sorted(pushed))

    @property
    def _allowing(self) -> str:
        return "on_lost='continue'" if self._goes_on else f"backup_workers={self._backup}"

    def _done(self) -> bool:
        return all(exchange.done for exchange in self.exchanges.values())

    def _ended(self) -> bool:
        return len(self._left | self.lost) == self.workers

    @property
    def _excused(self) -> set[int]:
        """Workers for which no version waits, beside `backup` of the others."""
        return self.lost if self._goes_on else set()

    def _active(self) -> list[int]:
        return [w for w in self.peers if w not in self._left | self.lost]

    def _awaiting(self) -> list[int]:
        """Workers of which a push is missing."""
        return sorted({w for exchange in self.exchanges.values() for w in exchange.awaiting()})

    def _take(self) -> None:
        """Handles one message. Raises LostError if too many workers are gone."""
        awaited = [worker for worker in self._awaiting() if worker in self._active()]
        try:
            message = self.link.take(awaited or self._active())
        except LostError as lost:
            is_over = self._ended_for or self._answered  # then no silent worker is needed
            if lost.silent and not is_over and not (self._goes_on and awaited):
                raise
            self._lose(lost)
            self._end_if_over()
            return
        if message.kind is Kind.JOIN and self._places is not None:
            self._take_join(message)
        elif message.peer in self._excused:
            self.link.expel(message.peer)  # it was silent for the timeout
        elif message.kind is Kind.OPTIONS:
            self._take_options(message)
        elif message.kind is Kind.LEAVE:
            self._left.add(message.peer)
        elif message.kind is Kind.UNUSED and message.part in self.parts:
            with self.link.reading(message):
                self._unused[message.part].take(message.peer, message.payload)
        elif message.kind is Kind.PACKET and message.part in self.parts:
            self._take_push(message)
        elif message.kind is Kind.BUFFERS and self._buffers is not None:
            with self.link.reading(message):
                self._buffers.load(message.payload)
        else:
            raise self.link.refuse(message)
        self._end_if_over()

    def _take_options(self, message: Message) -> None:
        with self.link.reading(message):
            read_version(message.payload)
            read_options(message.payload, self._optimizer.param_groups)
        self._options.take(message.peer, message.payload)

    def _take_push(self, message: Message) -> None:
        number = message.part
        exchange = self.exchanges[number]
        self._flush(message.peer, self._keep_sends)
        if message.peer in self._excused:
            return  # versions are made without it, from now on
        part = self.parts[number]
        unused = self._unused_with(number, message.peer)
        if unused:
            said = unused_message(exchange.version, unused, len(part.names))
            self._send((worker, Kind.UNUSED, said, number) for worker in self.peers)
        # What is owed to these waits for a version that has a gradient.
        with held_back(exchange, part.names_at(unused)):
            exchange.receive(message.peer, message.payload)
        self._send_all(number)
        if not exchange.done:  # if done, `run` does this after the replica has followed
            self._help_those_behind(number)

    def _send_all(self, number: int) -> None:
        outgoing = self.exchanges[number].outgoing()
        self._send((peer, Kind.PACKET, message, number) for peer, message in outgoing)

    def _send(self, messages: Iterable[tuple[int, Kind, Bytes, int]]) -> None:
        """Sends these: worker, kind, payload and part. Goes on without workers that are gone.

        Raises LostError if they are too many.
        """
        lost: list[LostError] = []
        for worker, kind, payload, part in messages:
            if worker in self.lost:
                continue
            try:
                self.link.send(worker, kind, payload, part)
            except LostError as error:
                lost.append(error)
        for each in lost:  # after all were sent: this may finish a version
            self._lose(each)

    def _flush(self, worker: int, keep: int = 0) -> None:
        """As Transport.flush. Goes on without the worker if it is gone."""
        try:
            self.link.flush(worker, keep)
        except LostError as lost:
            self._lose(lost)

    def _help_those_behind(self, number: int) -> None:
        """Sends the part itself to workers that lack versions of it which are no longer kept."""
        exchange = self.exchanges[number]
        behind = exchange.behind
        for worker in behind:
            exchange.caught_up(worker)
        here = [worker for worker in behind if worker not in self.lost]
        if here:
            self.models += len(here)
            model = self.parts[number].model(exchange.version, Kind.CATCH_UP)
            self._send((worker, Kind.CATCH_UP, model, number) for worker in here)

    def _lose(self, gone: LostError) -> None:
        """Goes on without these workers, unless they have left or are too many."""
        here = set(gone.peers) - self._left
        self._asking = [worker for worker in self._asking if worker not in here]
        for worker in here:
            self.link.offer(worker)
        self._go_on_without(here - self.lost, gone)

    def _go_on_without(self, workers: set[int], gone: LostError) -> None:
        self.lost |= workers
        if len(self.lost) > (self.workers - 1 if self._goes_on else self._backup):
            hint = "" if gone.silent else " (a worker leaves by calling optimizer.close())"
            raise LostError(tuple(sorted(self.lost)), gone.silent, f"{gone}{hint}")
        for worker in sorted(workers):
            warnings.warn(
                f"rank {worker} {'sent nothing' if gone.silent else 'is gone'} ({gone}); training "
                f"goes on without it, as {self._allowing} allows",
                WorkerLostWarning,
                stacklevel=2,
            )
        if self._goes_on:
            for number, exchange in self.exchanges.items():
                for worker in sorted(workers):
                    exchange.lose(worker)
                self._send_all(number)

    def _end_if_over(self) -> None:
        """Tells workers that this version is the last if too few of them are left for another."""
        if self._done():
            return
        missing = set(self._awaiting())
        open_parts = [exchange for exchange in self.exchanges.values() if not exchange.done]
        here = set.intersection(*(set(exchange.pushed) for exchange in open_parts)) - self._excused
        to_come = missing.intersection(self._active())
        if len(here) + len(to_come) >= max(1, len(here | missing) - self._backup):
            return
        # A worker that has pushed may wait for this version. The others push, get the versions that
        # they lack, and leave.
        told = [w for w in self._active() if w not in missing | self._ended_for]
        self._ended_for.update(told)
        self._send((worker, Kind.OVER, NOTHING, 0) for worker in told)
        self._answer_those_who_left()

    def _answer_those_who_left(self) -> None:
        """Sends them the last model."""
        if self._buffers is not None and self._buffers.sender in self._active():
            return  # it sends its last buffers when it leaves
        asking = sorted(self._left - self._answered)
        self._answered.update(asking)
        if asking:
            self._send(self._exact_model(self.version, asking))

    def _exact_model(
        self, version: int, workers: Sequence[int]
    ) -> Iterator[tuple[int, Kind, Bytes, int]]:
        """The messages that give these workers the exact model of this version."""
        for number, part in self.parts.items():
            model = part.model(version)
            yield from ((worker, Kind.MODEL, model, number) for worker in workers)
        yield from self._packed_buffers(workers)

    def _version_alone(self, version: int) -> Iterator[tuple[int, Kind, Bytes, int]]:
        """The messages that the workers get instead if they have the model."""
        message = version_message(version)
        for number in self.parts:
            yield from ((worker, Kind.MODEL, message, number) for worker in self.peers)
        yield from self._packed_buffers(self.peers)

    def _packed_buffers(self, workers: Sequence[int]) -> Iterator[tuple[int, Kind, Bytes, int]]:
        if self._buffers is not None:
            yield from ((worker, Kind.BUFFERS, self._buffers.pack(), 0) for worker in workers)

    # Processes that take the places of lost workers --------------------------------------------

    def _take_join(self, message: Message) -> None:
        """A process asks for the model, or says for which version it pushes first."""
        worker = message.peer
        if message.payload.size == 0:
            if worker not in self.lost:
                here = LostError((worker,), False, "another process has its place")
                self._go_on_without({worker}, here)
            self._asking.append(worker)
            return
        if worker in self.lost:
            self.link.expel(worker)
            return
        with self.link.reading(message):
            version = read_version(message.payload)
        for number, exchange in self.exchanges.items():
            exchange.join(worker, version)
            self._send_all(number)
            if worker in self.lost:
                return

    def _let_in(self) -> None:
        """Between two versions: gives the processes that ask the model, as the workers have it."""
        asking, self._asking = self._asking, []
        for worker in asking:
            self._options.replace(worker)
            for said in self._unused.values():
                said.replace(worker)
            try:
                self._send_all_of_model(worker)
            except LostError as lost:
                self._lose(lost)
                continue
            self.lost.discard(worker)
            self.joined.append(worker)
            for exchange in self.exchanges.values():
                exchange.join(worker, exchange.version)
            warnings.warn(
                f"another process takes the place of rank {worker}, from version {self.version} on",
                WorkerJoinedWarning,
                stacklevel=2,
            )

    def _send_all_of_model(self, worker: int) -> None:
        for number, part in self.parts.items():
            model = part.model(self.exchanges[number].version, Kind.CATCH_UP)
            self.link.send(worker, Kind.CATCH_UP, model, number)
        options = encode_options(self._optimizer.param_groups)
        self.link.send(worker, Kind.OPTIONS, options_message(self.version, options))
        if self._buffers is not None:
            self.link.send(worker, Kind.BUFFERS, self._buffers.pack())
