"""Threads that may wait for another machine: for messages, and for a store that may be gone."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from gradwire.torch.errors import JobKeyError

_LOOK_SECONDS = 0.2  # between two looks whether a thread is alive, or this rank leaves
ABORT_SECONDS = 8.0  # for a thread whose connections were closed: it may wait 5 s for the store


def only_here(call: Callable[[], object]) -> Callable[[], object]:
    """`call`, which does nothing in a child that is forked from this process: there the threads
    are gone, and the connections are the parent's, whom any use of them would disturb."""
    process = os.getpid()
    return lambda: call() if os.getpid() == process else None


def join(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Waits until the threads have ended, except the calling one; False if one takes longer."""
    end = time.monotonic() + seconds
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


class Jobs(Protocol):
    """Runs jobs one after the other, in the order in which they were submitted. A job reports its
    own errors; it must not raise."""

    def submit(self, job: Callable[[], None]) -> None: ...

    def drain(self, seconds: float) -> bool:
        """Waits until every job submitted so far has run; False if that takes longer."""

    def stop(self, seconds: float) -> bool:
        """Ends after the jobs in the queue; False if they take longer than `seconds`."""


class CommunicationThread:
    """Jobs in a thread of their own.

    The thread is a daemon, so that an endless wait does not keep the interpreter from exiting. But
    its owner must stop it before that: a thread that returns from C++ into an interpreter that is
    exiting aborts the process.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gradwire", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def drain(self, seconds: float) -> bool:
        done = threading.Event()
        self._jobs.put(done.set)
        end = time.monotonic() + seconds
        while self._thread.is_alive():  # it may have been stopped before it comes to `done`
            left = end - time.monotonic()
            if done.wait(max(0.0, min(left, _LOOK_SECONDS))):
                return True
            if left <= 0.0:
                return False
        return True

    def stop(self, seconds: float) -> bool:
        self._jobs.put(None)
        return join([self._thread], seconds)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # for this thread; a program may give it parameters
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds a bucket


STORE_SECONDS = 5.0  # a store that takes longer counts as unreachable


T = TypeVar("T")


class StoreUnreachableError(Exception):
    """The store does not answer."""


class StoreAccess:
    """Runs each call in a thread of its own, because a store on a stopped machine never answers."""

    def __init__(self, seconds: float = STORE_SECONDS) -> None:
        """seconds: after which a call counts as not answered."""
        self._seconds = seconds
        self._unanswered: list[threading.Thread] = []
        self._leaving = threading.Event()
        self._has_warned = False

    def ask(self, call: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """The answer. Raises StoreUnreachableError if there is none, and an error of `call` that is
        not PyTorch's store's as it is. meanwhile: called again and again in this thread."""
        if self._leaving.is_set():
            raise StoreUnreachableError("this rank is leaving")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
        thread.start()
        end = time.monotonic() + self._seconds
        while thread.is_alive() and not self._leaving.is_set() and time.monotonic() < end:
            thread.join(_LOOK_SECONDS)
            if thread.is_alive():
                meanwhile()
        if thread.is_alive():
            self._unanswered.append(thread)
        if not answer.done():
            raise StoreUnreachableError("no answer")
        try:
            return answer.result()
        except JobKeyError:
            raise
        except RuntimeError as error:
            raise StoreUnreachableError(str(error).partition("\n")[0]) from None

    def pause(self, seconds: float) -> bool:
        """Waits so long, or until `hurry`. Returns whether that was called."""
        return self._leaving.wait(seconds)

    def hurry(self) -> None:
        """Ends all pauses and waits; no call is begun any more, because the program exits."""
        self._leaving.set()

    def warn_of_threads(self, rank: int, ended: bool) -> None:
        """Says on stderr, once, if a thread waits. `ended`: whether the owner's threads have."""
        if self._has_warned:
            return
        if not (join(self._unanswered, ABORT_SECONDS) and ended):
            self._has_warned = True
            print(
                f"gradwire: rank {rank}: a thread still waits for another rank or for the "
                "store, though its connections are closed; if the wait ends while Python exits, "
                "this process aborts",
                file=sys.stderr,
            )
