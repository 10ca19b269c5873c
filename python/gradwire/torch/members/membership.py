"""This process among the members of a training: it joins, meets the others again, and leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from torch.distributed.distributed_c10d import Store

from gradwire.torch.link.errors import (
    CommunicationError,
    ExpelledError,
    PeerLostError,
    PeerSilentError,
    StoreLostError,
)
from gradwire.torch.link.meeting import Meeting
from gradwire.torch.link.sealed_store import read, under
from gradwire.torch.link.store_access import StoreAccess
from gradwire.torch.members.heartbeat import Heartbeat, State
from gradwire.torch.members.meeting_store import clone, enter, reaching_store
from gradwire.torch.members.roster import Report, Roster, follow, found_training

_LOOK_SECONDS = 0.05  # between two looks at the store
_CONNECT_SECONDS = 30.0  # all come at the same time, when the generation is decided
_ROSTER = "roster/{}"
_REPORT = "report/{}/{}"

T = TypeVar("T")


@dataclass(frozen=True)
class MemberSettings:
    """See LocalSteps. `patience`: seconds to wait for members that live but do not come."""

    ranks: int
    min_ranks: int
    lost_after: float
    patience: float

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be."""
        if not 1 <= self.min_ranks <= self.ranks:
            raise ValueError(
                f"ranks is {self.ranks} and min_ranks {self.min_ranks}: at least one rank must go "
                "on, and no more can be asked for than begin"
            )
        if not (math.isfinite(self.lost_after) and self.lost_after > 0):
            raise ValueError(f"lost_after is {self.lost_after}; it is a number of seconds")


class Membership:
    """Lasts until `leave`, or until an error ends it."""

    def __init__(self, store: Store, settings: MemberSettings, terms: str) -> None:
        """Compares `terms`, the settings that all members must share, with those in the store.

        Raises PeerMismatchError if they differ, and StoreLostError if the store is gone. The
        members do not notice.
        """
        self._settings = settings
        self._access = StoreAccess()
        self._store = enter(store, "gradwire/members/", self._access, terms)
        with reaching_store():
            self._heartbeat = Heartbeat(clone(self._store, self._access), settings.lost_after)
        self._roster: Roster | None = None
        self._error: Exception | None = None

    @property
    def id(self) -> int:
        return self._heartbeat.id

    @property
    def roster(self) -> Roster:
        assert self._roster is not None, "join comes first"
        return self._roster

    def check(self) -> None:
        """Raises the error that ended the membership."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def join(self) -> Roster:
        """Waits until this process is in a generation, the first or a later one.

        Raises PeerLostError if the members that once were are all gone, PeerSilentError if they do
        not let it in, or not enough come.
        """
        end = time.monotonic() + self._settings.patience
        while True:
            latest = self._latest()
            if latest is not None and self.id in latest.members:
                return self._accept(latest)
            asking = self._heartbeat.asking()
            if latest is None and len(asking) >= self._settings.ranks:
                self._propose(found_training(asking))
                continue
            if latest is not None and all(map(self._heartbeat.is_gone, latest.members)):
                self.fail(
                    PeerLostError(
                        f"member {self.id} can't join: the members {list(latest.members)} of this "
                        "store are gone. Start again from a checkpoint, with a new store, or "
                        "PrefixStore('a new name', store)"
                    )
                )
            if time.monotonic() > end:
                self.fail(PeerSilentError(self._describe_wait(latest, asking)))
            self._access.pause(_LOOK_SECONDS)

    def meet(self, report: Report) -> Roster:
        """Ends the generation, and waits until the next one is decided.

        Raises ExpelledError if the others went on without this process, PeerLostError if too few
        are left.
        """
        before, number = self.roster, self.roster.generation + 1
        own, text = _REPORT.format(number, self.id), report.to_text()
        end = time.monotonic() + self._settings.patience
        while (after := self._read_roster(number)) is None:
            # Again in each turn: where the store can be reached, a stranger can overwrite it.
            self._ask(lambda: self._store.set(own, text))
            reports = self._ask(lambda: self._reports(before, number))
            late = [m for m in before.members if m not in reports]
            if time.monotonic() > end or all(map(self._heartbeat.is_gone, late)):
                self._propose(follow(before, reports))
            else:
                self._access.pause(_LOOK_SECONDS)
        self._check_goes_on(before, after)
        return self._accept(after)

    def meeting(self) -> Meeting:
        """Where the generation's members connect."""
        roster = self.roster
        store = under(self._store, f"generation/{roster.generation}/")
        place = roster.members.index(self.id)
        seconds = max(_CONNECT_SECONDS, 2 * self._settings.lost_after)
        return Meeting(store, place, len(roster.members), roster.members, seconds)

    def watch(self, on_silence: Callable[[], None]) -> None:
        """Calls it, in another thread, when a member of the generation falls silent."""
        self._heartbeat.watch(self.roster.members, on_silence)

    def asking(self) -> tuple[int, ...]:
        """The processes that ask to join."""
        # A member that was let in a moment ago may still seem to ask.
        return tuple(sorted(set(self._heartbeat.asking()) - set(self.roster.members)))

    @property
    def error(self) -> Exception | None:
        """What ended the membership."""
        return self._error

    def fail(self, error: CommunicationError) -> NoReturn:
        """Ends the membership with this error, and raises it."""
        self._error = error
        self.leave()
        raise error

    def leave(self) -> None:
        """Tells the others, who need not wait for this process then."""
        if self._error is None:
            self._error = CommunicationError("it was closed, and can take no further step")
        self._heartbeat.stop()
        self._access.hurry()

    def _latest(self) -> Roster | None:
        """The last generation that was decided."""
        latest = self._roster
        while found := self._read_roster(0 if latest is None else latest.generation + 1):
            latest = self._roster = found
        return latest

    def _read_roster(self, generation: int) -> Roster | None:
        key = _ROSTER.format(generation)
        (text,) = self._ask(lambda: read(self._store, [key]))
        return None if text is None else Roster.of_text(text)

    def _propose(self, roster: Roster) -> None:
        """The first roster of a generation that reaches the store is valid."""
        key = _ROSTER.format(roster.generation)
        self._ask(lambda: self._store.compare_set(key, "", roster.to_text()))

    def _reports(self, roster: Roster, number: int) -> dict[int, Report]:
        found = read(self._store, [_REPORT.format(number, member) for member in roster.members])
        texts = zip(roster.members, found, strict=True)
        return {member: Report.of_text(text) for member, text in texts if text is not None}

    def _accept(self, roster: Roster) -> Roster:
        self._roster = roster
        with reaching_store():
            self._heartbeat.say(State.MEMBER)
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
                    f"{self._settings.lost_after:g} s (lost_after), or did not come to an exchange "
                    f"within {self._settings.patience:g} s (timeout). Members "
                    f"{list(after.members)} went on without it. Make a new LocalSteps, which joins "
                    "them and takes over their model; what this process changed since its last "
                    "exchange is lost",
                    (self.id,),
                )
            )
        if len(after.members) < self._settings.min_ranks:
            lost = tuple(sorted(set(before.members) - set(after.members)))
            self.fail(
                PeerLostError(
                    f"members {list(lost)} are gone, and {len(after.members)} are left, fewer "
                    f"than min_ranks={self._settings.min_ranks}: start again from a checkpoint, "
                    "with a new store",
                    lost,
                )
            )

    def _describe_wait(self, latest: Roster | None, asking: list[int]) -> str:
        waited = f"member {self.id} waited {self._settings.patience:g} s (timeout=)"
        if latest is None:
            return f"{waited}: {len(asking)} of {self._settings.ranks} ranks came to begin"
        return (
            f"{waited}, and members {list(latest.members)} did not let it in, which they do after "
            "an exchange: give a longer timeout than they need from one exchange to the next"
        )

    def _ask(self, call: Callable[[], T]) -> T:
        failure = self._heartbeat.failure
        if failure is not None:
            error = CommunicationError(
                f"member {self.id} can't go on: its heartbeat, by which the others know that it "
                f"lives, ended with {type(failure).__name__}: {failure}"
            )
            error.__cause__ = failure
            self.fail(error)
        try:
            with reaching_store():
                return self._access.ask(call)
        except StoreLostError as error:
            self.fail(error)
