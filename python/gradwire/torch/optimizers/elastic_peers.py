"""Ranks that come and go: the others go on when some are lost, and let processes in.

Between two generations of members (members/generations.py), each rank

1. settles: applies the exchanges that have arrived, gives up the others, and reports both;
2. meets the ranks that are left, and connects with them;
3. takes over the model of the source if it is a newcomer, or if another rank has finished an
   exchange that broke off here. If nobody has finished it, all undo it: their residuals are as they
   were before, and their changes are exchanged again;
4. takes part in an exchange of all changes that were not sent, so that all models are equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.errors import warn_user
from gradwire.torch.buckets.bucket_runner import BucketRunner
from gradwire.torch.checkpoint import Residual, StateDict, from_bytes, to_bytes
from gradwire.torch.errors import (
    CommunicationError,
    DamagedMessageError,
    PeerMismatchError,
    RankLostWarning,
    forget_frames,
)
from gradwire.torch.members.generations import Generations, MemberReport, Roster
from gradwire.torch.network.engine import agree, receive
from gradwire.torch.network.transport import Kind, Transport, only_here
from gradwire.torch.optimizer_list import name_of
from gradwire.torch.optimizers.averaging import Averaging, Exchange, Peers
from gradwire.torch.options import Members


@dataclass
class Settled:
    """What a rank brings into the next generation.

    Attributes:
        unfinished: The fragment whose exchange broke off. None: none did.
        after: Residuals as they are.
        before: Residuals as they were before that exchange.
    """

    report: MemberReport
    runner: BucketRunner | None
    unfinished: int | None
    after: list[Residual]
    before: list[Residual]


class ElasticPeers(Peers):
    """The members of the present generation."""

    def __init__(
        self, averaging: Averaging, terms: Sequence[str], members: Members, timeout: float
    ) -> None:
        """Waits until this rank is a member, and has the members' model.

        Args:
            terms: What members must have in common, beside the model.
            members: With a store.
            timeout: Seconds.
        """
        everybody = f"min_ranks {members.min_ranks}, lost_after {members.lost_after:g}"
        terms = [*terms, everybody]
        self.membership = Generations(members, timeout, averaging.replica.describe(terms))
        self._leave = only_here(self.membership.leave)
        weakref.finalize(self, self._leave)
        self._averaging = averaging
        self._lost: list[int] = []
        report = MemberReport(None, 0, averaging.unsent)
        self._settled: Settled | None = Settled(report, None, None, [], [])
        self.membership.join()
        if not self._enters():
            self._regroup()

    @property
    def error(self) -> Exception | None:
        return self.membership.error

    def check(self) -> None:
        self.membership.check()  # a session that has ended is followed by another one

    def are_asked(self) -> bool:
        return bool(self.membership.asking())

    def counted(self) -> dict[str, Any]:
        roster = self.membership.roster
        lost = tuple(self._lost)
        return {"generation": roster.generation, "members": roster.members, "lost_members": lost}

    def close(self) -> None:
        super().close()
        self._leave()

    def run(self, exchange: Exchange) -> None:
        """If ranks are lost in the exchange, goes on with the others; if processes ask to join,
        lets them in."""
        try:
            exchange(self)
            if not self._averaging.take_asked():
                return
            self._averaging.exchange_all(self)  # newcomers take over a model that lacks no change
        except CommunicationError as error:
            self._require_loss(error)
        self._regroup()

    def _require_loss(self, error: CommunicationError) -> None:
        """Raises the error unless the ranks that are left can go on."""
        self.membership.check()
        if isinstance(error, PeerMismatchError | DamagedMessageError):
            self.membership.fail(error)

    def _regroup(self) -> None:
        while True:
            settled = self._settled = self._settled or self._settle()
            before = self.membership.roster
            # Those that ask now: one that asked before the last attempt may be gone.
            asking = self.membership.asking()
            after = self.membership.meet(replace(settled.report, asking=asking))
            if lost := sorted(set(before.members) - set(after.members)):
                self._lost += lost
                _warn_of_lost(lost, after)
            if self._enters():
                return

    def _enters(self) -> bool:
        """Whether this rank has entered the generation. False: ranks were lost meanwhile."""
        try:
            self._enter()
        except CommunicationError as error:
            self._require_loss(error)
            forget_frames(error)
            return False
        return True

    def _settle(self) -> Settled:
        averaging, session = self._averaging, self.session
        averaging.give_up()
        report = MemberReport(averaging.exchanges, averaging.steps, averaging.unsent)
        runner = session.runner
        settled = Settled(
            report, runner, runner.kept.unfinished, runner.residuals(), runner.residuals_before()
        )
        session.close()  # the others notice
        forget_frames(session.error)
        return settled

    def _enter(self) -> None:
        """Connects with the members of the generation, and makes all models equal."""
        averaging, roster = self._averaging, self.membership.roster
        self._connect(averaging, self.membership.meeting())
        self.session.runner.kept.keeps_undo = True
        self.session.runner.may_differ = True
        self.membership.watch(self.session.break_off)
        if self._settled is not None:
            if self._settled.runner is not None:
                self.session.runner.ledger.go_on_from(self._settled.runner.counted())
            try:
                state = self._share_model(roster)
            except CommunicationError:
                self.session.close()  # the others notice, and nothing here has changed
                raise
            self._resolve(self._settled, roster, state)
            self._settled, averaging.steps = None, roster.steps
        averaging.set_world_size(len(roster.members))
        text = f"generation {roster.generation}, model {averaging.digest()}"
        self.session.start(lambda wire: agree(text, wire), "comparing the models").result()
        averaging.take_asked()  # those of the last generation; every member must find the same
        if any(roster.unsent):
            averaging.unsent = roster.unsent
            averaging.exchange_all(self, compares=False)  # some have not set this step's yet
        averaging.clock = 0

    def _share_model(self, roster: Roster) -> StateDict | None:
        """The source's state on the ranks that take it over; None on the others."""
        own = self.membership.id
        place_of = {member: place for place, member in enumerate(roster.members)}
        sent = None
        if own == roster.source and roster.receivers:
            sent = np.frombuffer(to_bytes(self._averaging.shared_state()), np.uint8)
        most = self._averaging.most_state() if own in roster.receivers else 0
        session = self.session

        def work(wire: Transport) -> bytes | None:
            session.runner.agree_with_peers()
            if sent is not None:
                for receiver in roster.receivers:
                    wire.send(place_of[receiver], Kind.TENSORS, sent)
                wire.flush()
            if own not in roster.receivers:
                return None
            source = place_of[roster.source]
            try:
                received = receive(wire, source, Kind.TENSORS, most).tobytes()
            except PeerMismatchError as error:
                name = name_of(self._averaging.optimizer)
                raise PeerMismatchError(
                    f"{error}. At most that many bytes have this rank's model, the states of its "
                    f"optimizer ({name}) and what all members share: give all members the same "
                    "optimizer",
                    error.ranks,
                ) from None
            wire.release(source)
            return received

        received = session.start(work, "taking over a member's model").result()
        return None if received is None else from_bytes(received)

    def _resolve(self, settled: Settled, roster: Roster, state: StateDict | None) -> None:
        """Makes this rank's model and residuals those of `roster.done` finished exchanges."""
        done, unfinished = settled.report.done, settled.unfinished
        if state is None:
            residuals = settled.before
        elif done is None:
            self._averaging.become(state)
            residuals = []
        else:
            if done != roster.done - 1 or unfinished is None:
                raise RuntimeError(
                    f"member {roster.source} has finished {roster.done} exchanges, this one {done}"
                )
            skipped = self._averaging.catch_up(state, unfinished)
            decayed = self._averaging.decay(settled.after, unfinished)
            residuals = settled.before if skipped else decayed
        self.session.runner.kept.add(residuals)


def _warn_of_lost(lost: Sequence[int], after: Roster) -> None:
    listed = ", ".join(map(str, lost))
    which = f"member {listed} is gone" if len(lost) == 1 else f"members {listed} are gone"
    warn_user(
        f"generation {after.generation}: {which}, with residual and unsent changes; "
        f"{len(after.members)} go on (members {', '.join(map(str, after.members))})",
        RankLostWarning,
    )
