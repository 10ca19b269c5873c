"""A server's loop: it makes one version after the other, from pushes in any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire._core import ServerSide
from gradwire.torch.link.connection import LostError
from gradwire.torch.link.errors import WorkerLostWarning
from gradwire.torch.link.wire import Bytes, Kind, WireBrokenError
from gradwire.torch.records.parameters import Options
from gradwire.torch.server.group_options import choose_options
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink


@dataclass
class Serving:
    """One server."""

    link: ServerLink
    exchange: ServerSide
    part: ServerPart
    workers: int
    backup: int
    in_step: bool  # no worker is ahead of another
    keep_sends: int  # transfers to a worker that may still be under way when it pushes
    options: dict[int, Bytes] = field(default_factory=dict)  # that each worker sent last
    lost: set[int] = field(default_factory=set)  # workers that are gone without having left
    pushes: int = 0  # received
    pulls: int = 0  # sent; a version counts once for each worker
    models: int = 0  # sent to workers that lack versions which are no longer kept
    _left: set[int] = field(default_factory=set)
    _ended_for: set[int] = field(default_factory=set)  # workers that were sent OVER
    _answered: set[int] = field(default_factory=set)  # workers that were sent the last model

    def run(self, on_version: Callable[[int], None]) -> None:
        """Runs until every worker has left or is lost; at most `backup` of them may be lost."""
        while not self._ended():
            self.exchange.start(self.part.bucket, self.exchange.version)
            self._send_all()
            while not (self.exchange.done or self._ended()):
                self._take()
            if self.exchange.done:
                if self.exchange.non_finite is None:
                    self.part.follow()
                self._help_those_behind()
                on_version(self.exchange.version)
        for worker in self._left:
            self.link.flush(worker)

    def options_of_version(self) -> list[Options] | None:
        """The workers' options for the version that is about to be finished."""
        missing = set(self.exchange.awaiting())
        taken = [worker for worker in range(self.workers) if worker not in missing]
        return choose_options(self.options, taken, self.in_step)

    def _ended(self) -> bool:
        return len(self._left | self.lost) == self.workers

    def _active(self) -> list[int]:
        return [w for w in range(self.workers) if w not in self._left | self.lost]

    def _take(self) -> None:
        """Handles one message. Raises LostError if too many workers are gone."""
        awaited = [worker for worker in self.exchange.awaiting() if worker in self._active()]
        try:
            message = self.link.take(awaited or self._active())
        except LostError as silent:
            if not (self._ended_for or self._answered):
                raise
            for worker in silent.peers:  # the training is over, so they are not needed
                self._lose(worker, silent=True, why=str(silent))
            return
        if isinstance(message, WireBrokenError):
            if message.peer not in self._left:
                self._lose(message.peer, message.silent, str(message).splitlines()[0])
        elif message.kind is Kind.OPTIONS:
            self.options[message.peer] = message.payload
        elif message.kind is Kind.LEAVE:
            self._left.add(message.peer)
        elif message.kind is Kind.PACKET:
            self.pushes += 1
            self.link.flush(message.peer, self.keep_sends)
            self.exchange.receive(message.peer, message.payload)
            self._send_all()
            if not self.exchange.done:  # else the replica has not followed yet
                self._help_those_behind()
        else:
            raise self.link.refuse(message)
        self._end_if_over()

    def _send_all(self) -> None:
        for peer, message in self.exchange.outgoing():
            if peer in self.lost:
                continue
            try:
                self.link.send(peer, Kind.PACKET, message)
                self.pulls += 1
            except WireBrokenError as broken:
                self._lose(peer, broken.silent, str(broken).splitlines()[0])

    def _help_those_behind(self) -> None:
        """Sends the model itself to workers that lack versions which are no longer kept."""
        version = self.exchange.version
        for worker in self.exchange.behind:
            if worker not in self.lost:
                self.link.send(worker, Kind.CATCH_UP, self.part.replica(version))
                self.models += 1
            self.exchange.caught_up(worker)

    def _lose(self, worker: int, silent: bool, why: str) -> None:
        self.lost.add(worker)
        if len(self.lost) > self.backup:
            hint = "" if silent else " (a worker leaves by calling optimizer.close())"
            raise LostError(tuple(sorted(self.lost)), silent, why + hint)
        warnings.warn(
            f"rank {worker} {'sent nothing' if silent else 'is gone'} ({why}); training goes on "
            f"without it, as backup_workers={self.backup} allows",
            WorkerLostWarning,
            stacklevel=2,
        )

    def _end_if_over(self) -> None:
        """Says that the model here is the last one if too few workers are left for another."""
        if self.exchange.done:
            return
        missing = set(self.exchange.awaiting())
        to_come = [worker for worker in self._active() if worker in missing]
        if self.workers - len(missing) + len(to_come) >= self.workers - self.backup:
            return
        version = self.exchange.version
        for worker in self._active():
            # A worker that has pushed may wait for this version. The others push, get the versions
            # that they lack, and leave.
            if worker not in missing | self._ended_for:
                self._ended_for.add(worker)
                self.link.send(worker, Kind.OVER)
        for worker in self._left - self._answered:
            self._answered.add(worker)
            self.link.send(worker, Kind.MODEL, self.part.model(version))
