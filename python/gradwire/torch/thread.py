"""The one thread that talks to other ranks, so that `backward()` goes on meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class CommunicationThread:
    """Runs jobs one after the other, in the order in which they were submitted.

    A daemon: a Gloo wait cannot be interrupted, and must not keep the interpreter from leaving.
    A job reports its own errors; it must not raise.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gradwire", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def drain(self, seconds: float) -> bool:
        """Waits until everything submitted so far has run; False if it takes longer."""
        if not self._thread.is_alive():
            return True
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(seconds)

    def stop(self, seconds: float) -> bool:
        """Ends the thread after the jobs in the queue; False if they take longer than `seconds`."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds a bucket
