"""The running part of a state: one process group, one thread, and what becomes of an error."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.torch import device_queue
from gradwire.torch.bucket import BucketJob
from gradwire.torch.coding import Coding
from gradwire.torch.device_codec import has_kernels
from gradwire.torch.device_queue import DeviceQueue
from gradwire.torch.errors import CommunicationError
from gradwire.torch.failure import FailureBoard
from gradwire.torch.runner import BucketRunner
from gradwire.torch.thread import ABORT_SECONDS, CommunicationThread, warn_of_thread
from gradwire.torch.transports import (
    AUTO,
    GLOO,
    CollectiveTransport,
    StagedTransport,
    backend_for,
    end_collectives,
)
from gradwire.torch.wire import Wire, WireBrokenError

_EXPLAIN_SECONDS = 20.0  # enough for the thread to find out by itself why a bucket failed
_CPU = torch.device("cpu")
_NOTICE_SECONDS = 2.0  # the group of the collectives may notice first that a peer is gone
LEAVE_SECONDS = 1.0  # for the thread to end; what it waits for then does not come


class Session:
    """Lasts from the first bucket to `close` or to the first error, which ends all of it."""

    def __init__(
        self,
        coding: Coding,
        group: dist.ProcessGroup,
        ranks: list[int],
        timeout: float,
        device: torch.device = _CPU,
        collectives: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: a Gloo group that nobody else uses; `ranks`: its members as global ranks.
        `collectives`: another one, whose backend takes memory of the buckets' device; None: what is
        on a device is staged through the host.
        """
        self.error: Exception | None = None
        self._closing = False
        self._ranks = ranks
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = group
        self._board = FailureBoard(group.get_group_store(), group.rank(), group.size())
        self._collectives = collectives
        self._wire: Wire | None = Wire(group, timeout)
        self._queue: DeviceQueue | None = None
        if has_kernels(device):
            self._queue = DeviceQueue(
                device,
                StagedTransport(self._wire, device)
                if collectives is None
                else CollectiveTransport(collectives, device, self._wire),
            )
        self._thread = CommunicationThread()
        self.rank = group.rank()
        self.world_size = group.size()
        self.runner = BucketRunner(coding, self._wire, self._queue)

    @staticmethod
    def open(
        coding: Coding,
        process_group: dist.ProcessGroup | None,
        timeout: float,
        device: torch.device = _CPU,
        transport: str = AUTO,
    ) -> Session:
        """Over a Gloo group of its own, and another one for collectives on the buckets' device
        where `transport` says so. To be called on all ranks, in the same order.
        """
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)

        def new_group(backend: str, patience: float) -> dist.ProcessGroup:
            return dist.new_group(
                ranks,
                timeout=timedelta(seconds=patience),
                backend=backend,
                # In a part of the world only its members get here.
                use_local_synchronization=len(ranks) < dist.get_world_size(),
                group_desc="gradwire",
                sort_ranks=False,
            )

        group = new_group(GLOO, timeout)
        backend = backend_for(transport, device, process_group)
        collectives = None
        if backend is not None and len(ranks) > 1:
            # NCCL's watchdog ends the process: the transport's own wait is over before.
            collectives = new_group(backend, 2 * timeout)
        return Session(coding, group, ranks, timeout, device, collectives)

    def submit(self, job: BucketJob) -> Future[torch.Tensor]:
        """A future of the averaged bucket, which is `job.values` itself."""

        def work(wire: Wire) -> torch.Tensor:
            self.runner.run(job)
            return job.values

        return self.start(work, f"step {job.step}, bucket {job.index}", job.ready)

    def capture(self, job: BucketJob) -> Future[torch.Tensor]:
        """The same, queued on the caller's stream, of which a CUDA graph is made."""
        self.runner.capture(job)
        future = self._future()
        future.set_result(job.values)
        return future

    def start(
        self,
        work: Callable[[Wire], torch.Tensor],
        doing: str,
        ready: torch.cuda.Event | None = None,
    ) -> Future[torch.Tensor]:
        """Runs `work` after all that was submitted; its error, with `doing`, is the session's.

        On a GPU, what it queues runs after `ready`, and whoever waits for the future waits for it.
        """
        future = self._future()
        self._thread.submit(lambda: self._run(work, doing, future, ready))
        return future

    def drain(self, seconds: float) -> bool:
        """Waits until every bucket submitted so far is done or failed; False: it takes longer."""
        return self._thread.drain(seconds)

    def explain(self, seconds: float) -> CommunicationError | None:
        """Which ranks are gone, asked after an error that came from elsewhere.

        None: nobody is, or a bucket is still under way after `seconds`.
        """
        if not self.drain(seconds):
            return None
        if isinstance(self.error, CommunicationError):
            return self.error
        lost = self._wire.closed_peers() if self._wire is not None else ()
        if not lost:
            return None
        self._fail(self._board.diagnose(lost, silent=False, when="noticed between two steps"))
        assert isinstance(self.error, CommunicationError)
        return self.error

    def close(self, seconds: float) -> bool:
        """Ends the thread; a wait for a peer that lasts longer than `seconds` is broken off.

        False: the thread does not even end then, which is said on stderr.
        """
        stopped = self._thread.stop(seconds)
        if not stopped:
            self._closing = True
            self._board.hurry()
            wire = self._wire
            if wire is not None:
                wire.abort()
            stopped = self._thread.stop(ABORT_SECONDS)
        if stopped:
            self._disconnect()
        if self.error is None:
            self.error = closed()
        if not (stopped and self._board.join(ABORT_SECONDS)):
            warn_of_thread(self.rank)
        return stopped

    def _run(
        self,
        work: Callable[[Wire], torch.Tensor],
        doing: str,
        future: Future[torch.Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        if self.error is None:
            assert self._wire is not None, "it is dropped with an error alone"
            failure: Exception
            try:
                with self._beside(ready):
                    result = work(self._wire)
                    device_queue.mark_ready(result)  # what has gone wrong there is told here
            except WireBrokenError as broken:
                failure = closed() if self._closing else self._diagnose(broken, doing)
            except Exception as error:
                failure = self._lost_by(error, doing) or error
                if failure is error:
                    self._board.announce(error)
            else:
                with self._beside(None):
                    future.set_result(result)
                return
            # Not before: what broke holds the connections open as long as it is handled.
            if self._closing:
                self.error = failure
            else:
                self._fail(failure)
        future.set_exception(self.error)  # type: ignore[arg-type] # as its documentation says

    def _future(self) -> Future[torch.Tensor]:
        gpus: list[int | str | torch.device] | None
        gpus = [self._queue.device] if self._queue and self._queue.device.type == "cuda" else None
        return Future(devices=gpus)

    def _beside(self, ready: torch.cuda.Event | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._queue is None else self._queue.after(ready)

    def _lost_by(self, error: Exception, doing: str) -> CommunicationError | None:
        """Who is gone, if that is why a collective failed: its own error may not say so."""
        if self._collectives is None or self._wire is None:
            return None
        if isinstance(error, CommunicationError) or not isinstance(error, RuntimeError):
            return None  # that is no collective's
        end = time.monotonic() + _NOTICE_SECONDS
        while not (lost := self._wire.closed_peers()):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return self._board.diagnose(lost, False, self._when(doing, _first_line(error)))

    def _diagnose(self, broken: WireBrokenError, doing: str) -> CommunicationError:
        waited = f"waited {self._timeout:g} s" if broken.silent else _first_line(broken)
        return self._board.diagnose((broken.peer,), broken.silent, self._when(doing, waited))

    def _when(self, doing: str, what: str) -> str:
        when = f"rank {self.rank}, {doing}: {what}"
        if len(self._ranks) != dist.get_world_size():
            when += f" (ranks are places in the process group {self._ranks})"
        return when

    def _fail(self, error: Exception) -> None:
        self.error = error
        # Only now: whoever sees the connection close must find this rank's report in the store.
        self._disconnect()
        culprits = error.ranks if isinstance(error, CommunicationError) else ()
        self._board.linger(frozenset(culprits))

    def _disconnect(self) -> None:
        group, self._group = self._group, None
        collectives, self._collectives = self._collectives, None
        if self._queue is not None:
            self._queue.transport.drop()
        if self._wire is not None:
            self._wire.drop()
            self._wire = None
        if group is not None and dist.is_initialized():
            # The program may have destroyed all its groups already.
            with contextlib.suppress(AssertionError, RuntimeError, ValueError):
                dist.destroy_process_group(group)
        # Behind Gloo's, by which the peers notice.
        if collectives is not None and dist.is_initialized():
            end_collectives(collectives, broken=self.error is not None)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def closed() -> CommunicationError:
    return CommunicationError("it was closed, and can take no further step")


def check_timeout(seconds: float) -> None:
    """Raises ValueError for a timeout that no session can have."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout is {seconds}; a positive number of seconds is needed")


def explain_by(session: Session, error: BaseException) -> BaseException:
    """The error to show for one that came from elsewhere: of the rank that is gone, if one is."""
    return session.explain(_EXPLAIN_SECONDS) or error


def finish(session: Session) -> None:
    """At exit, or when whoever opened the session goes away."""
    unhandled = getattr(sys, "last_value", None)
    if unhandled is not None and session.error is None:
        verdict = session.explain(LEAVE_SECONDS)
        if verdict is not None:
            print(f"gradwire: {verdict}", file=sys.stderr)
    session.close(LEAVE_SECONDS)
