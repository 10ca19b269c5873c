"""Places in a training with servers: who has them at the beginning, and who takes a free one.

Workers and servers that come first found the training. The places of workers that are lost become
free. A process that comes later asks for one (it has a heartbeat), and the first server decides who
is admitted: the number of the heartbeat and the place. Then the process says that it is here, and
connects with all servers. Admissions are numbered, so that all servers handle them in the same
order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from gradwire.torch.errors import (
    CommunicationError,
    JobKeyError,
    PeerLostError,
    PeerSilentError,
    StoreLostError,
)
from gradwire.torch.members.heartbeat import Heartbeat, State
from gradwire.torch.members.membership import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    Membership,
    reaching_store,
)
from gradwire.torch.network.connection import Connection
from gradwire.torch.network.meeting import Meeting
from gradwire.torch.network.sealed_store import Numbers
from gradwire.torch.network.transport import ABORT_SECONDS, T, join
from gradwire.torch.options import Members

_SERVER = "server/{}"
_HERE = "here/{}"


@dataclass(frozen=True)
class Admission:
    """The process whose heartbeat has the number `member` gets the place `rank`."""

    number: int
    member: int
    rank: int


class Places(Membership):
    """This process and its place.

    Attributes:
        rank: Its place; workers have the first ones. None: it joins, and has no place yet.
        servers: The ranks of the servers, which are the last.
    """

    def __init__(self, members: Members, servers: int, patience: float, terms: str) -> None:
        """As Membership. Raises CommunicationError for a server that is one too many."""
        super().__init__(members, patience, terms)
        assert members.role is not None
        self.servers = range(self.ranks - servers, self.ranks)
        number = self._ask(Numbers(self._store, members.role).take)
        self.rank: int | None = number
        if members.role == "server":
            self.rank = self.servers.start + number
            if number >= servers:
                raise CommunicationError(
                    f"this training has its {servers} servers, and no server can join: "
                    "a new one would not have the model. Start all ranks again from a checkpoint, "
                    "with a new store"
                )
        elif number >= self.servers.start:
            self.rank = None

    def founding(self) -> Meeting:
        """Where those meet that begin."""
        assert self.rank is not None
        return Meeting(self._under("founding/"), self.rank, self.ranks)

    def join(self, connect: Callable[[Meeting], T]) -> T:
        """Waits for a free place, and sets `rank`.

        Returns:
            What `connect` makes of the meeting with the servers.

        Raises:
            PeerLostError: A server is gone.
            PeerSilentError: No place becomes free.
        """
        heartbeat = self.live()
        try:
            end = time.monotonic() + self._patience
            number = 0
            while True:
                self._require_servers(heartbeat)
                if (found := self.admission(number)) is not None:
                    number += 1
                    if found.member == heartbeat.id:
                        self.rank = found.rank
                        self._ask(lambda: self._store.set(_HERE.format(found.number), ""))
                        try:
                            return connect(self.meeting(found, None))
                        except (JobKeyError, PeerLostError, PeerSilentError):
                            continue  # a server was late; the next admission has another number
                elif time.monotonic() > end:
                    raise PeerSilentError(
                        f"no place of the {self.servers.start} workers became free within "
                        f"{self._patience:g} s (timeout=): all of them live"
                    )
                else:
                    self._access.pause(LOOK_SECONDS)
        finally:
            heartbeat.stop()

    def meeting(self, admission: Admission, server: int | None) -> Meeting:
        """Where the process that is admitted meets all servers.

        Args:
            server: The rank of this server. None: this is the process.
        """
        numbers = [admission.rank, *self.servers]
        place = 0 if server is None else numbers.index(server)
        store = self._under(f"joining/{admission.number}/")
        return Meeting(store, place, len(numbers), (), CONNECT_SECONDS, numbers)

    def begin_serving(self) -> Heartbeat:
        """Says that this server is there."""
        heartbeat = self.live()
        with reaching_store():
            heartbeat.say(State.MEMBER)
        self._ask(lambda: self._store.set(_SERVER.format(self.rank), str(heartbeat.id)))
        return heartbeat

    def admission(self, number: int) -> Admission | None:
        """The admission of this number, if there is one yet."""
        found = self.decision(number)
        return None if found is None else Admission(**found)

    def admit(self, admission: Admission) -> None:
        """Called by the first server only; see `decide`."""
        self.decide(admission.number, asdict(admission))

    def is_here(self, admission: Admission) -> bool:
        """Whether the process that is admitted waits for the connection."""
        return self._read(_HERE.format(admission.number)) is not None

    def _require_servers(self, heartbeat: Heartbeat) -> None:
        found = {rank: self._read(_SERVER.format(rank)) for rank in self.servers}
        gone = [rank for rank, n in found.items() if n is not None and heartbeat.is_gone(int(n))]
        if gone:
            ranks = ", ".join(map(str, gone))
            raise PeerLostError(
                f"this process can't join: the servers of this store (ranks {ranks}) are gone, or "
                "the training is over. Start all ranks again from a checkpoint, with a new store, "
                "or PrefixStore('a new name', store)",
                tuple(gone),
            )


class Admissions:
    """Connects a server with the processes that are admitted, in a thread of its own. The first
    server decides which are.

    A store that is gone ends nothing: nobody can join until it answers again.
    """

    def __init__(
        self, places: Places, timeout: float, on_arrival: Callable[[int, Connection], None]
    ) -> None:
        """Begins to admit processes.

        Args:
            timeout: Seconds, of the connections.
            on_arrival: Called in the thread, with the place of a process and the connection, which
                has all servers in it.
        """
        assert places.rank is not None
        self._places, self._timeout, self._on_arrival = places, timeout, on_arrival
        self._rank: int = places.rank
        self._decides = self._rank == places.servers.start
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
        left = self._places.leave()
        return join([self._thread], ABORT_SECONDS) and left

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(LOOK_SECONDS):
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
        end = time.monotonic() + self._places.lost_after
        while not self._places.is_here(admission):
            is_late = time.monotonic() > end or self._heartbeat.is_gone(admission.member)
            if is_late or self._stopping.wait(LOOK_SECONDS):
                raise PeerLostError("the process that was admitted did not come", ())
