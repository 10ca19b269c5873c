"""Publishers and receivers of a store, as processes that are killed; what a receiver ends with."""

from __future__ import annotations

import os
import random
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.weights import Publisher, Subscriber
from gradwire.weights.folder import LocalFolder
from states import assert_same, state_of

State = dict[str, Any]


def fork(work: Callable[[], None]) -> int:
    """A process that does this and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)


def end_of(child: int) -> int:
    """The signal that ended a process; 0: it ended by itself."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def publish(store: Any, first: int, last: int, **options: Any) -> None:
    publisher = Publisher(store, **options)
    for version in range(first, last + 1):
        assert publisher.publish(state_of(version)).version == version


def received(store: Any) -> State:
    """The tensors of a new receiver."""
    receiver, target = Subscriber(store), State()
    receiver.fetch()
    receiver.apply_(target)
    return target


def reached(store: Any, n: int = 3000) -> int:
    """The version that a new receiver gets, whose values are right."""
    subscriber, target = Subscriber(store, patience=0.2), State()
    if subscriber.fetch() is None:
        return 0
    version = subscriber.apply_(target).version
    assert version is not None
    assert_same(target, state_of(version, n))
    return version


class DyingFolder(LocalFolder):
    """Its process is killed at its nth write: before it, or when all but the name is there."""

    def __init__(self, path: Path, dies_at: int, is_late: bool) -> None:
        super().__init__(path)
        self._left, self._is_late = dies_at, is_late

    def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
        self._left -= 1
        if self._left == 0 and not self._is_late:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(name, self._die_after(pieces), only_new)

    def _die_after(self, pieces: Any) -> Any:
        yield from pieces
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class PhasedReceiver:
    """A process that fetches and applies to `local`, and is killed in one of the two.

    The moments are drawn evenly over the time that the phase took when nobody was killed, which
    becomes shorter with each process that had ended it before, and longer with all others: a busy
    machine may be faster or slower by then.
    """

    def __init__(self, store: Path, local: Path, phase: str) -> None:
        self._store, self._local = store, local
        self._first = b"f" if phase == "fetch" else b"a"
        self._drawn, self._seconds = random.Random(0), 0.0

    def run_whole(self) -> None:
        child, reading = self._start()
        began = self._await(reading, self._first)
        self._await(reading, {b"f": b"a", b"a": b"e"}[self._first])
        self._seconds = time.monotonic() - began
        assert end_of(child) == 0
        os.close(reading)

    def kill(self) -> bool:
        """Whether the process was killed within the phase."""
        child, reading = self._start()
        self._await(reading, self._first)
        time.sleep(self._drawn.uniform(0, self._seconds))
        os.kill(child, signal.SIGKILL)
        end_of(child)
        came_further = bool(os.read(reading, 10))
        os.close(reading)
        self._seconds *= 0.8 if came_further else 1.1
        return not came_further

    def _start(self) -> tuple[int, int]:
        reading, writing = os.pipe()

        def work() -> None:
            subscriber = Subscriber(self._store, local=self._local)
            os.write(writing, b"f")
            subscriber.fetch()
            os.write(writing, b"a")
            subscriber.apply_()
            os.write(writing, b"e")

        child = fork(work)
        os.close(writing)
        return child, reading

    @staticmethod
    def _await(reading: int, mark: bytes) -> float:
        while True:
            ready, _, _ = select.select([reading], [], [], 60)
            assert ready
            found = os.read(reading, 1)
            assert found
            if found == mark:
                return time.monotonic()
