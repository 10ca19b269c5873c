"""Calls of a store that may be on a machine that is gone or stopped."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gradwire.torch.errors import JobKeyError
from gradwire.torch.link.thread import ABORT_SECONDS, join

STORE_SECONDS = 5.0  # a store that takes longer counts as unreachable

_LOOK_SECONDS = 0.2  # between two looks whether this rank leaves

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

    def ask(self, call: Callable[[], T]) -> T:
        """The answer. Raises StoreUnreachableError if there is none, and an error of `call` that is
        not PyTorch's store's as it is."""
        if self._leaving.is_set():
            raise StoreUnreachableError("this rank is leaving")
        answer: list[T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                answer.append(call())
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
        thread.start()
        end = time.monotonic() + self._seconds
        while thread.is_alive() and not self._leaving.is_set() and time.monotonic() < end:
            thread.join(_LOOK_SECONDS)
        if thread.is_alive():
            self._unanswered.append(thread)
        if failures and (
            isinstance(failures[0], JobKeyError) or not isinstance(failures[0], RuntimeError)
        ):
            raise failures[0]
        if not answer:
            why = str(failures[0]).splitlines()[0] if failures else "no answer"
            raise StoreUnreachableError(why)
        return answer[0]

    def pause(self, seconds: float) -> None:
        """Waits so long, or until `hurry`."""
        self._leaving.wait(seconds)

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
