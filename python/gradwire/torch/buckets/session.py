"""The running part of a training: a connection, a thread, and the handling of errors."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.torch import checkpoint
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.bucket_runner import BucketRunner
from gradwire.torch.buckets.session_threads import ComingBucket, JobsAtOnce, SessionThreads
from gradwire.torch.errors import CommunicationError, forget_frames
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.live import LiveScalars, scalars_of
from gradwire.torch.network.connection import Connection, closed
from gradwire.torch.network.failure import GRACE_SECONDS, FailureBoard
from gradwire.torch.network.meeting import Where
from gradwire.torch.network.transport import ABORT_SECONDS, T, Transport
from gradwire.torch.parameters import NamedShape, all_finite
from gradwire.torch.staging.stage import Stage, stage_for
from gradwire.torch.stats import Stats, StepCounters, Totals, summarize

_EXPLAIN_SECONDS = 20.0  # enough for the thread to find out by itself why a bucket failed
_LEAVE_SECONDS = 1.0  # for the thread to end by itself; after that its waits are broken off
_OF_COMMUNICATION = re.compile(r"gloo|nccl|connection|timed out|socket|broken pipe", re.IGNORECASE)
_TIMED_OUT = "Timed out waiting"  # Gloo's words in an error of PyTorch
_CPU = torch.device("cpu")


class Averaged(NamedTuple):
    """The counters of a step, the values that the host reads (f32), and what a thread calls before
    it queues work with the bucket's average."""

    counters: StepCounters
    beside: torch.Tensor
    follow: Callable[[], None] = lambda: None


class Session:
    """Lasts from the first bucket to `close`, or to the first error, which ends the session."""

    def __init__(
        self,
        settings: ExchangeSettings,
        device: torch.device = _CPU,
        where: Where = None,
        board: FailureBoard | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Makes a Gloo group of its own. Every rank must call this, in the same order.

        `device`: the device that the buckets are on. `where`: takes the place of the settings'
        process group. `board`: of several sessions whose errors have one cause. `stage`: of the
        buckets; None: that of the device.
        """
        self._connection = Connection(where or settings.process_group, settings.timeout, board)
        # Nothing needs the group from here on, and it may be the owner, which must not be kept.
        self._settings = settings = replace(settings, process_group=None)
        self.rank = self._connection.rank
        self.world_size = self._connection.world_size
        takes_kernels = not settings.info["adds_trits"]
        self.stage = stage or stage_for(device, settings.memory, takes_kernels)
        waits_alone = self._connection.wire.waits_alone
        self._thread: SessionThreads | JobsAtOnce
        self._thread = SessionThreads() if waits_alone else JobsAtOnce()
        self.runner = BucketRunner(settings, self._connection, self.stage)
        self._coming: deque[ComingBucket] = deque()  # of `submit`, in its order
        self._encoding_ahead = threading.Lock()
        self._is_waiting = False  # for peers, in a job of `submit`

    def close_with(self, owner: object) -> None:
        """Closes the session at exit, or when `owner` is dropped."""
        stop = partial(self._thread.stop, ABORT_SECONDS)
        self._connection.finish_with(owner, partial(_finish, self), stop)

    @property
    def error(self) -> Exception | None:
        """The error that ended the session; after it no step can be taken."""
        return self._connection.error

    def check(self) -> None:
        """Raises the session's error if it has ended: its thread would never come to new work."""
        self._connection.check()

    def entire(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """As Connection.entire."""
        return self._connection.entire(doing)

    def stats(self) -> Stats:
        return summarize(
            self.runner.ledger.totals,
            codec=self._settings.text(),
            world_size=self.world_size,
            raw_tensors=self.runner.raw_tensors(),
            chosen=self.runner.choice.summary(),
            tensors=self.runner.traffic(),
            remarks=self.runner.choice.remarks() + self.stage.remarks(),
        )

    def identity(self, source: str, tensors: Sequence[NamedShape]) -> checkpoint.Identity:
        """As ExchangeSettings.identity, for this rank."""
        return self._settings.identity(source, self.rank, self.world_size, tensors)

    def state_dict(self, identity: checkpoint.Identity, iterations: int) -> checkpoint.StateDict:
        """This rank's identity and residuals. Waits for the step under way."""
        self._settle()
        return identity.make_state(
            self.runner.residuals(),
            iterations=iterations,
            ranks_per_machine=self.runner.ranks_per_machine,
            loss_scale=self.runner.kept.loss_scale,
            auto=self.runner.choice.state_dict(),
        )

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on with the residuals of a state. Waits for the step under way."""
        self._settle()
        self.runner.replace_residuals(state)

    def submit(self, job: BucketJob) -> Future[torch.Tensor]:
        """A future of the averaged bucket, which is `job.values` itself."""
        future = self.start(*self._work_of(job))
        self._encode_ahead()
        return future

    def submit_for_torch(self, job: BucketJob) -> torch.futures.Future[torch.Tensor]:
        """As `submit`, with a future that includes the device's work."""
        future = self.start_for_torch(*self._work_of(job), job.values)
        self._encode_ahead()
        return future

    def start_for_torch(
        self, work: Callable[[Transport], torch.Tensor], doing: str, values: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """As `start`. The device's work in it runs after the work that is queued for `values`, and
        the future includes it."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=self.stage.devices
        )
        self._submit(work, doing, future, values)
        return future

    def average(
        self, job: BucketJob, fault: str | None, residual_decay: float = 1.0, beside: int = 0
    ) -> Future[Averaged]:
        """Turns `job.values`, the only bucket of its step, into the average, which is the same bits
        on every rank. Returns a future of the step's counters.

        If these are `skipped`, some value is not finite, and no rank may apply the average; the
        residuals stay as they were. fault: says where this rank's values are not finite, if known.
        (An exchange whose codec keeps a residual finds NaN and Inf itself; any other exchange
        passes them through.)
        residual_decay: by which the bucket's residuals are multiplied after a step that counts.
        beside: how many of the last values the host reads afterwards.
        """

        fetched = self.stage.fetch(job.values)

        def work(wire: Transport) -> Averaged:
            with self.stage.in_pieces(job.values, fetched) as arriving:
                values = arriving.values
                self.runner.run(replace(job, values=values, arriving=arriving))
                counters = self.runner.ledger.last_step
                if not counters.skipped and not all_finite(values):
                    self.runner.skip_last_step(
                        f"the gradient of rank {self._connection.name(self.rank)} is {fault}"
                        if fault
                        else "the gradient of another rank is not finite, or the sum of all"
                    )
                read = values[values.numel() - beside :].float().clone()
            if not counters.skipped and residual_decay != 1.0:
                self.runner.scale_residuals(job.index, residual_decay)
            self.runner.kept.confirm()
            copied = self.stage.mark()
            return Averaged(counters, read, partial(self.stage.follow, copied))

        return self.start(work, _describe(job), job.values)

    def start(
        self, work: Callable[[Transport], T], doing: str, values: torch.Tensor | None = None
    ) -> Future[T]:
        """Runs `work` after all earlier jobs, and after the work that its device has queued for
        `values`. Its error ends the session; `doing` describes it. Raises the session's error if it
        has ended."""
        future: Future[T] = Future()
        self._submit(work, doing, future, values)
        return future

    def _submit(
        self,
        work: Callable[[Transport], T],
        doing: str,
        future: Future[T] | torch.futures.Future[T],
        values: torch.Tensor | None,
    ) -> None:
        self.check()
        mark = None if values is None else self.stage.mark()
        self._thread.submit(lambda: self._run(work, doing, future, mark))

    def break_off(self) -> None:
        """Ends a wait for peers with an error, which ends the session. For another thread."""
        self._connection.wire.abort()

    def drain(self) -> None:
        """Waits until every job submitted so far has run."""
        self._thread.drain(threading.TIMEOUT_MAX)

    def explain(self, error: BaseException, seconds: float = _EXPLAIN_SECONDS) -> BaseException:
        """An error that names the ranks that are gone, or that PyTorch's own communication waited
        for in vain; `error` itself if there are none.

        Returns `error`, too, if a bucket is still under way after `seconds`.
        """
        if not self._thread.drain(seconds):
            return error
        if found := self._find_cause():
            return found
        if _TIMED_OUT in str(error):
            return self._connection.find_silent(str(error)) or error
        return self._connection.find_lost(GRACE_SECONDS if _names_no_rank(error) else 0.0) or error

    def _find_cause(self) -> Exception | None:
        found = self.error if isinstance(self.error, CommunicationError) else None
        return found or self._connection.board.error

    def close(self) -> None:
        """Ends the thread and the groups; residuals and counters stay readable.

        A wait for a peer is broken off after a second. A thread that does not end even then is
        named on stderr.
        """
        if self._connection.is_over:
            return
        if self._end():
            self.runner.release()
        self._connection.forget_owner()  # last: what an interrupt leaves is done at exit

    def _end(self) -> bool:
        """Returns whether the thread has ended."""
        stopped = self._thread.stop(_LEAVE_SECONDS)
        if not stopped:
            self._connection.abandon(closed())
            stopped = self._thread.stop(ABORT_SECONDS)
        if stopped:
            self._connection.disconnect()
        if self._connection.error is None:
            self._connection.error = closed()
        self._connection.board.warn_of_threads(stopped)
        return stopped

    def _work_of(self, job: BucketJob) -> tuple[Callable[[Transport], torch.Tensor], str]:
        self.check()  # before anything is kept for the job
        coming = ComingBucket(job, self.stage)
        self._coming.append(coming)

        def work(wire: Transport) -> torch.Tensor:
            self._coming.remove(coming)
            with coming:
                try:
                    self.runner.run(coming.on_host(), self._wait_for_peers)
                finally:
                    with self._encoding_ahead:
                        self._is_waiting = False
            return job.values

        return work, _describe(job)

    def _wait_for_peers(self) -> None:
        self._is_waiting = True
        self._encode_ahead()

    def _encode_ahead(self) -> None:
        """While the bucket under way waits for peers: has the next one encoded, if it is there."""
        with self._encoding_ahead:
            coming = self._coming[0] if self._is_waiting and self._coming else None
            if coming and coming.is_there and self.runner.can_encode_ahead(coming.job):
                encode = self.runner.encode_ahead(coming.on_host())

                def work() -> None:
                    with self.stage.after(None):
                        encode()

                self._thread.encode(work)

    def _run(
        self,
        work: Callable[[Transport], T],
        doing: str,
        future: Future[T] | torch.futures.Future[T],
        mark: Any,
    ) -> None:
        try:
            with self._connection.guard(doing), self.stage.after(mark):
                result = work(self._connection.wire)
        except BaseException as error:  # the wrapped optimizer's code may exit
            self._coming.clear()
            self._thread.drain_encoder(ABORT_SECONDS)  # whose bucket others may look at now
            if isinstance(error, CommunicationError):
                # The earlier exceptions would keep the connection and its tensors until exit, or
                # until Python looks for cycles if one was kept before it was raised.
                forget_frames(error.__cause__ or error.__context__)
                error.__cause__ = error.__context__ = None
            future.set_exception(error)  # type: ignore[arg-type] # as PyTorch's documentation says
        else:
            with self.stage.after(None):
                future.set_result(result)
        finally:
            del future  # it has the error, which has this frame; PyTorch's would never be freed

    def _settle(self) -> None:
        if not self._thread.drain(self._settings.timeout):
            raise RuntimeError("a step is under way; residuals can be had between two steps only")


def _describe(job: BucketJob) -> str:
    return f"step {job.step}{job.moment}, bucket {job.index}"


def _names_no_rank(error: BaseException) -> bool:
    """Whether it is PyTorch's error of communication, which names no rank. Gloo's are
    RuntimeErrors, as are those of a program that multiplies matrices of the wrong sizes."""
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return False
    return isinstance(error, dist.DistError) or _OF_COMMUNICATION.search(str(error)) is not None


def _finish(session: Session) -> None:
    """Runs at exit, or when the owner of the session is dropped."""
    unhandled = getattr(sys, "last_value", None)
    # After any other error this rank is the first that stops, and a session that finishes later
    # would blame the ranks that stop because of it.
    knows = session.error is not None or session._find_cause() is not None
    if unhandled is not None and _names_no_rank(unhandled) and not knows:
        verdict = session.explain(unhandled, _LEAVE_SECONDS)
        if verdict is not unhandled:
            print(f"gradwire: {verdict}", file=sys.stderr)
    session._end()


class SessionOwner(LiveScalars):
    """Owns a session, which may begin later than the owner: the hook's state, an optimizer."""

    _session: Session | None = None

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""
        return None if self._session is None else self._session.error

    def _check_session(self) -> None:
        """Raises the error that ended the communication."""
        if self._session is not None:
            self._session.check()

    def last_step(self) -> dict[str, Any]:
        """This rank's last complete step: bytes, bits a value (None: no value) and timings."""
        return self._last_counters().summary()

    def _find_scalars(self) -> dict[str, float | None]:
        return scalars_of(self._last_counters(), self._totals())

    def _last_counters(self) -> StepCounters:
        """The counters of this rank's last complete step."""
        return self._session.runner.ledger.last_step if self._session else StepCounters()

    def _totals(self) -> Totals:
        return self._session.runner.ledger.totals if self._session else Totals()

    def explain(self, error: BaseException) -> BaseException:
        """An error that names the ranks that are gone; `error` itself if no rank is.

        A rank may die while DDP itself communicates: it broadcasts buffers before each forward.
        DDP's error does not say whose connection closed.
        """
        return error if self._session is None else self._session.explain(error)

    def close(self) -> None:
        """Ends the communication thread and its process group. Statistics and residuals stay.

        Happens by itself at exit, or when the model or the optimizer is dropped.
        """
        if self._session is not None:
            self._session.close()
