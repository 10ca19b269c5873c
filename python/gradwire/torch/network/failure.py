"""Finds out which rank is to blame when a connection breaks.

One dead rank breaks many connections: its own, and those of the ranks that stop because of it. So
every rank that stops leaves a report in the group's store before it closes its connections. The
report says for which ranks the rank waited, or which error it had. The culprits are the ranks that
others waited for and that left no report.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch.distributed as dist

from gradwire.torch.errors import (
    CommunicationError,
    PeerLostError,
    PeerSilentError,
    PeerStoppedError,
)
from gradwire.torch.network.sealed_store import (
    StoreAccess,
    StoreUnreachableError,
    read,
    sealed,
    under,
)
from gradwire.torch.network.transport import MakesTransports

GRACE_SECONDS = 1.0  # for the reports of ranks that fail at the same moment
TIMEOUT_SPREAD_SECONDS = 3.0  # the same, of ranks that each waited for their own timeout
LINGER_SECONDS = 10.0  # how long rank 0, which may host the store, waits for readers

# Keys of the store, for each rank.
_STOPPED = "gradwire/stopped/{}"
_LEFT = "gradwire/left/{}"


@dataclass(frozen=True)
class FailureReport:
    """Why a rank stopped: an `error` of its own, or the ranks that it waited for in vain."""

    waited_for: Sequence[int] = ()
    silent: bool = False
    error: str = ""


class FailureBoard:
    """The reports of the ranks of one group, or of several whose errors have one cause.

    A rank ends once, with one report and one error, whichever of its connections breaks first. Then
    the others break off, too: their peers must not wait for a rank that ends.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined] # PyTorch hides it from checkers
        rank: int,
        ranks: Collection[int],
    ) -> None:
        """rank: this one. ranks: all of the group, this one among them."""
        self._store = store
        self._rank = rank
        self._ranks = sorted(ranks)
        is_apart = dist.is_initialized() and not isinstance(dist.group.WORLD, MakesTransports)
        self._may_host_store = is_apart and dist.get_rank() == 0
        self._access = StoreAccess()
        self._judging = threading.Lock()
        self._has_reported = False
        self._break_offs: list[Callable[[], None]] = []
        self.error: Exception | None = None  # why this rank ends

    @classmethod
    def of_world(cls, ranks: Collection[int]) -> FailureBoard:
        """For several groups, of the world's `ranks`. Each of them must call this, as often as the
        others."""
        assert dist.group.WORLD is not None, "init_process_group was not called"
        store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
        name = "gradwire/board/" + hashlib.sha256(str(sorted(ranks)).encode()).hexdigest()[:16]
        number = store.add(f"{name}/{rank}", 1)
        return cls(under(sealed(store), f"{name}/{number}"), rank, ranks)

    def add_connection(self, break_off: Callable[[], None]) -> None:
        """break_off: ends all waits for the connection's peers, who see that this rank ends."""
        self._break_offs.append(break_off)

    def break_off(self) -> None:
        """Breaks off all connections."""
        for break_off in self._break_offs:
            break_off()

    def announce(self, error: Exception) -> None:
        """Leaves a report of this rank's own error, if the store can be reached."""
        with contextlib.suppress(StoreUnreachableError), self._judging:
            self.error = self.error or error
            self._write(FailureReport(error=f"{type(error).__name__}: {error}"))
            self.leave()

    def diagnose(
        self,
        lost: tuple[int, ...],
        silent: bool,
        when: str,
        closed: tuple[int, ...] = (),
        patience: float = GRACE_SECONDS,
    ) -> Exception:
        """The error to raise where the connections to the ranks `lost` broke.

        `silent`: nothing came for the whole timeout, though the connection is open.
        `when` goes into the message: what this rank was doing, and what the system said.
        `closed`: ranks whose connections are closed, too, though this rank did not wait for them.
        `patience`: seconds for the reports of the others.
        """
        with self._judging:
            if self.error is not None:
                return self.error
            try:
                self._write(FailureReport(waited_for=lost, silent=silent))
                self._access.pause(patience)
                reports = self._read()
            except StoreUnreachableError as error:
                if 0 in closed and not silent:
                    lost = (0,)  # the store ended with rank 0, and others stopped because of that
                self.error = _judge_without_store(lost, silent, when, str(error))
            else:
                self.leave()
                self.error = _judge(reports, lost, when)
            return self.error

    def leave(self) -> None:
        """Tells rank 0 that this rank needs the store no more."""
        with contextlib.suppress(StoreUnreachableError):
            self._access.ask(lambda: self._store.set(_LEFT.format(self._rank), ""))

    def linger(self) -> None:
        """Keeps the store alive: rank 0, which may host it, waits until all but the ranks that
        `error` blames left.

        Called after this rank's connections are closed, and before the program sees the error.
        """
        if not self._may_host_store:
            return
        culprits = self.error.ranks if isinstance(self.error, CommunicationError) else ()
        end = time.monotonic() + LINGER_SECONDS
        keys = [_LEFT.format(rank) for rank in self._ranks if rank not in culprits]
        with contextlib.suppress(StoreUnreachableError):  # then no other rank can read it either
            while time.monotonic() < end and not self._access.ask(lambda: self._store.check(keys)):
                self._access.pause(0.1)

    def _write(self, report: FailureReport) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        text = json.dumps(asdict(report))
        self._access.ask(lambda: self._store.set(_STOPPED.format(self._rank), text))

    def _read(self) -> dict[int, FailureReport]:
        def collect() -> dict[int, FailureReport]:
            found = read(self._store, [_STOPPED.format(rank) for rank in self._ranks])
            texts = {r: text for r, text in zip(self._ranks, found, strict=True) if text}
            return {rank: FailureReport(**json.loads(text)) for rank, text in texts.items()}

        return self._access.ask(collect)

    def hurry(self) -> None:
        """Ends all waits for the store and for other ranks, because the program exits."""
        self._access.hurry()

    def finisher(self, stop: Callable[[], bool]) -> Callable[[], None]:
        """What ends all waits, and calls `stop`, which ends the owner's threads. It does not know
        the board, whose error knows frames of the program, and through them the owner."""
        return partial(_finish, self._access, self._rank, stop)

    def warn_of_threads(self, ended: bool) -> None:
        """Says on stderr if a thread still waits. `ended`: whether the owner's threads ended."""
        self._access.warn_of_threads(self._rank, ended)


def _finish(access: StoreAccess, rank: int, stop: Callable[[], bool]) -> None:
    access.hurry()
    access.warn_of_threads(rank, stop())


def _judge(
    reports: dict[int, FailureReport], lost: tuple[int, ...], when: str
) -> CommunicationError:
    stopped = {rank: report.error for rank, report in reports.items() if report.error}
    if stopped:
        words = "; ".join(f"rank {rank} stopped: {text}" for rank, text in stopped.items())
        return PeerStoppedError(f"{words} (noticed: {when})", tuple(stopped))
    waited_for = {rank for report in reports.values() for rank in report.waited_for}
    culprits = tuple(sorted(waited_for - reports.keys())) or lost
    witnesses = [report for report in reports.values() if set(report.waited_for) & set(culprits)]
    if witnesses and all(report.silent for report in witnesses):
        return PeerSilentError(f"{_name(culprits)} sent nothing; {when}", culprits)
    return PeerLostError(
        f"{_name(culprits)} {'is' if len(culprits) == 1 else 'are'} gone; {when}", culprits
    )


def _judge_without_store(
    lost: tuple[int, ...], silent: bool, when: str, why: str
) -> CommunicationError:
    hosted = "the process group's store, hosted by rank 0 unless a launcher hosts it, is gone"
    if silent:
        return PeerSilentError(
            f"{_name(lost)} sent nothing; {hosted} too ({why})"
            f"{'' if lost == (0,) else ', so rank 0 may be the first that is silent'}; {when}",
            lost,
        )
    if lost == (0,):
        return PeerLostError(f"rank 0 is gone, and with it the store ({why}); {when}", lost)
    return PeerLostError(
        f"the connection to {_name(lost)} closed; {hosted} too ({why}), so rank 0 may be "
        f"the first that is gone; {when}",
        lost,
    )


def _name(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
