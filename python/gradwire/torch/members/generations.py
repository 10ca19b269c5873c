"""Equal ranks that come and go, in generations: who belongs to one, and what they do first.

Every member has an id, which no other process ever has. When a member is lost, or processes ask to
join, the members of a generation report how far they are. From the reports anyone can propose the
next generation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from gradwire.torch.errors import CommunicationError, ExpelledError, PeerLostError, PeerSilentError
from gradwire.torch.members.heartbeat import State
from gradwire.torch.members.membership import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    Membership,
    reaching_store,
)
from gradwire.torch.network.connection import closed
from gradwire.torch.network.meeting import Meeting
from gradwire.torch.network.sealed_store import read
from gradwire.torch.network.transport import T
from gradwire.torch.options import Members

_REPORT = "report/{}/{}"


@dataclass(frozen=True)
class MemberReport:
    """How far a member is when its generation ends.

    Attributes:
        done: Exchanges that it has finished. None: it never had the others' model.
        steps: Local steps so far.
        unsent: Local steps since the last exchange, of each fragment of the model.
        asking: Processes that this member has seen to ask to join.
    """

    done: int | None
    steps: int = 0
    unsent: tuple[int, ...] = ()
    asking: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Roster:
    """The members of a generation.

    Attributes:
        members: Ids, ascending. The place of an id is the rank of its process.
        source: The member that gives its model to the receivers.
        receivers: Members that are an exchange behind, and newcomers.
        done: Exchanges that count. A member that has finished fewer is a receiver.
        steps: Local steps that count on all members from now on.
        unsent: What the members exchange first, as in MemberReport.
        is_over: No process is left that has the model.
    """

    generation: int
    members: tuple[int, ...]
    source: int
    receivers: tuple[int, ...]
    done: int
    steps: int
    unsent: tuple[int, ...]
    is_over: bool = False


def _as_tuples(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report or a roster, of which JSON has lists."""
    return {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}


class Generations(Membership):
    """This process among equal ranks. Lasts until `leave`, or until an error ends it.

    Attributes:
        error: What ended the membership.
    """

    def __init__(self, members: Members, patience: float, terms: str) -> None:
        """As Membership; the others see that this process asks to join."""
        super().__init__(members, patience, terms)
        self._min_ranks = members.min_ranks
        self._beat = self.live()
        self.id = self._beat.id
        self._roster: Roster | None = None
        self.error: Exception | None = None

    @property
    def roster(self) -> Roster:
        assert self._roster is not None, "join comes first"
        return self._roster

    def check(self) -> None:
        """Raises the error that ended the membership."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def join(self) -> Roster:
        """Waits until this process is in a generation, the first or a later one.

        Raises PeerLostError if the members that once were are all gone, PeerSilentError if they do
        not let it in, or not enough come.
        """
        end = time.monotonic() + self._patience
        while True:
            latest = self._latest()
            if latest is not None and self.id in latest.members:
                return self._accept(latest)
            asking = self._beat.asking()
            if latest is None and len(asking) >= self.ranks:
                self.decide(0, asdict(found_training(asking)))
                continue
            if latest is not None and all(map(self._beat.is_gone, latest.members)):
                self.fail(
                    PeerLostError(
                        f"member {self.id} can't join: the members {list(latest.members)} of this "
                        "store are gone. Start again from a checkpoint, with a new store, or "
                        "PrefixStore('a new name', store)"
                    )
                )
            if time.monotonic() > end:
                self.fail(PeerSilentError(self._describe_wait(latest, asking)))
            self._access.pause(LOOK_SECONDS)

    def meet(self, report: MemberReport) -> Roster:
        """Ends the generation, and waits until the next one is decided.

        Raises ExpelledError if the others went on without this process, PeerLostError if too few
        are left.
        """
        before, number = self.roster, self.roster.generation + 1
        own, text = _REPORT.format(number, self.id), report.to_text()
        end = time.monotonic() + self._patience
        while (after := self._read_roster(number)) is None:
            # Again in each turn: where the store can be reached, a stranger can overwrite it.
            self._ask(lambda: self._store.set(own, text))
            reports = self._ask(lambda: self._reports(before, number))
            late = [m for m in before.members if m not in reports]
            if time.monotonic() > end or all(map(self._beat.is_gone, late)):
                self.decide(number, asdict(follow(before, reports)))
            else:
                self._access.pause(LOOK_SECONDS)
        self._check_goes_on(before, after)
        return self._accept(after)

    def meeting(self) -> Meeting:
        """Where the generation's members connect."""
        roster = self.roster
        store = self._under(f"generation/{roster.generation}/")
        place = roster.members.index(self.id)
        seconds = max(CONNECT_SECONDS, 2 * self.lost_after)
        return Meeting(store, place, len(roster.members), roster.members, seconds)

    def watch(self, on_silence: Callable[[], None]) -> None:
        """Calls it, in another thread, when a member of the generation falls silent."""
        self._beat.watch(self.roster.members, on_silence)

    def asking(self) -> tuple[int, ...]:
        """The processes that ask to join."""
        # A member that was let in a moment ago may still seem to ask.
        return tuple(sorted(set(self._beat.asking()) - set(self.roster.members)))

    def fail(self, error: CommunicationError) -> NoReturn:
        """Ends the membership with this error, and raises it."""
        self.error = error
        self.leave()
        raise error

    def leave(self) -> bool:
        if self.error is None:
            self.error = closed()
        return super().leave()

    def _latest(self) -> Roster | None:
        """The last generation that was decided."""
        latest = self._roster
        while found := self._read_roster(0 if latest is None else latest.generation + 1):
            latest = self._roster = found
        return latest

    def _read_roster(self, generation: int) -> Roster | None:
        found = self.decision(generation)
        return None if found is None else Roster(**_as_tuples(found))

    def _reports(self, roster: Roster, number: int) -> dict[int, MemberReport]:
        found = read(self._store, [_REPORT.format(number, member) for member in roster.members])
        texts = zip(roster.members, found, strict=True)
        return {
            member: MemberReport(**_as_tuples(json.loads(text)))
            for member, text in texts
            if text is not None
        }

    def _accept(self, roster: Roster) -> Roster:
        self._roster = roster
        with reaching_store():
            self._beat.say(State.MEMBER)
        return roster

    def _check_goes_on(self, before: Roster, after: Roster) -> None:
        if after.is_over:
            self.fail(
                PeerLostError(
                    "the members that had the model are gone: start again from a checkpoint, with "
                    "a new store"
                )
            )
        if self.id not in after.members:
            self.fail(
                ExpelledError(
                    f"member {self.id} was taken for dead: it was silent for more than "
                    f"{self.lost_after:g} s (lost_after), or did not come to an exchange "
                    f"within {self._patience:g} s (timeout). Members "
                    f"{list(after.members)} went on without it. Make a new LocalSteps, which joins "
                    "them and takes over their model; what this process changed since its last "
                    "exchange is lost",
                    (self.id,),
                )
            )
        if len(after.members) < self._min_ranks:
            lost = tuple(sorted(set(before.members) - set(after.members)))
            self.fail(
                PeerLostError(
                    f"members {list(lost)} are gone, and {len(after.members)} are left, fewer "
                    f"than min_ranks={self._min_ranks}: start again from a checkpoint, "
                    "with a new store",
                    lost,
                )
            )

    def _describe_wait(self, latest: Roster | None, asking: list[int]) -> str:
        waited = f"member {self.id} waited {self._patience:g} s (timeout=)"
        if latest is None:
            return f"{waited}: {len(asking)} of {self.ranks} ranks came to begin"
        return (
            f"{waited}, and members {list(latest.members)} did not let it in, which they do after "
            "an exchange: give a longer timeout than they need from one exchange to the next"
        )

    def _ask(self, call: Callable[[], T]) -> T:
        """An error ends the membership."""
        try:
            return super()._ask(call)
        except CommunicationError as error:
            self.fail(error)


def found_training(founders: Collection[int]) -> Roster:
    """The first generation: all take the model of the lowest."""
    source, *receivers = sorted(founders)
    return Roster(0, (source, *receivers), source, tuple(receivers), 0, 0, ())


def follow(roster: Roster, reports: Mapping[int, MemberReport]) -> Roster:
    """The generation after `roster`, from the reports of its members that are left.

    Processes that ask to join must wait while members have unsent changes, because a newcomer has
    none and would weaken the average.
    """
    has_begun = any(report.done is not None for report in reports.values())
    if not has_begun and (roster.done > 0 or not reports):
        return Roster(roster.generation + 1, (), -1, (), roster.done, 0, (), is_over=True)
    done = max((report.done for report in reports.values() if report.done is not None), default=0)
    up_to_date = [
        member for member, report in reports.items() if report.done == done or not has_begun
    ]
    unsent = tuple(max(s) for s in zip(*(reports[m].unsent for m in up_to_date), strict=True))
    source = min(up_to_date)
    asking = {process for report in reports.values() for process in report.asking}
    members = sorted({*reports, *(() if any(unsent) else asking)})
    receivers = [m for m in members if m not in reports or reports[m].done != done]
    return Roster(
        roster.generation + 1,
        tuple(members),
        source,
        tuple(member for member in receivers if member != source),
        done,
        reports[source].steps,
        unsent,
    )
