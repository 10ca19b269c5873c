"""Places in a training with servers: who has them at the beginning, and who takes a free one.

Workers and servers that come first found the training. The places of workers that are lost become
free. A process that comes later asks for one (it has a heartbeat), and the first server admits it:
it writes the number of the heartbeat and the place into the store. Then the process says that it is
here, and connects with all servers. Admissions are numbered, so that all servers handle them in the
same order.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from gradwire.torch.link.errors import (
    CommunicationError,
    JobKeyError,
    PeerLostError,
    PeerSilentError,
)
from gradwire.torch.link.meeting import Meeting
from gradwire.torch.link.sealed_store import Numbers, read, under
from gradwire.torch.link.store_access import StoreAccess
from gradwire.torch.members.heartbeat import Heartbeat, State
from gradwire.torch.members.meeting_store import clone, enter, reaching_store

LOST_AFTER = 30.0  # seconds, if nothing else is given
_LOOK_SECONDS = 0.05  # between two looks at the store
_CONNECT_SECONDS = 30.0  # both sides come at the same time
_SERVER = "server/{}"
_ADMISSION = "admission/{}"
_HERE = "here/{}"

T = TypeVar("T")


class Role(StrEnum):
    WORKER = "worker"
    SERVER = "server"


@dataclass(frozen=True)
class PlaceSettings:
    """workers, servers: places. lost_after: seconds; see Heartbeat. patience: seconds that a
    process waits for a place."""

    workers: int
    servers: int
    lost_after: float
    patience: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lost_after) and self.lost_after > 0):
            raise ValueError(f"lost_after is {self.lost_after}; it is a number of seconds")

    @property
    def ranks_of_servers(self) -> range:
        return range(self.workers, self.workers + self.servers)


@dataclass(frozen=True)
class Admission:
    """The process whose heartbeat has the number `member` gets the place `rank`."""

    number: int
    member: int
    rank: int


class Places:
    """This process and its place.

    rank   its place: workers have the first ones. None: it joins, and has none yet
    """

    def __init__(self, store: Store, settings: PlaceSettings, role: Role, terms: str) -> None:
        """Compares `terms`, the settings that all must share, with those in the store.

        Raises PeerMismatchError if they differ, StoreLostError if the store is gone, and
        CommunicationError for a server that is one too many.
        """
        self.settings = settings
        self._access = StoreAccess()
        self._store = enter(clone(store, self._access), "gradwire/servers/", self._access, terms)
        number = self._ask(Numbers(self._store, role).take)
        self.rank: int | None = number
        if role is Role.SERVER:
            self.rank = settings.workers + number
            if number >= settings.servers:
                raise CommunicationError(
                    f"this training has its {settings.servers} servers, and no server can join: "
                    "a new one would not have the model. Start all ranks again from a checkpoint, "
                    "with a new store"
                )
        elif number >= settings.workers:
            self.rank = None

    def founding(self) -> Meeting:
        """Where those meet that begin."""
        assert self.rank is not None
        world_size = self.settings.workers + self.settings.servers
        store = under(clone(self._store, self._access), "founding/")
        return Meeting(store, self.rank, world_size)

    def join(self, connect: Callable[[Meeting], T]) -> T:
        """Waits for a free place, sets `rank`, and returns what `connect` makes of the meeting with
        the servers.

        Raises PeerLostError if a server is gone, PeerSilentError if no place becomes free.
        """
        with reaching_store():
            heartbeat = Heartbeat(clone(self._store, self._access), self.settings.lost_after)
        try:
            end = time.monotonic() + self.settings.patience
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
                        f"no place of the {self.settings.workers} workers became free within "
                        f"{self.settings.patience:g} s (timeout=): all of them live"
                    )
                else:
                    self._access.pause(_LOOK_SECONDS)
        finally:
            heartbeat.stop()

    def meeting(self, admission: Admission, server: int | None) -> Meeting:
        """Where the process that is admitted meets all servers. server: the rank of this one; None:
        this is the process."""
        numbers = [admission.rank, *self.settings.ranks_of_servers]
        place = 0 if server is None else numbers.index(server)
        store = under(clone(self._store, self._access), f"joining/{admission.number}/")
        return Meeting(store, place, len(numbers), (), _CONNECT_SECONDS, numbers)

    # A server ----------------------------------------------------------------------------------

    def begin_serving(self) -> Heartbeat:
        """Says that this server is there."""
        with reaching_store():
            heartbeat = Heartbeat(clone(self._store, self._access), self.settings.lost_after)
            heartbeat.say(State.MEMBER)
        self._ask(lambda: self._store.set(_SERVER.format(self.rank), str(heartbeat.id)))
        return heartbeat

    def admit(self, admission: Admission) -> None:
        """Called by the first server only. If the store did not answer, it may be called again,
        also with another admission of this number: the first that reached the store is valid."""
        key, text = _ADMISSION.format(admission.number), json.dumps(asdict(admission))
        self._ask(lambda: self._store.compare_set(key, "", text))

    def admission(self, number: int) -> Admission | None:
        """The admission of this number, if there is one yet."""
        text = self._read(_ADMISSION.format(number))
        return None if text is None else Admission(**json.loads(text))

    def is_here(self, admission: Admission) -> bool:
        """Whether the process that is admitted waits for the connection."""
        return self._read(_HERE.format(admission.number)) is not None

    def hurry(self) -> None:
        """Ends all waits for the store."""
        self._access.hurry()

    def _require_servers(self, heartbeat: Heartbeat) -> None:
        found = {rank: self._read(_SERVER.format(rank)) for rank in self.settings.ranks_of_servers}
        gone = [rank for rank, n in found.items() if n is not None and heartbeat.is_gone(int(n))]
        if gone:
            ranks = ", ".join(map(str, gone))
            raise PeerLostError(
                f"this process can't join: the servers of this store (ranks {ranks}) are gone, or "
                "the training is over. Start all ranks again from a checkpoint, with a new store, "
                "or PrefixStore('a new name', store)",
                tuple(gone),
            )

    def _read(self, key: str) -> bytes | None:
        return self._ask(lambda: read(self._store, [key]))[0]

    def _ask(self, call: Callable[[], T]) -> T:
        with reaching_store():
            return self._access.ask(call)
