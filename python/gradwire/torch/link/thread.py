"""The thread that communicates with the other ranks while `backward()` goes on."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

_LOOK_SECONDS = 0.2  # between two looks whether the thread is alive
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
