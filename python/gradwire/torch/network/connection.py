"""This rank's connections to the others, from the comparison of setups to the close or an error;
and the thread that uses them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gradwire import GradwireError
from gradwire.torch.errors import CommunicationError
from gradwire.torch.network.failure import TIMEOUT_SPREAD_SECONDS, FailureBoard
from gradwire.torch.network.meeting import Where, connect
from gradwire.torch.network.transport import ABORT_SECONDS, LostError, join, only_here

_LOOK_SECONDS = 0.2  # between two looks whether a thread is alive
_RANKS = re.compile(r"\branks? \d+(?:(?:, | and )\d+)*\b")


def closed() -> CommunicationError:
    """For who takes a step after the close."""
    return CommunicationError("it was closed, and can take no further step")


class Connection:
    """A transport that nobody else uses, and the error that ended it.

    Errors call ranks by their numbers in the world. The wire and the exchange count the places in
    the group.

    It is of use only in the process that made it. In a forked child `check` raises, and nothing
    else touches the connections.
    """

    def __init__(self, where: Where, timeout: float, board: FailureBoard | None = None) -> None:
        """Every rank of `where` must call this, in the same order.

        board: where the ranks of several connections report. None: this connection has its own.

        Raises PeerLostError, PeerSilentError or StoreLostError, if not all of them come within
        `timeout` (seconds).
        """
        self.wire, names, store = connect(where, timeout)
        self.rank = self.wire.rank
        self.world_size = self.wire.world_size
        self.error: Exception | None = None
        self.readers: list[threading.Thread] = []  # threads that wait for messages
        self._name_of = dict(enumerate(names)) if list(names) != list(range(len(names))) else {}
        self.board = board or FailureBoard(
            store, self.name(self.rank), self._names((self.rank, *self.wire.peers))
        )
        self.board.add_connection(self.wire.abort)
        self._is_connected = True
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._finalizing = threading.Lock()  # held while one finalizer takes the other's place
        self._ending = threading.RLock()  # held while peers read why this rank ends
        self._stop: Callable[[], bool] = lambda: True
        self._process = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a child, forked from the one that made the connections."""
        return os.getpid() != self._process

    def finish_with(
        self, owner: object, finish: Callable[[], None], stop: Callable[[], bool]
    ) -> None:
        """Calls `finish` when `owner` is dropped, or at exit.

        After an error, instead, all waits end, and then `stop` ends the threads and returns whether
        they ended. The error keeps the frames that it came through, and one of them the owner,
        which would never be dropped if the finalizer kept the error. So `stop` must know neither
        this connection nor the owner.
        """
        self._finalizer = weakref.finalize(owner, only_here(finish))
        self._stop = stop

    @property
    def is_over(self) -> bool:
        """Whether nothing will be called any more when the owner is dropped, or only in another
        process."""
        if self.is_inherited:
            return True
        with self._finalizing:
            return self._finalizer is not None and not self._finalizer.alive

    def forget_owner(self) -> None:
        """Nothing is called when the owner is dropped."""
        with self._finalizing:
            if self._finalizer is not None:
                self._finalizer.detach()

    def check(self) -> None:
        """Raises the error that ended the connection, if one did."""
        if self.is_inherited:
            raise CommunicationError(
                f"the connections of rank {self.rank} belong to process {self._process}; this is "
                f"process {os.getpid()}, a child that was forked from it, which cannot use them"
            )
        if self.error is not None:
            with self._ending:  # the process may be the store's host, and end with the error
                pass
            raise self.error.with_traceback(None)  # it would grow with each raise

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """An exception inside ends the connection; a LostError becomes an error that names a rank.

        Raises the connection's error, also if the connection ended earlier.
        """
        self.check()
        self.wire.doing = doing
        try:
            yield
        except Exception as raised:
            error = self.error or self._end(self._judge(raised, doing))
            if error is raised:
                raise
            raise error from raised

    @contextlib.contextmanager
    def entire(self, doing: str) -> Iterator[None]:
        """What breaks off inside, such as by an interrupt, ends the connection: this rank would go
        on without what the others have done. doing: for the error of the next step."""
        try:
            yield
        except BaseException as broken:
            self.abandon(
                CommunicationError(
                    f"{doing} of rank {self.name(self.rank)} broke off with a "
                    f"{type(broken).__name__}, so that other ranks may have what this one lacks: "
                    "go on from a checkpoint"
                )
            )
            raise

    def find_lost(self, patience: float) -> Exception | None:
        """Ends the connection if a peer closed its own between two messages. Returns the error.

        patience: seconds to wait for that. The connections of a process that ends close one after
        another, and this one may be the last.
        """
        if not self._is_connected or self.is_inherited:
            return None
        end = time.monotonic() + patience
        while not (lost := self.wire.closed_peers()):
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)
        return self._end(self._diagnose(LostError(lost, False, "they left"), "between two steps"))

    def find_silent(self, why: str) -> Exception | None:
        """Ends the connection because the program waited elsewhere for some rank, in vain. The
        error names the ranks that did not do the same. why: what the system said.
        """
        if not self._is_connected or self.is_inherited:
            return None
        peers = self._names(self.wire.peers)
        when = f"rank {self.name(self.rank)}, between two steps: {why}"
        return self._end(self.board.diagnose(peers, True, when, patience=TIMEOUT_SPREAD_SECONDS))

    def abandon(self, error: Exception) -> None:
        """Breaks off all waits; other threads get `error`. The peers see that this rank is gone."""
        if self.is_inherited:
            return
        self.board.hurry()
        if self.error is None:
            self.error = error
        self.wire.abort()

    def leave(self, error: Exception) -> None:
        """Ends without an error, when everything sent has arrived and nothing more will come."""
        if self.is_inherited:
            return
        self.error = error
        self.board.leave()
        self.disconnect()

    def disconnect(self) -> bool:
        """Releases the group. What was not flushed may be lost.

        Returns False if a thread still waits for messages although the connection is closed.
        """
        if self.is_inherited:
            return True
        was_connected, self._is_connected = self._is_connected, False
        if was_connected:
            self.wire.abort()
        ended = join(self.readers, ABORT_SECONDS)
        self.wire.drop()
        return ended

    def _judge(self, raised: Exception, doing: str) -> Exception:
        if isinstance(raised, LostError):
            return self._diagnose(raised, doing)
        self._name_ranks_of(raised)
        self.board.announce(raised)
        return raised

    def _diagnose(self, lost: LostError, doing: str) -> Exception:
        when = f"rank {self.name(self.rank)}, {doing}: {lost}"
        closed = () if lost.silent else self._names(self.wire.closed_peers())
        return self.board.diagnose(self._names(lost.peers), lost.silent, when, closed)

    def name(self, rank: int) -> int:
        """What errors call a rank of the wire."""
        return self._name_of.get(rank, rank)

    def _names(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.name, ranks))

    def name_ranks(self, text: str) -> str:
        """Gives the ranks in a text of the wire or the exchange their numbers in the world."""

        def name(places: re.Match[str]) -> str:
            return re.sub(r"\d+", lambda place: str(self.name(int(place[0]))), places[0])

        return _RANKS.sub(name, text) if self._name_of else text

    def _name_ranks_of(self, error: Exception) -> None:
        if self._name_of and isinstance(error, GradwireError | CommunicationError):
            error.args = (self.name_ranks(str(error)),)
        if isinstance(error, CommunicationError):
            error.ranks = self._names(error.ranks)

    def _end(self, error: Exception) -> Exception:
        with self._ending:
            self.error = error
            with self._finalizing:
                alive = self._finalizer.detach() if self._finalizer is not None else None
                if alive is not None:
                    finish = self.board.finisher(self._stop)
                    self._finalizer = weakref.finalize(alive[0], only_here(finish))
            # After the report: a rank that sees a connection close must find it in the store.
            self.disconnect()
            self.board.break_off()
            self.board.linger()
        return error


class CommunicationThread:
    """Runs jobs in a thread of its own, in the order in which they were submitted. A job reports
    its own errors; it must not raise.

    The thread is a daemon, so that an endless wait does not keep the interpreter from exiting. But
    its owner must stop it before that: a thread that returns from C++ into an interpreter that is
    exiting aborts the process.
    """

    def __init__(self, name: str = "gradwire") -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Raises CommunicationError after `stop`, when nobody may run the job any more."""
        self._jobs.put(job)
        if self._is_ending:  # looked at last: a job before the end of the queue is run
            raise closed()

    def drain(self, seconds: float) -> bool:
        """Waits until every job submitted so far has run; False if that takes longer, or for ever,
        as in a job."""
        if threading.current_thread() is self._thread:
            return False
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
        """Ends after the jobs in the queue; False if they take longer than `seconds`."""
        self._is_ending = True
        self._jobs.put(None)
        return join([self._thread], seconds)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # for this thread; a program may give it parameters
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds a bucket
