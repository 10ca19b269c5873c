"""A server's loop: it makes one version after the other, from pushes in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from gradwire._core import Layout, ServerSide
from gradwire.errors import warn_user
from gradwire.torch.checkpoint import Residual, StateDict, held_back, residuals_of
from gradwire.torch.errors import WorkerJoinedWarning, WorkerLostWarning
from gradwire.torch.members.places import Places
from gradwire.torch.network.transport import NOTHING, TEXT_BYTES, Kind, LostError
from gradwire.torch.server.group_options import (
    VERSION_BYTES,
    OptionsOfWorkers,
    encode_options,
    read_options,
    read_version,
    unused_message,
    version_message,
)
from gradwire.torch.server.model_parts import ServerPart
from gradwire.torch.server.server_link import Message, ServerLink
from gradwire.torch.server.server_plan import ServerPlan
from gradwire.torch.server.side import Handlers, Outgoing, Side


class Serving(Side[ServerPart]):
    """One server. A version is made when all parts of it are."""

    role = "server"
    moved = ("push_bytes_received", "pull_bytes", "values_received", "values_sent")

    def __init__(
        self, plan: ServerPlan, rank: int, optimizer: Optimizer, places: Places | None
    ) -> None:
        """places: with which other processes take the places of lost workers; None: they can't."""
        settings, buffers = plan.settings, plan.buffers
        here = [
            ServerPart(i, part, rank, plan, optimizer, self._update)
            for i, part in enumerate(plan.parts)
            if len(plan.parts) == 1 or _has_values(part[0], rank)
        ]
        super().__init__(plan, rank, optimizer, range(settings.workers), here)
        self._places = places
        keeps_buffers = buffers is not None and buffers.keeper == rank
        self._kept_buffers = buffers if keeps_buffers else None
        self._asking: list[int] = []  # places whose processes wait for the model
        # Transfers to a worker that may still be under way when it pushes.
        others = len(here) - 1
        self._keep_sends = 2 * settings.history * len(here) if settings.staleness else 3 * others
        if settings.backup_workers:  # of another part, the versions that a late worker lacked
            self._keep_sends += settings.history * others
        self._options = OptionsOfWorkers(may_differ=settings.depends_on_speed)
        self._left: set[int] = set()
        self._ended_for: set[int] = set()  # workers that were sent OVER
        self._answered: set[int] = set()  # workers that were sent the last model
        # Of a loaded state, until `begin`: what the workers' models lack of this one.
        self._lacking: list[Residual] | None = None

    @property
    def version(self) -> int:
        return min(part.exchange.version for part in self.parts.values())

    @property
    def has_state(self) -> bool:
        return self._lacking is not None

    def load_state(self, state: StateDict, of_optimizer: StateDict) -> None:
        model = state["model"]
        if not self.settings.pulls_gradients:
            if lacking := self.own_names - model.keys():
                raise ValueError(
                    f"the state lacks {min(lacking)}, which this server has: its tensors are "
                    f"{', '.join(sorted(model))}"
                )
            for part in self.parts.values():
                part.load_named(model)
        self._optimizer.load_state_dict(of_optimizer)
        for part in self.parts.values():
            part.exchange.set_version(int(state["version"]))
        if self.settings.pulls_gradients:
            self._load_residuals(residuals_of(state))
        else:
            self._lacking = residuals_of(state)
        if self._buffers is not None:
            self._buffers.load_named(state.get("buffers", {}))

    def begin(self, link: ServerLink) -> None:
        handlers: Handlers = {
            Kind.PACKET: (self._most_packet, self._take_push),
            Kind.OPTIONS: (TEXT_BYTES, self._take_options),
            Kind.UNUSED: (self._most_unused, self._take_unused),
            Kind.LEAVE: (0, self._take_leave),
        }
        if self._kept_buffers is not None:
            handlers[Kind.BUFFERS] = self._kept_buffers.nbytes, self._take_buffers
        if self._places is not None:
            handlers[Kind.JOIN] = VERSION_BYTES, self._take_join
        self._listen(link, handlers)
        if self._places is not None:
            link.let_join(self._places)
        with link.guard("sending the model"):
            if link.all_go_on and self._lacking is not None:
                self._load_residuals(self._lacking)
            self._send_model(self.peers, alone=link.all_go_on)
        self._lacking = None
        with_replica = self.settings.backup_workers > 0 or self._places is not None
        for part in self.parts.values():
            part.begin(with_replica)

    def run(self, on_version: Callable[[int], None]) -> None:
        """Runs until every worker has left or is lost; at most `backup_workers` of them may be
        lost, or all but one with on_lost="continue"."""
        while not self._has_ended():
            self._let_in()
            for part in self.parts.values():
                part.exchange.start(part.bucket, part.exchange.version)
                self._send_packets(part)
            while not (self._is_done() or self._has_ended()):
                self._take()
            if self._is_done():
                for part in self.parts.values():
                    self._note_non_finite(part, part.exchange.version - 1)
                    if part.exchange.non_finite is None:
                        part.follow()
                    self._help_those_behind(part)
                if self.settings.pulls_gradients:  # the workers' replicas must take the same steps
                    self._options.choose(self.version - 1, self.peers)
                on_version(self.version)
        self._answer_those_who_left()
        for worker in self._left:
            self._flush(worker)

    def _update(self, part: ServerPart) -> None:
        """Steps the optimizer, as the part's bucket holds the averages of this server's tensors."""
        version, pushed = part.exchange.version, part.exchange.pushed
        options = self._options.choose(version, pushed)
        unused = part.said.everywhere(version, pushed)
        part.step(self._optimizer, options, part.names_at(unused))

    def _unused_with(self, part: ServerPart, worker: int) -> list[int]:
        """With pulls="gradients", when the push of `worker` ends a version: the places of the
        part's tensors that no worker has a gradient of."""
        pushed = {*part.exchange.pushed, worker}
        if not self.settings.pulls_gradients or len(pushed) < len(self.peers):
            return []
        return part.said.everywhere(part.exchange.version, sorted(pushed))

    def _is_done(self) -> bool:
        return all(part.exchange.done for part in self.parts.values())

    def _has_ended(self) -> bool:
        return len(self._left | self.lost) == len(self.peers)

    @property
    def _excused(self) -> set[int]:
        """Workers for which no version waits, beside `backup_workers` of the others."""
        return self.lost if self.settings.goes_on else set()

    def _active(self) -> list[int]:
        return [w for w in self.peers if w not in self._left | self.lost]

    def _awaiting(self) -> set[int]:
        """Workers of which a push is missing."""
        return {worker for part in self.parts.values() for worker in part.exchange.awaiting()}

    def _take(self) -> None:
        """Handles one message. Raises LostError if too many workers are gone."""
        active = self._active()
        awaited = sorted(self._awaiting().intersection(active))
        try:
            message = self.link.take(awaited or active)
        except LostError as lost:
            is_over = self._ended_for or self._answered  # then no silent worker is needed
            if lost.silent and not is_over and not (self.settings.goes_on and awaited):
                raise
            self._lose(lost)
        else:
            if message.peer in self._excused and message.kind is not Kind.JOIN:
                self.link.expel(message.peer)  # it was silent for the timeout
            else:
                self._handle(message)
        self._end_if_over()

    def _take_options(self, message: Message) -> None:
        with self.link.reading(message):
            read_version(message.payload)
            read_options(message.payload, self._optimizer.param_groups)
        self._options.take(message.peer, message.payload)

    def _take_leave(self, message: Message) -> None:
        self._left.add(message.peer)

    def _take_unused(self, message: Message) -> None:
        part = self._part_of(message)
        with self.link.reading(message):
            part.said.take(message.peer, message.payload)

    def _take_buffers(self, message: Message) -> None:
        assert self._kept_buffers is not None
        with self.link.reading(message):
            self._kept_buffers.load(message.payload)

    def _take_push(self, message: Message) -> None:
        part = self._part_of(message)
        self._flush(message.peer, self._keep_sends)
        if message.peer in self._excused:
            return  # versions are made without it, from now on
        unused = self._unused_with(part, message.peer)
        if unused:
            said = unused_message(part.exchange.version, unused, len(part.names))
            self._send((worker, Kind.UNUSED, said, part.number) for worker in self.peers)
        # What is owed to these waits for a version that has a gradient.
        with held_back(part.exchange, part.names_at(unused)):
            part.exchange.receive(message.peer, message.payload)
        self._send_packets(part)
        if not part.exchange.done:  # if done, `run` does this after the replica has followed
            self._help_those_behind(part)

    def _send(self, messages: Outgoing) -> None:
        """Goes on without workers that are gone. Raises LostError if they are too many."""
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

    def _help_those_behind(self, part: ServerPart) -> None:
        """Sends the part itself to workers that lack versions of it which are no longer kept."""
        behind = part.exchange.behind
        for worker in behind:
            part.exchange.caught_up(worker)
        here = [worker for worker in behind if worker not in self.lost]
        if here:
            self.models += len(here)
            model = part.catch_up_model()
            self._send((worker, Kind.CATCH_UP, model, part.number) for worker in here)

    def _lose(self, gone: LostError) -> None:
        """Goes on without these workers, unless they have left or are too many."""
        here = set(gone.peers) - self._left
        self._asking = [worker for worker in self._asking if worker not in here]
        for worker in here:
            self.link.offer(worker)
        self._go_on_without(here - self.lost, gone)

    def _go_on_without(self, workers: set[int], gone: LostError) -> None:
        goes_on, backup = self.settings.goes_on, self.settings.backup_workers
        self.lost |= workers
        if len(self.lost) > (len(self.peers) - 1 if goes_on else backup):
            hint = "" if gone.silent else " (a worker leaves by calling optimizer.close())"
            raise LostError(tuple(sorted(self.lost)), gone.silent, f"{gone}{hint}")
        allowing = "on_lost='continue'" if goes_on else f"backup_workers={backup}"
        for worker in sorted(workers):
            warn_user(
                f"rank {worker} {'sent nothing' if gone.silent else 'is gone'} ({gone}); training "
                f"goes on without it, as {allowing} allows",
                WorkerLostWarning,
            )
        for part in self.parts.values() if goes_on else ():
            for worker in sorted(workers):
                part.exchange.lose(worker)
            self._send_packets(part)

    def _end_if_over(self) -> None:
        """Tells workers that this version is the last if too few of them are left for another."""
        open_parts = [part.exchange for part in self.parts.values() if not part.exchange.done]
        if all(map(self._can_finish, open_parts)):
            return
        missing = self._awaiting()
        # A worker that has pushed may wait for this version. The others push, get the versions that
        # they lack, and leave.
        told = [w for w in self._active() if w not in missing | self._ended_for]
        self._ended_for.update(told)
        self._send((worker, Kind.OVER, NOTHING, 0) for worker in told)
        self._answer_those_who_left()

    def _can_finish(self, exchange: ServerSide) -> bool:
        """Whether enough pushes for the version under way are here or may come."""
        here, missing = set(exchange.pushed) - self._excused, set(exchange.awaiting())
        to_come = missing.intersection(self._active())
        least = len(here | missing) - self.settings.backup_workers
        return len(here) + len(to_come) >= max(1, least)

    def _answer_those_who_left(self) -> None:
        """Sends them the last model."""
        if self._kept_buffers is not None and self._kept_buffers.sender in self._active():
            return  # it sends its last buffers when it leaves
        asking = sorted(self._left - self._answered)
        self._answered.update(asking)
        if asking:
            self._send_model(asking)

    def _send_model(self, workers: Sequence[int], alone: bool = False) -> None:
        """Sends these workers the exact model. alone: its version alone, because they have it."""
        for part in self.parts.values():
            model = version_message(part.exchange.version) if alone else part.model()
            self._send((worker, Kind.MODEL, model, part.number) for worker in workers)
        if self._kept_buffers is not None:
            buffers = self._kept_buffers.pack()
            self._send((worker, Kind.BUFFERS, buffers, 0) for worker in workers)

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
        for part in self.parts.values():
            part.exchange.join(worker, version)
            self._send_packets(part)
            if worker in self.lost:
                return

    def _let_in(self) -> None:
        """Between two versions: gives the processes that ask the model, as the workers have it."""
        asking, self._asking = self._asking, []
        for worker in asking:
            self._options.replace(worker)
            for part in self.parts.values():
                part.said.replace(worker)
            try:
                self._send_all_of_model(worker)
            except LostError as lost:
                self._lose(lost)
                continue
            self.lost.discard(worker)
            self.joined.append(worker)
            for part in self.parts.values():
                part.exchange.join(worker, part.exchange.version)
            warn_user(
                f"another process takes the place of rank {worker}, from version {self.version} on",
                WorkerJoinedWarning,
            )

    def _send_all_of_model(self, worker: int) -> None:
        for part in self.parts.values():
            self.link.send(worker, Kind.CATCH_UP, part.catch_up_model(), part.number)
        options = encode_options(self._optimizer.param_groups)
        self.link.send(worker, Kind.OPTIONS, version_message(self.version, options))
        if self._kept_buffers is not None:
            self.link.send(worker, Kind.BUFFERS, self._kept_buffers.pack())


def _has_values(layout: Layout, server: int) -> bool:
    return any(segment["numel"] for segment in layout.segments if segment["owner"] == server)
