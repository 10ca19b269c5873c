"""Lets processes take the places of lost workers, in a thread of each server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from gradwire.torch.link.connection import Connection
from gradwire.torch.link.errors import (
    JobKeyError,
    PeerLostError,
    PeerSilentError,
    StoreLostError,
)
from gradwire.torch.link.thread import ABORT_SECONDS, join
from gradwire.torch.members.places import Admission, Places

_LOOK_SECONDS = 0.1  # between two looks at the store


class Admissions:
    """Connects with the processes that are admitted. The first server decides which are.

    A store that is gone ends nothing: nobody can join until it answers again.
    """

    def __init__(
        self, places: Places, timeout: float, on_arrival: Callable[[int, Connection], None]
    ) -> None:
        """timeout: of the connections. on_arrival: called in the thread, with the place of a
        process and the connection, which has all servers in it."""
        assert places.rank is not None
        self._places, self._timeout, self._on_arrival = places, timeout, on_arrival
        self._rank: int = places.rank
        self._decides = self._rank == places.settings.workers
        self._heartbeat = places.begin_serving()
        self._free: set[int] = set()
        # By place: the heartbeat of the process that connected last. It may still seem to ask.
        self._holders: dict[int, int] = {}
        self._changing = threading.Lock()  # of `_free` and `_holders`
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-admissions", daemon=True)
        self._thread.start()

    def offer(self, rank: int) -> None:
        """The place of this rank is free. If the process that had it lives, it may ask again."""
        with self._changing:
            self._free.add(rank)
            self._holders.pop(rank, None)

    def stop(self) -> bool:
        """Admits nobody any more. Returns whether all threads have ended."""
        self._stopping.set()
        self._places.hurry()
        ended = join([self._thread], ABORT_SECONDS)
        return self._heartbeat.stop() and ended

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(_LOOK_SECONDS):
            with contextlib.suppress(StoreLostError):
                if self._decides:
                    self._decide(number)
                admission = self._places.admission(number)
                if admission is not None:
                    number += 1
                    with self._changing:
                        self._free.discard(admission.rank)
                    self._connect(admission)

    def _decide(self, number: int) -> None:
        """Gives the lowest free place to the process that has asked first."""
        with self._changing:
            asking = set(self._heartbeat.asking()) - set(self._holders.values())
            rank = min(self._free, default=None)
        if asking and rank is not None:
            self._places.admit(Admission(number, min(asking), rank))

    def _connect(self, admission: Admission) -> None:
        try:
            self._await(admission)
            meeting = self._places.meeting(admission, self._rank)
            connection = Connection(meeting, self._timeout)
        except (JobKeyError, PeerLostError, PeerSilentError, StoreLostError):
            # It is gone again, or a stranger came; if it lives, it still asks.
            if self._decides:
                self.offer(admission.rank)
            return
        with self._changing:
            self._holders[admission.rank] = admission.member
        self._on_arrival(admission.rank, connection)

    def _await(self, admission: Admission) -> None:
        """Waits until the process is where all connect. Raises PeerLostError if it is gone."""
        end = time.monotonic() + self._places.settings.lost_after
        while not self._places.is_here(admission):
            is_late = time.monotonic() > end or self._heartbeat.is_gone(admission.member)
            if is_late or self._stopping.wait(_LOOK_SECONDS):
                raise PeerLostError("the process that was admitted did not come", ())
