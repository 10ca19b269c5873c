"""A counter in the store that shows that this process lives, and a watch on those of the others.

A process counts as gone when its counter has stood still for `lost_after` seconds. The observer
measures them by its own clock, and adds up at most two intervals from one look to the next. So it
takes nobody for dead because it slept itself, or because the store did not answer for a while.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.distributed_c10d import Store

from gradwire.torch.network.sealed_store import Numbers, StoreAccess, StoreUnreachableError, read
from gradwire.torch.network.transport import ABORT_SECONDS, join

_STORE_SECONDS = 30.0  # at least, that the store of members may take to answer
_MOST_INTERVAL = 1.0  # seconds between two beats
_BEATS = 20  # in `lost_after`
_IDS = "id"
_MOST_NEW = 64  # processes that are noticed in one look
_BEAT = "beat/{}"


def make_access(lost_after: float) -> StoreAccess:
    """To the store of members. A loaded machine may take long to answer."""
    return StoreAccess(max(_STORE_SECONDS, lost_after))


class State(StrEnum):
    ASKING = "asking"  # to join
    MEMBER = "member"
    LEFT = "left"


@dataclass
class _Seen:
    """What an observer knows of another process. count: beats so far."""

    state: State
    count: int
    still_seconds: float = 0.0


@dataclass
class _Watch:
    """on_silence: called once; None: it was called, or there is nobody to call."""

    members: Collection[int] = ()
    on_silence: Callable[[], None] | None = None


class Heartbeat:
    """Beats in a thread of its own until `stop`."""

    def __init__(self, store: Store, lost_after: float) -> None:
        """Takes an id. `store`: a client that no other thread uses for long calls.

        Raises StoreUnreachableError.
        """
        self.lost_after = lost_after
        self._store = store
        self._access = make_access(lost_after)
        self._interval = min(_MOST_INTERVAL, lost_after / _BEATS)
        self._ids = Numbers(store, _IDS)
        self._others: list[int] = []
        self._ids_seen = 0  # others and strangers
        self.id = self._access.ask(self._ids.take)
        self._state = State.ASKING
        self._count = 0
        self._seen: dict[int, _Seen] = {}
        self._seen_lock = threading.Lock()
        self._beating = threading.Lock()
        self._watch = _Watch()
        self.store_error = ""  # why the store counts as gone
        self.failure: Exception | None = None  # that ended the thread: the others see no more beats
        self._stopping = threading.Event()
        self.say(State.ASKING)
        self._thread = threading.Thread(target=self._run, name="gradwire-heartbeat", daemon=True)
        self._thread.start()

    def say(self, state: State) -> None:
        """Tells the others. Raises StoreUnreachableError."""
        with self._beating:
            self._state = state
            self._beat()

    def is_gone(self, member: int) -> bool:
        """Whether it left, or its counter stands still."""
        with self._seen_lock:
            seen = self._seen.get(member)
        return seen is not None and (seen.state is State.LEFT or self._is_silent(seen))

    def asking(self) -> list[int]:
        """The processes that live and ask to join, this one among them if it does."""
        with self._seen_lock:
            others = dict(self._seen)
        found = [
            member
            for member, seen in others.items()
            if seen.state is State.ASKING and not self._is_silent(seen)
        ]
        return found + ([self.id] if self._state is State.ASKING else [])

    def watch(self, members: Collection[int], on_silence: Callable[[], None]) -> None:
        """Calls `on_silence` once, in the thread, when one of `members` falls silent, if the store
        is gone, or if the thread fails. (Nothing is called for a member that leaves: what it sent
        still arrives.)"""
        self._watch = _Watch([m for m in members if m != self.id], on_silence)

    def stop(self) -> bool:
        """Says that this process leaves, and ends the thread. Returns whether it has ended."""
        self._stopping.set()
        self._watch = _Watch()
        ended = join([self._thread], ABORT_SECONDS)
        if ended and not self.store_error:
            with contextlib.suppress(StoreUnreachableError):
                self.say(State.LEFT)
        self._access.hurry()
        ended = ended or join([self._thread], ABORT_SECONDS)
        self._access.warn_of_threads(self.id, ended)
        return ended

    def _run(self) -> None:
        try:
            self._beat_and_watch()
        except Exception as error:
            self.failure = error
            if self._watch.on_silence is not None:
                self._watch.on_silence()

    def _beat_and_watch(self) -> None:
        before = answered = time.monotonic()
        while not self._stopping.wait(self._interval):
            # The clock first: if this process sleeps after it, the counters are read afterwards.
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * self._interval), now
            try:
                with self._beating:
                    self._beat()
                self._look(elapsed)
                answered, self.store_error = time.monotonic(), ""
            except StoreUnreachableError as error:
                if time.monotonic() - answered > self.lost_after:
                    self.store_error = str(error)
            self._tell_of_silence()

    def _tell_of_silence(self) -> None:
        watch = self._watch  # another thread may replace it meanwhile
        if watch.on_silence is not None and (
            self.store_error or any(map(self._fell_silent, watch.members))
        ):
            on_silence, watch.on_silence = watch.on_silence, None
            on_silence()

    def _beat(self) -> None:
        self._count += 1
        text = f"{self._state} {self._count}"
        self._access.ask(lambda: self._store.set(_BEAT.format(self.id), text))

    def _look(self, elapsed: float) -> None:
        """Reads the counters of all others.

        Time counts only while a counter stands still. Where it is lower than it was, or its record
        is none of the job's, somebody else wrote it, and the process may live.
        """
        self._access.ask(self._notice_others)
        keys = [_BEAT.format(member) for member in self._others]
        texts = self._access.ask(lambda: read(self._store, keys))
        for member, text in zip(self._others, texts, strict=True):
            beat = None if text is None else _parse(text)
            with self._seen_lock:
                seen = self._seen.get(member)
                if beat is not None and (seen is None or beat.count > seen.count):
                    self._seen[member] = beat
                elif beat is not None and seen is not None and beat.count == seen.count:
                    seen.still_seconds += elapsed

    def _notice_others(self) -> None:
        for _ in range(_MOST_NEW):
            number = self._ids_seen
            if not self._ids.are_taken(number):
                return
            if number != self.id and self._ids.is_ours(number):
                self._others.append(number)
            self._ids_seen += 1

    def _is_silent(self, seen: _Seen) -> bool:
        return seen.still_seconds > self.lost_after

    def _fell_silent(self, member: int) -> bool:
        with self._seen_lock:
            seen = self._seen.get(member)
        return seen is not None and seen.state is not State.LEFT and self._is_silent(seen)


def _parse(text: bytes) -> _Seen | None:
    """None: no process of ours wrote it."""
    state, _, count = text.decode(errors="replace").partition(" ")
    try:
        return _Seen(State(state), int(count))
    except ValueError:
        return None
