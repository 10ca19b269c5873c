"""The process that keeps the versions of a GroupFolder, and answers all others."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from torch.distributed.distributed_c10d import Store

from gradwire.errors import warn_user
from gradwire.strict_json import parse_json
from gradwire.torch.errors import CommunicationError, PeerLostError, RankLostWarning
from gradwire.torch.members.heartbeat import make_access
from gradwire.torch.members.membership import CONNECT_SECONDS, enter, reaching_store
from gradwire.torch.network.meeting import Meeting, connect
from gradwire.torch.network.sealed_store import (
    Numbers,
    StoreUnreachableError,
    exist,
    under,
)
from gradwire.torch.network.transport import (
    ABORT_SECONDS,
    TEXT_BYTES,
    Kind,
    Received,
    Transport,
    join,
)
from gradwire.weights.folder import Folder

PIECE_BYTES = 1 << 26  # of a file, in one message
_PLACE, _JOIN, _DONE = "gradwire/weights/", "join", "done/{}"
_LOOK_SECONDS = 0.2  # between two looks for who joins


class Question(IntEnum):
    """What is wanted of the folder: the `part` of an ASK, whose JSON has the arguments."""

    READ = 0  # a file's name, from which byte, to which
    WRITE = 1  # a file's name, whether it must be new; its bytes were PUT before
    NAMES = 2


class Answer(IntEnum):
    """What became of a question: the `part` of its answer."""

    FOUND = 0
    NOT_FOUND = 1
    IS_THERE = 2
    FAILED = 3


@dataclass(eq=False)
class Link:
    """A connection to another process.

    Attributes:
        rank: In the world; None: it has joined by a store.
        name: For errors.
        is_source: Whether it publishes, too.
        sending: One thread at a time may send over the wire.
        pieces: Of the file that it writes.
    """

    wire: Transport
    peer: int
    rank: int | None
    name: str
    is_source: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)
    pieces: list[Any] = field(default_factory=list)


class Keeper:
    """The files, and what is known of those who read them.

    Attributes:
        left: Those that have left or are lost, as it happens.
    """

    def __init__(self, files: Folder) -> None:
        self.files = files
        self.links: list[Link] = []
        self.left: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.admission: Admission | None = None
        self._lost: list[tuple[Link, str]] = []
        self._readers: list[threading.Thread] = []
        self._serving = threading.Lock()  # several may join at once
        self._has_ended = False

    def serve(self, link: Link) -> None:
        """Answers from now on, unless `end` was called."""
        limits = {Kind.ASK: TEXT_BYTES, Kind.LEAVE: 0}
        if link.is_source:
            limits[Kind.PUT] = PIECE_BYTES
        with self._serving:
            if self._has_ended:
                link.wire.abort()
                link.wire.drop()
                return
            self.links.append(link)
            self._readers = [thread for thread in self._readers if thread.is_alive()]
            self._readers += link.wire.listen(link.peer, limits, partial(self._take, link))

    def report_lost(self) -> None:
        """Tells once of each that has ended without a word.

        A receiver that has joined may go and come: a RankLostWarning. So may a rank that only
        receives where several publish, because the other publishers would wait for one that raised
        an error. PeerLostError for all other ranks.
        """
        lost = [self._lost.pop(0) for _ in range(len(self._lost))]  # other threads add to it
        several = any(link.is_source for link in list(self.links))
        ranks, reason = [], ""
        for link, why in lost:
            if link.rank is not None and (link.is_source or not several):
                ranks.append(link.rank)
                reason = reason or why
            else:
                said = f"{link.name} is gone ({why}) and fetches no more versions"
                warn_user(said, RankLostWarning)
        if ranks:
            again = "and fetches no more versions. Call again to go on without it"
            if several:
                again = "and a version needs the parts of all ranks: start them again"
            raise PeerLostError(
                f"rank {', '.join(map(str, ranks))} is gone ({reason}) {again}", tuple(ranks)
            )

    def end(self) -> None:
        if self.admission is not None:
            self.admission.end()
        with self._serving:
            self._has_ended = True
        wires = {id(link.wire): link.wire for link in self.links}.values()
        for wire in wires:
            wire.abort()
        join(self._readers, ABORT_SECONDS)
        for wire in wires:
            wire.drop()

    def _take(self, link: Link, message: Received | Exception) -> None:
        """A message, or the error that ended the connection."""
        error: Exception | None = None
        if isinstance(message, Exception):
            error = message
        elif message.kind is Kind.PUT and link.is_source:
            link.pieces.append(message.payload)
            return
        elif message.kind is Kind.ASK:
            try:
                self._answer(link, message)
                return
            except Exception as raised:
                error = raised
        elif message.kind is not Kind.LEAVE:
            error = ValueError(f"it sent a {message.kind.label}")
        if error is not None:
            self._lost.append((link, str(error) or type(error).__name__))
        is_last = isinstance(message, Exception) or message.kind is Kind.LEAVE
        if link.rank is None and is_last:  # others may come, without end
            self.links.remove(link)
            link.wire.drop()
        self.left.put(link)

    def _answer(self, link: Link, message: Received) -> None:
        arguments, part = parse_json(message.payload.tobytes(), 1), Answer.FOUND
        data = b""
        try:
            match Question(message.part):
                case Question.READ:
                    data = self._read(*arguments)
                case Question.WRITE:
                    self._write(link, *arguments)
                case Question.NAMES:
                    data = json.dumps(self.files.names()).encode()
        except FileNotFoundError:
            part = Answer.NOT_FOUND
        except FileExistsError:
            part = Answer.IS_THERE
        except CommunicationError:  # no question that a receiver asks
            raise
        except Exception as error:  # of many kinds, where fsspec opens the folder
            data, part = (str(error) or type(error).__name__).encode(), Answer.FAILED
        with link.sending:
            link.wire.flush(link.peer)  # it has the last answer, or it would not ask
            link.wire.send(link.peer, Kind.ANSWER, np.frombuffer(data, np.uint8), part)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        if os.path.basename(name) != name or not 0 <= begin <= end <= begin + PIECE_BYTES:
            raise CommunicationError(f"it asks for {name!r}, {begin} to {end}")
        return self.files.read(name, begin, end)

    def _write(self, link: Link, name: str, only_new: bool) -> None:
        pieces, link.pieces = link.pieces, []
        if os.path.basename(name) != name or not link.is_source:
            raise CommunicationError(f"it writes {name!r}")
        self.files.write(name, pieces, only_new)


class Admission:
    """Connects with the processes that join by a store, each when it comes."""

    def __init__(self, keeper: Keeper, store: Store) -> None:
        self._keeper, self._access = keeper, make_access(0.0)
        self._records = enter(store.clone(), _PLACE, self._access, "weights")  # type: ignore[attr-defined]
        self._numbers = Numbers(self._records, _JOIN)
        self._is_begun: dict[int, bool] = {}  # of the numbers that this keeper has marked
        self._threads = [threading.Thread(target=self._admit, name="gradwire-admit", daemon=True)]
        self._threads[0].start()

    def end(self) -> None:
        self._access.hurry()
        join(self._threads, ABORT_SECONDS)

    def _admit(self) -> None:
        number = 0
        while not self._access.pause(_LOOK_SECONDS):
            with contextlib.suppress(StoreUnreachableError):  # nobody can join until it answers
                while self._access.ask(partial(self._take_up, number)):
                    number += 1

    def _take_up(self, number: int) -> bool:
        """Whether a process has this number. Connects with it once, unless an earlier keeper has.
        It may be called again where the store has not answered."""
        if not self._numbers.are_taken(number):
            return False
        if number in self._is_begun or not exist(self._records, [_DONE.format(number)]):
            self._is_begun.setdefault(number, False)
            self._records.set(_DONE.format(number), "")
            if self._numbers.is_ours(number) and not self._is_begun[number]:
                self._is_begun[number] = True
                self._begin(number)
        return True

    def _begin(self, number: int) -> None:
        thread = threading.Thread(
            target=self._connect, args=(number,), name="gradwire-admit", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _connect(self, number: int) -> None:
        try:
            meeting = meeting_of(self._records, number, place=0)
            wire, _, _ = connect(meeting, CONNECT_SECONDS)
        except CommunicationError:  # it has ended meanwhile; if it still lives, it has the error
            return
        self._keeper.serve(Link(wire, 1, None, f"receiver {number}, which has joined,"))


def join_keeper(store: Store, timeout: float) -> Transport:
    """Connects with the keeper; there it is rank 0. Raises CommunicationError."""
    access = make_access(0.0)
    with reaching_store():
        own: Store = access.ask(store.clone)  # type: ignore[attr-defined]
        records = enter(own, _PLACE, access, "weights")
        number = access.ask(Numbers(records, _JOIN).take)
    wire, _, _ = connect(meeting_of(records, number, place=1), timeout)
    return wire


def meeting_of(records: Store, number: int, place: int) -> Meeting:
    """Where the keeper, in place 0, and the process with this number meet."""
    own = under(records.clone(), f"{_JOIN}ing/{number}/")  # type: ignore[attr-defined]
    return Meeting(own, place, 2)
