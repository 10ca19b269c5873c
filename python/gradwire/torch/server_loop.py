"""What a server does: version after version, from whichever workers come."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire._core import ServerExchange
from gradwire.torch.errors import WorkerLostWarning
from gradwire.torch.server_link import LostError, ServerLink
from gradwire.torch.server_options import Group, choose_options
from gradwire.torch.server_parts import ServerPart
from gradwire.torch.wire import Bytes, Kind, WireBrokenError


@dataclass
class Serving:
    """One server's work. `options` is filled with what each worker sent last."""

    link: ServerLink
    exchange: ServerExchange
    part: ServerPart
    workers: int
    backup: int
    in_step: bool  # no worker is ahead of another
    keep_sends: int  # transfers to a worker that may still be under way when it pushes
    options: dict[int, Bytes] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # gone, and done without
    pushes: int = 0  # that came
    pulls: int = 0  # that were sent, a version as often as it was
    models: int = 0  # that were sent to workers too far behind
    _left: set[int] = field(default_factory=set)
    _told: set[int] = field(default_factory=set)  # that no version will come any more
    _answered: set[int] = field(default_factory=set)  # with the last model

    def run(self, on_version: Callable[[int], None]) -> None:
        """Until every worker has left, or is lost, which no more than `backup` may be."""
        while not self._ended():
            self.exchange.start(self.part.bucket, self.exchange.version(self.link.rank))
            self._send_all()
            while not (self.exchange.done or self._ended()):
                self._take()
            if self.exchange.done:
                if self.exchange.non_finite is None:
                    self.part.follow()
                self._help_those_behind()
                on_version(self.exchange.version(self.link.rank))
        for worker in self._left:
            self.link.flush(worker)

    def options_of_version(self) -> list[Group] | None:
        """Of the workers, for the version that is about to be finished."""
        missing = set(self.exchange.awaiting())
        taken = [worker for worker in range(self.workers) if worker not in missing]
        return choose_options(self.options, taken, self.in_step)

    def _ended(self) -> bool:
        return len(self._left | self.lost) == self.workers

    def _active(self) -> list[int]:
        return [w for w in range(self.workers) if w not in self._left | self.lost]

    def _take(self) -> None:
        """One message. Raises LostError if too many are gone."""
        awaited = [worker for worker in self.exchange.awaiting() if worker in self._active()]
        try:
            message = self.link.take(awaited or self._active())
        except LostError as silent:
            if not (self._told or self._answered):
                raise
            for worker in silent.peers:  # the training is over; they are not needed
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
        self._tell_if_over()

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
        """With the model itself, where the versions that a worker lacks are kept no more."""
        version = self.exchange.version(self.link.rank)
        for worker in self.exchange.behind:
            if worker not in self.lost:
                self.link.send(worker, Kind.CATCH_UP, self.part.replica(version))
                self.models += 1
            self.exchange.caught_up(worker)

    def _lose(self, worker: int, silent: bool, why: str) -> None:
        self.lost.add(worker)
        if len(self.lost) > self.backup:
            hint = "" if silent else " (a worker that is through calls optimizer.close())"
            raise LostError(tuple(sorted(self.lost)), silent, why + hint)
        warnings.warn(
            f"rank {worker} {'sent nothing' if silent else 'is gone'} ({why}); training goes on "
            f"without it, as backup_workers={self.backup} allows",
            WorkerLostWarning,
            stacklevel=2,
        )

    def _tell_if_over(self) -> None:
        """Once too few workers are there for another version, the model here is the last one."""
        if self.exchange.done:
            return
        missing = set(self.exchange.awaiting())
        to_come = [worker for worker in self._active() if worker in missing]
        if self.workers - len(missing) + len(to_come) >= self.workers - self.backup:
            return
        version = self.exchange.version(self.link.rank)
        for worker in self._active():
            # It may wait for this version; the others will be sent what they lack, and leave.
            if worker not in missing | self._told:
                self._told.add(worker)
                self.link.send(worker, Kind.OVER)
        for worker in self._left - self._answered:
            self._answered.add(worker)
            self.link.send(worker, Kind.MODEL, self.part.model(version))
