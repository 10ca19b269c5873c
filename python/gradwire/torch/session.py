"""The running part of a state: one process group, one thread, and what becomes of an error."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.torch.errors import CommunicationError
from gradwire.torch.failure import FailureBoard
from gradwire.torch.runner import BucketJob, BucketRunner, Coding
from gradwire.torch.thread import CommunicationThread
from gradwire.torch.wire import Wire, WireBrokenError


class Session:
    """Lasts from the first bucket to `close` or to the first error, which ends all of it."""

    def __init__(
        self, coding: Coding, group: dist.ProcessGroup, ranks: list[int], timeout: float
    ) -> None:
        """`group`: a Gloo group that nobody else uses; `ranks`: its members as global ranks."""
        self.error: Exception | None = None
        self._ranks = ranks
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = group
        self._board = FailureBoard(group.get_group_store(), group.rank(), group.size())
        self._wire: Wire | None = Wire(group, timeout)
        self._thread = CommunicationThread()
        self.rank = group.rank()
        self.world_size = group.size()
        self.runner = BucketRunner(coding, self._wire)

    def submit(self, job: BucketJob) -> Future[torch.Tensor]:
        """A future of the averaged bucket, which is `job.values` itself."""
        future: Future[torch.Tensor] = Future()
        self._thread.submit(lambda: self._run(job, future))
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
        """Ends the thread; False: a wait for a peer lasts longer than `seconds`, and is left."""
        stopped = self._thread.stop(seconds)
        if stopped:
            self._disconnect()
        if self.error is None:
            self.error = CommunicationError("the GradwireState was closed")
        return stopped

    def _run(self, job: BucketJob, future: Future[torch.Tensor]) -> None:
        if self.error is None:
            try:
                self.runner.run(job)
            except WireBrokenError as broken:
                self._fail(self._diagnose(broken, job))
            except Exception as error:
                self._board.announce(error)
                self._fail(error)
        if self.error is None:
            future.set_result(job.values)
        else:
            future.set_exception(self.error)  # type: ignore[arg-type] # as its documentation says

    def _diagnose(self, broken: WireBrokenError, job: BucketJob) -> CommunicationError:
        waited = f"waited {self._timeout:g} s" if broken.silent else str(broken).splitlines()[0]
        when = f"rank {self.rank}, step {job.step}, bucket {job.index}: {waited}"
        if len(self._ranks) != dist.get_world_size():
            when += f" (ranks are places in the process group {self._ranks})"
        return self._board.diagnose((broken.peer,), broken.silent, when)

    def _fail(self, error: Exception) -> None:
        self.error = error
        # Only now: whoever sees the connection close must find this rank's report in the store.
        self._disconnect()
        culprits = error.ranks if isinstance(error, CommunicationError) else ()
        self._board.linger(frozenset(culprits))

    def _disconnect(self) -> None:
        group, self._group = self._group, None
        if self._wire is not None:
            self._wire.drop()
            self._wire = None
        if group is not None and dist.is_initialized():
            # The program may have destroyed all its groups already.
            with contextlib.suppress(AssertionError, RuntimeError, ValueError):
                dist.destroy_process_group(group)
