"""`GradwireState`: the configuration of the hook, its counters and its checkpoint."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.torch import checkpoint, device_queue
from gradwire.torch.bucket import BucketJob
from gradwire.torch.coding import RAW_CODECS, make_coding
from gradwire.torch.device_codec import has_kernels, require_kernels
from gradwire.torch.names import ParameterNames
from gradwire.torch.session import LEAVE_SECONDS, Session, check_timeout, explain_by, finish
from gradwire.torch.stats import Stats, StepCounters, Totals, summarize
from gradwire.torch.transports import AUTO, NCCL, check_transport


class Overlap(Enum):
    """Whether a bucket's communication runs while `backward()` goes on."""

    ON = "on"
    OFF = "off"  # the hook waits for each bucket; to measure what overlap is worth


class LossScaler(Protocol):
    """What is needed of `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


class GradwireState:
    """State of `gradwire_hook` for one DistributedDataParallel model.

        state = GradwireState(codec="3lc:s=1.75")
        model.register_comm_hook(state, gradwire_hook)

    Every rank must be given the same arguments (checked with the peers before the first use).

    codec          codec of pushes and pulls, as text; `pull_codec` overrides it for pulls. None:
                   "3lc:s=1.75", or "terngrad" where that is the exchange
    rules          (pattern, codec) or (pattern, codec, "push" | "pull" | "both"): tensors whose
                   name matches the pattern take that codec; the first match wins
    exclude        name patterns of tensors that go raw
    min_numel      tensors with fewer values go raw, as do all one-dimensional ones
    start_iter     so many first iterations go raw, while gradients change fastest
    process_group  the group given to DDP; None: the default group
    threads        threads for encoding and decoding on this rank; they are woken for segments of
                   more than a million values, below that one is faster
    target         SIMD target, see `gradwire.simd_targets()`
    exchange       "sharded" (every rank averages a part), "ring" (neighbours alone talk),
                   "terngrad" (one scale for all ranks, sums of trits are not decoded on their way)
                   or "hierarchical" (one rank of each machine talks to the other machines, and only
                   that is compressed); see docs/exchanges.md
    ranks_per_machine   of exchange="hierarchical": ranks 0 to k - 1 are on the first machine, and
                   so on. None: LOCAL_WORLD_SIZE of torchrun, or else found by host names
    seed           of the random numbers of codecs that draw any
    timeout        seconds to wait for a rank that is connected but silent. A rank that evaluates
                   alone between two steps must be done by then
    scaler         the GradScaler, if gradients are scaled: residuals follow its scale
    overlap        see Overlap
    transport      how messages of gradients on a GPU travel: "nccl", straight from its memory;
                   "gloo", staged through page-locked memory of the host; "auto": "nccl" where the
                   process group has it

    Raises GradwireError for an unknown codec or a bad parameter, ValueError for other arguments.

    Gradients are float32, bfloat16 or float16. Those of 16 bits are widened for the exchange, their
    residuals are kept as the codec says, and the average is rounded half to even into the bucket.
    What goes raw is sent in their own 16 bits, as codec bf16 or fp16: pushes are exact, and pulls
    are rounded as the bucket would be. An average beyond float16 is infinite: see `scaler`.

    Gradients on a GPU are encoded and decoded there, in a build with CUDA, to the same result as on
    the CPU; exchange is "sharded" then, and `threads` and `target` are of no account.

    A parameter that no rank used in an iteration (find_unused_parameters) still sends what its
    residual holds, and DDP leaves its gradient alone: that amount is not applied.
    """

    def __init__(
        self,
        codec: str | None = None,
        *,
        pull_codec: str | None = None,
        rules: Sequence[tuple[str, ...]] = (),
        exclude: Sequence[str] = (),
        min_numel: int = 256,
        start_iter: int = 2,
        process_group: dist.ProcessGroup | None = None,
        threads: int = 1,
        target: str = "auto",
        exchange: str = "sharded",
        ranks_per_machine: int | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        scaler: LossScaler | None = None,
        overlap: Overlap = Overlap.ON,
        transport: str = AUTO,
    ) -> None:
        if start_iter < 0:
            raise ValueError(f"start_iter is {start_iter}; it must not be negative")
        check_timeout(timeout)
        check_transport(transport)
        self._coding = make_coding(
            process_group,
            codec=codec,
            pull_codec=pull_codec,
            rules=rules,
            exclude=exclude,
            min_numel=min_numel,
            threads=threads,
            target=target,
            seed=seed,
            exchange=exchange,
            ranks_per_machine=ranks_per_machine,
        )
        self._start_iter = start_iter
        self._process_group = process_group
        self._timeout = timeout
        self._scaler = scaler
        self._overlap = overlap
        self._transport = transport
        self._device: torch.device | None = None  # of the gradients
        self._names = ParameterNames(self)
        self._iterations = 0
        self._loss_scale: float | None = None  # of the iteration
        self._session: Session | None = None
        self._loaded: checkpoint.StateDict | None = None

    # What the hook does ------------------------------------------------------------------------

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # PyTorch hides it from checkers
    ) -> Future[torch.Tensor]:
        """Starts averaging the bucket over all ranks; the future holds its own buffer.

        Raises TypeError for gradients that are not float32, bfloat16 or float16, on the CPU or on
        one GPU, RuntimeError for a GPU in a build without CUDA, ValueError for settings that do not
        go on a GPU, and the first error of the communication again if there was one.
        """
        queued, cpu = time.perf_counter(), time.thread_time()
        if self.error is not None:
            raise self.error
        values = bucket.buffer()
        self._check_gradients(values)
        if self._session is None:
            self._session = self._connect(values.device)
            queued, cpu = time.perf_counter(), time.thread_time()
        tensors = self._names.shapes(bucket.parameters())
        captures = device_queue.is_capturing(values)
        if captures and self._scaler is not None:
            raise RuntimeError(
                "a CUDA graph can't be captured with scaler=: residuals follow its scale, which "
                "may change between replays"
            )
        if bucket.index() == 0:
            self._iterations += 1
            # On a GPU it waits for all that is queued: once a step.
            self._loss_scale = None if self._scaler is None else self._scaler.get_scale()
        step = self._iterations - 1
        job = BucketJob(
            step=step,
            index=bucket.index(),
            last=bucket.is_last(),
            raw=step < self._start_iter,
            tensors=tensors,
            values=values,
            loss_scale=self._loss_scale,
            queued=queued,
            hook_seconds=time.perf_counter() - queued,
            hook_cpu_seconds=time.thread_time() - cpu,
            ready=None if captures else device_queue.mark_ready(values),
        )
        if captures:
            return self._session.capture(job)
        future = self._session.submit(job)
        if self._overlap is Overlap.OFF:
            future.wait()
        # DDP takes an exception only from a future's callback.
        return future.then(_value)

    # What it did -------------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """What ended the communication; after it no step can be taken."""
        return None if self._session is None else self._session.error

    def stats(self) -> Stats:
        """Sums over all complete steps of this rank, and what goes raw and why."""
        session = self._session
        return summarize(
            session.runner.totals if session else Totals(),
            codec=self._coding.text(),
            world_size=session.world_size if session else 1,
            raw_tensors=session.runner.raw_tensors() if session else (),
        )

    def last_step(self) -> dict[str, Any]:
        """The last complete step of this rank: bytes, bits a value (None: no value), timings."""
        session = self._session
        return (session.runner.last_step if session else StepCounters()).summary()

    def void_replays(self) -> int:
        """Replays of a CUDA graph whose result was NaN, which `stats` does not count. Waits for the
        GPU.
        """
        return self._session.runner.void_replays() if self._session else 0

    def explain(self, error: BaseException) -> BaseException:
        """The error to show for one that came out of the training: names the ranks that are gone.

        A rank may die while DDP itself communicates, which broadcasts buffers before each forward;
        that error does not say whose connection closed. Returns `error` if every rank is there.
        """
        return error if self._session is None else explain_by(self._session, error)

    # Checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> checkpoint.StateDict:
        """This rank's residuals and counters of iterations; every rank saves its own."""
        session = self._idle_session()
        if session is None and self._loaded is not None:
            return self._loaded
        rank, world_size = self._place()
        return {
            "format": checkpoint.FORMAT,
            "codec": self._coding.text(),
            "rank": rank,
            "world_size": world_size,
            "iterations": self._iterations,
            "ranks_per_machine": session.runner.ranks_per_machine if session else None,
            "loss_scale": session.runner.loss_scale if session else None,
            "residuals": checkpoint.residuals_to_list(
                session.runner.residuals() if session else ()
            ),
        }

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        """Goes on from a saved state; every rank must load its own, at the same iteration.

        The result is that of the uninterrupted run, bit for bit, if DDP cuts its gradients into the
        same buckets. (It cuts them anew after the first iteration, unless find_unused_parameters is
        on.) With other buckets nothing is lost, but other values share a scale.
        Raises ValueError if it was saved by another rank, for another world size, or for other
        machines (then the first step may raise it): see `reshard`.
        """
        checkpoint.residuals_of(state)  # raises where it is no state
        place = self._place()
        if (state["rank"], state["world_size"]) != place:
            raise ValueError(
                f"the state is that of rank {state['rank']} of {state['world_size']}, this is rank "
                f"{place[0]} of {place[1]}; gradwire.torch.reshard makes states for another world"
            )
        session = self._idle_session()
        if session is None:
            self._loaded = state
        else:
            session.runner.replace_residuals(state)
        self._iterations = int(state["iterations"])

    def close(self) -> None:
        """Ends the communication thread and its process group; what is known by then stays.

        Happens by itself at exit, and when nobody refers to the model any more.
        """
        session = self._session
        if session is None or not self._finalizer.detach():
            return  # there is nothing to close, or it is closed
        if session.close(LEAVE_SECONDS):
            session.runner.release()

    # -------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        if not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def _idle_session(self) -> Session | None:
        if self._session is not None and not self._session.drain(self._timeout):
            raise RuntimeError("a step is under way; residuals can be had between two steps only")
        return self._session

    def _check_gradients(self, values: torch.Tensor) -> None:
        if values.dtype not in RAW_CODECS:
            raise TypeError(
                "gradwire_hook averages float32, bfloat16 and float16 gradients; this bucket is "
                f"{values.dtype}"
            )
        if values.device == self._device:
            return
        if self._device is not None:
            raise TypeError(
                f"gradwire_hook averages gradients of one device; this bucket is on "
                f"{values.device}, the first one was on {self._device}"
            )
        if values.device.type != "cpu" or has_kernels(values.device):
            require_kernels(values.device)
            self._coding.check_on_device()
        elif self._transport == NCCL:
            raise ValueError("transport='nccl' is for gradients on a GPU; these are on the CPU")
        self._device = values.device

    def _connect(self, device: torch.device) -> Session:
        """Called in the first bucket of every rank: its order is the same on all of them."""
        session = Session.open(
            self._coding, self._process_group, self._timeout, device, self._transport
        )
        if self._loaded is not None:
            session.runner.replace_residuals(self._loaded)
            self._loaded = None
        self._finalizer = weakref.finalize(self, finish, session)
        return session


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    return future.value()
