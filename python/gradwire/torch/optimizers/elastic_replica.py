"""The base of LocalSteps: goes on when ranks are lost, and lets others join (on_lost="continue").

Between two generations of members (members/roster.py), each rank

1. settles: applies the exchanges that have arrived, gives up the others, and reports both;
2. meets the ranks that are left, and connects with them;
3. takes over the model of the source if it is a newcomer, or if another rank has finished an
   exchange that broke off here. If nobody has finished it, all undo it: their residuals are as they
   were before, and their changes are exchanged again;
4. takes part in an exchange of all changes that were not sent, so that all models are equal.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from gradwire.local_schedule import Schedule
from gradwire.torch.link.engine import agree, receive
from gradwire.torch.link.errors import (
    CommunicationError,
    DamagedMessageError,
    PeerMismatchError,
    RankLostWarning,
    forget_frames,
)
from gradwire.torch.link.thread import only_here
from gradwire.torch.link.wire import Kind, Wire
from gradwire.torch.members.membership import MemberSettings, Membership
from gradwire.torch.members.roster import Report, Roster
from gradwire.torch.optimizers.fragment import Fragment
from gradwire.torch.optimizers.replica import ReplicaOptimizer
from gradwire.torch.optimizers.state_size import most_bytes
from gradwire.torch.records.checkpoint import Residual, StateDict, from_bytes, to_bytes
from gradwire.torch.records.modes import ordinary_tensors, writing_to
from gradwire.torch.session.bucket_runner import BucketRunner


@dataclass
class Settled:
    """What a rank brings into the next generation.

    unfinished  the fragment whose exchange broke off; None: none did
    after, before   residuals as they are, and as they were before that exchange
    """

    report: Report
    runner: BucketRunner | None
    unfinished: int | None
    after: list[Residual]
    before: list[Residual]


class ElasticReplica(ReplicaOptimizer):
    """See the module. Without a membership, it is a ReplicaOptimizer."""

    _members: Membership | None = None
    _leave: Callable[[], object]  # leaves the members, if there are any
    _settled: Settled | None = None  # between two generations
    _fragments: list[Fragment]
    _schedule: Schedule
    _residual_decay: float
    _clock: int  # steps since the schedule began
    _local_steps: int
    _exchanges: int  # that have begun
    _last_skipped: bool  # whether the last one that arrived was not finite
    _last_mix: float  # with which it was applied

    @abstractmethod
    def _exchange_all(self) -> None:
        """Exchanges all changes that were not sent. Every rank calls it at the same time."""

    @abstractmethod
    def _apply(self, fragment: Fragment, mix: float) -> None:
        """Waits for the fragment's exchange, if there is one, and applies it."""

    @abstractmethod
    def _forget_decay(self, fragment: Fragment) -> None:
        """The fragment's parameters are the anchors."""

    def _join(self, store: Store, settings: MemberSettings, terms: str) -> None:
        """Waits until this rank is a member, and has the members' model."""
        for fragment in self._fragments:
            fragment.set_anchors()
        self._members = Membership(store, settings, terms)
        self._leave = only_here(self._members.leave)
        weakref.finalize(self, self._leave)
        self._lost: list[int] = []
        self._settled = Settled(Report(None, 0, self._unsent()), None, None, [], [])
        self._members.join()
        try:
            self._enter(self._members)
        except CommunicationError as error:
            self._require_loss(error)
            self._regroup(self._members)

    @abstractmethod
    def _load_optimizer(self, state: StateDict) -> None:
        """Loads the state of the wrapped optimizer."""

    def close(self) -> None:
        super().close()
        if self._members is not None:
            self._leave()

    @property
    def error(self) -> Exception | None:
        return super().error if self._members is None else self._members.error

    def _check_session(self) -> None:
        if self._members is None:
            super()._check_session()
        else:
            self._members.check()  # a session that has ended is followed by another one

    def _go_on(self, exchange: Callable[[], None]) -> None:
        """Runs `exchange`. If ranks are lost in it, goes on with the others; if processes ask to
        join, lets them in."""
        members = self._members
        if members is None:
            exchange()
            return
        try:
            exchange()
            if not self._take_asked():
                return
            self._exchange_all()  # newcomers take over a model that lacks no change
        except CommunicationError as error:
            self._require_loss(error)
        self._regroup(members)

    def _require_loss(self, error: CommunicationError) -> None:
        """Raises the error unless the ranks that are left can go on."""
        assert self._members is not None
        self._members.check()
        if isinstance(error, PeerMismatchError | DamagedMessageError):
            self._members.fail(error)

    def _regroup(self, members: Membership) -> None:
        while True:
            settled = self._settled = self._settled or self._settle()
            before = members.roster
            # Those that ask now: one that asked before the last attempt may be gone.
            after = members.meet(replace(settled.report, asking=members.asking()))
            if lost := sorted(set(before.members) - set(after.members)):
                self._lost += lost
                self._warn_of_lost(lost, after)
            try:
                self._enter(members)
                return
            except CommunicationError as error:
                self._require_loss(error)
                forget_frames(error)

    def _settle(self) -> Settled:
        session = self._session
        report = self._finish_exchanges()
        runner = session.runner
        settled = Settled(
            report, runner, runner.unfinished, runner.residuals(), runner.residuals_before()
        )
        session.close()  # the others notice
        forget_frames(session.error)
        return settled

    def _enter(self, members: Membership) -> None:
        """Connects with the members of the generation, and makes all models equal."""
        roster = members.roster
        self._connect(members.meeting())
        self._session.runner.keep_undo()
        members.watch(self._session.break_off)
        if self._settled is not None:
            if self._settled.runner is not None:
                self._session.runner.go_on_from(self._settled.runner.counted())
            try:
                state = self._share_model(members)
            except CommunicationError:
                self._session.close()  # the others notice, and nothing here has changed
                raise
            self._resolve(self._settled, roster, state)
            self._settled, self._local_steps = None, roster.steps
        self._set_world_size(len(roster.members))
        text = f"generation {roster.generation}, model {self._digest()}"
        self._session.start(lambda wire: agree(text, wire), "comparing the models").result()
        self._take_asked()  # those of the last generation; every member must find the same
        if any(roster.unsent):
            self._set_unsent(roster.unsent)
            self._exchange_all()
        self._clock = 0

    def _share_model(self, members: Membership) -> StateDict | None:
        """The source's state on the ranks that take it over; None on the others."""
        roster = members.roster
        place_of = {member: place for place, member in enumerate(roster.members)}
        is_source = members.id == roster.source and len(roster.receivers) > 0
        sent = np.frombuffer(to_bytes(self._model_state()), np.uint8) if is_source else None

        most = self._most_state() if members.id in roster.receivers else 0

        def work(wire: Wire) -> bytes | None:
            self._session.runner.agree_with_peers()
            if sent is not None:
                for receiver in roster.receivers:
                    wire.send(place_of[receiver], Kind.TENSORS, sent)
                wire.flush()
            if members.id not in roster.receivers:
                return None
            source = place_of[roster.source]
            try:
                received = receive(wire, source, Kind.TENSORS, most).tobytes()
            except PeerMismatchError as error:
                raise PeerMismatchError(
                    f"{error}. At most that many bytes have this rank's model, the states of its "
                    f"optimizer ({type(self._optimizer).__name__}) and what all members share: "
                    "give all members the same optimizer",
                    error.ranks,
                ) from None
            wire.release(source)
            return received

        received = self._session.start(work, "taking over a member's model").result()
        return None if received is None else from_bytes(received)

    def _resolve(self, settled: Settled, roster: Roster, state: StateDict | None) -> None:
        """Makes this rank's model and residuals those of `roster.done` finished exchanges."""
        done = settled.report.done
        if state is None:
            residuals = settled.before
        elif done is None:
            self._become(state)
            residuals = []
        else:
            if done != roster.done - 1 or settled.unfinished is None:
                raise RuntimeError(
                    f"member {roster.source} has finished {roster.done} exchanges, this one {done}"
                )
            skipped = self._catch_up(state, settled.unfinished)
            residuals = settled.before if skipped else self._decay(settled)
        self._session.runner.adopt(residuals)

    def _warn_of_lost(self, lost: Sequence[int], after: Roster) -> None:
        listed = ", ".join(map(str, lost))
        which = f"member {listed} is gone" if len(lost) == 1 else f"members {listed} are gone"
        warnings.warn(
            f"generation {after.generation}: {which}, with residual and unsent changes; "
            f"{len(after.members)} go on (members {', '.join(map(str, after.members))})",
            RankLostWarning,
            stacklevel=2,
        )

    # What a rank brings along, and what it takes over ------------------------------------------

    def _finish_exchanges(self) -> Report:
        under_way = [f for f in self._fragments if f.flight is not None]
        for fragment in sorted(under_way, key=lambda f: f.flight.job if f.flight else 0):
            try:
                self._apply(fragment, self._schedule.mix)
            except (PeerMismatchError, DamagedMessageError):
                raise
            except CommunicationError:
                fragment.flight = None  # the parameters still have the changes
                self._exchanges -= 1
        return Report(self._exchanges, self._local_steps, self._unsent())

    def _unsent(self) -> tuple[int, ...]:
        return tuple(fragment.steps for fragment in self._fragments)

    def _set_unsent(self, steps: Sequence[int]) -> None:
        for fragment, count in zip(self._fragments, steps, strict=True):
            fragment.steps = count

    def _set_world_size(self, world_size: int) -> None:
        for fragment in self._fragments:
            if fragment.noise is not None:
                fragment.noise.world_size = world_size

    def _take_asked(self) -> bool:
        asked = any(fragment.is_asked for fragment in self._fragments)
        for fragment in self._fragments:
            fragment.is_asked = False
        return asked

    def _most_state(self) -> int:
        """The most bytes of another member's `_model_state`."""
        shared: list[object] = []
        for fragment in self._fragments:
            velocities = None if fragment.momentum is None else fragment.momentum.velocities
            noise = None if fragment.noise is None else fragment.noise.state_dict()
            shared += [fragment.anchors, velocities, noise, fragment.outer]
        tensors = [tensor for _, _, tensor in self._model_tensors()]
        return most_bytes(tensors, self._optimizer, *shared)

    def _model_state(self) -> StateDict:
        return {
            "tensors": [tensor.clone() for _, _, tensor in self._model_tensors()],
            "fragments": [fragment.shared_state() for fragment in self._fragments],
            "optimizer": self._optimizer.state_dict(),
            "exchanges": self._exchanges,
            "last_skipped": self._last_skipped,
            "last_mix": self._last_mix,
        }

    @ordinary_tensors()
    def _become(self, state: StateDict) -> None:
        for (_, _, tensor), values in zip(self._model_tensors(), state["tensors"], strict=True):
            with writing_to(tensor):
                tensor.copy_(values)
        self._load_optimizer(state["optimizer"])
        for fragment, shared in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_shared_state(shared)
            if fragment.noise is not None:
                fragment.noise.load_state_dict(shared["noise"])
            fragment.follow_anchors(0.0)
        self._exchanges = int(state["exchanges"])
        self._last_skipped, self._last_mix = bool(state["last_skipped"]), float(state["last_mix"])

    def _catch_up(self, state: StateDict, unfinished: int) -> bool:
        skipped = bool(state["last_skipped"])
        for fragment, shared in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_shared_state(shared)
        fragment = self._fragments[unfinished]
        if fragment.noise is not None:
            fragment.noise.follow(state["fragments"][unfinished]["noise"])
        fragment.follow_anchors(float(state["last_mix"]))
        self._forget_decay(fragment)
        self._exchanges = int(state["exchanges"])
        return skipped

    def _decay(self, settled: Settled) -> list[Residual]:
        assert settled.unfinished is not None
        fragment = self._fragments[settled.unfinished]
        names = {name for name, _ in fragment.bucket.tensors}
        return [
            r._replace(values=r.values * np.float32(self._residual_decay)) if r.name in names else r
            for r in settled.after
        ]

    def _shared_tensors(self) -> list[torch.Tensor]:
        anchors = [anchor for fragment in self._fragments for anchor in fragment.anchors]
        momenta = [f.momentum.velocities for f in self._fragments if f.momentum is not None]
        return anchors + [velocity for velocities in momenta for velocity in velocities]

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self._shared_tensors():
            digest.update(tensor.detach().contiguous().numpy())
        return digest.hexdigest()
