"""A server's loop: it makes one version after the other, from pushes in any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradwire._core import Layout, ServerSide
from gradwire.torch.link.errors import WorkerLostWarning
from gradwire.torch.link.wire import Kind, LostError
from gradwire.torch.server.group_options import choose_options
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import ServerLink


class Serving:
    """One server. Its methods are called inside `ServerLink.guard`."""

    link: ServerLink

    def __init__(
        self,
        layout: Layout,
        part: ServerPart,
        rank: int,
        optimizer: Optimizer,
        *,
        backup: int,
        staleness: int,
        history: int,
        **options: Any,
    ) -> None:
        """`options`: further arguments of ServerSide."""
        self.exchange = ServerSide(
            layout,
            rank,
            self._update,
            backup=backup,
            staleness=staleness,
            history=history,
            **options,
        )
        self.part = part
        self.workers = layout.workers
        self.peers = range(self.workers)
        self.pushes = 0  # received
        self.pulls = 0  # sent; a version counts once for each worker
        self.models = 0  # sent to workers that lack versions which are no longer kept
        self.lost: set[int] = set()  # workers that are gone without having left
        self._optimizer = optimizer
        self._backup = backup
        self._in_step = backup == 0 and staleness == 0  # no worker is ahead of another
        # Transfers to a worker that may still be under way when it pushes.
        self._keep_sends = 2 * history if staleness else 0
        self._options: dict[int, bytes] = {}  # that each worker sent last
        self._left: set[int] = set()
        self._ended_for: set[int] = set()  # workers that were sent OVER
        self._answered: set[int] = set()  # workers that were sent the last model

    @property
    def version(self) -> int:
        return self.exchange.version

    def begin(self, link: ServerLink, version: int) -> None:
        """Sends the model, of this version, to every worker."""
        self.link = link
        self.exchange.set_version(version)
        self.part.keep_model(with_replica=self._backup > 0)
        model = self.part.model(version)
        for worker in self.peers:
            link.wire.send(worker, Kind.MODEL, model)

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
            self.link.wire.flush(worker)

    def _update(self) -> None:
        """Steps the optimizer, as the bucket holds the averages of this server's tensors."""
        missing = set(self.exchange.awaiting())
        taken = [worker for worker in self.peers if worker not in missing]
        options = choose_options(self._options, taken, self._in_step)
        self.part.step(self._optimizer, options)

    def _ended(self) -> bool:
        return len(self._left | self.lost) == self.workers

    def _active(self) -> list[int]:
        return [w for w in self.peers if w not in self._left | self.lost]

    def _take(self) -> None:
        """Handles one message. Raises LostError if too many workers are gone."""
        awaited = [worker for worker in self.exchange.awaiting() if worker in self._active()]
        try:
            message = self.link.take(awaited or self._active())
        except LostError as lost:
            if lost.silent and not (self._ended_for or self._answered):
                raise  # later the training is over, and no silent worker is needed
            self._lose(lost)
            self._end_if_over()
            return
        if message.kind is Kind.OPTIONS:
            self._options[message.peer] = message.payload.tobytes()
        elif message.kind is Kind.LEAVE:
            self._left.add(message.peer)
        elif message.kind is Kind.PACKET:
            self.pushes += 1
            self.link.wire.flush(message.peer, self._keep_sends)
            self.exchange.receive(message.peer, message.payload)
            self._send_all()
            if not self.exchange.done:  # if done, `run` does this after the replica has followed
                self._help_those_behind()
        else:
            raise self.link.refuse(message)
        self._end_if_over()

    def _send_all(self) -> None:
        for peer, message in self.exchange.outgoing():
            if peer in self.lost:
                continue
            try:
                self.link.wire.send(peer, Kind.PACKET, message)
                self.pulls += 1
            except LostError as lost:
                self._lose(lost)

    def _help_those_behind(self) -> None:
        """Sends the model itself to workers that lack versions which are no longer kept."""
        version = self.exchange.version
        for worker in self.exchange.behind:
            if worker not in self.lost:
                model = self.part.model(version, Kind.CATCH_UP)
                self.link.wire.send(worker, Kind.CATCH_UP, model)
                self.models += 1
            self.exchange.caught_up(worker)

    def _lose(self, gone: LostError) -> None:
        """Goes on without these workers, unless they have left or are too many."""
        workers = set(gone.peers) - self._left
        self.lost |= workers
        if len(self.lost) > self._backup:
            hint = "" if gone.silent else " (a worker leaves by calling optimizer.close())"
            raise LostError(tuple(sorted(self.lost)), gone.silent, f"{gone}{hint}")
        for worker in sorted(workers):
            warnings.warn(
                f"rank {worker} {'sent nothing' if gone.silent else 'is gone'} ({gone}); training "
                f"goes on without it, as backup_workers={self._backup} allows",
                WorkerLostWarning,
                stacklevel=2,
            )

    def _end_if_over(self) -> None:
        """Tells workers that this version is the last if too few of them are left for another."""
        if self.exchange.done:
            return
        missing = set(self.exchange.awaiting())
        to_come = [worker for worker in self._active() if worker in missing]
        if self.workers - len(missing) + len(to_come) >= self.workers - self._backup:
            return
        version = self.exchange.version
        for worker in self._active():
            # A worker that has pushed may wait for this version. The others push, get the versions
            # that they lack, and leave.
            if worker not in missing | self._ended_for:
                self._ended_for.add(worker)
                self.link.wire.send(worker, Kind.OVER)
        for worker in self._left - self._answered:
            self._answered.add(worker)
            self.link.wire.send(worker, Kind.MODEL, self.part.model(version))
