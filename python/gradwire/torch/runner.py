"""Runs the buckets of a training: one exchange for each, residuals, skipped steps, counters.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace

import torch

from gradwire._core import Layout
from gradwire.torch.bucket import Bucket, BucketJob
from gradwire.torch.checkpoint import StateDict, ranks_per_machine_of, residuals_of
from gradwire.torch.coding import HIERARCHICAL, RING, Coding, sparsity_multiplier
from gradwire.torch.device_queue import DeviceQueue
from gradwire.torch.engine import agree
from gradwire.torch.errors import (
    GrowingScalesWarning,
    NonFiniteStepWarning,
    OneMachineWarning,
    UnmatchedPatternWarning,
)
from gradwire.torch.machines import agree_on_machines
from gradwire.torch.residuals import Residual, ResidualPool
from gradwire.torch.stats import (
    BucketTiming,
    RawTensor,
    StepCounters,
    Totals,
)
from gradwire.torch.wire import Wire


class BucketRunner:
    """Averages buckets in the order in which they come, which is the same on every rank."""

    def __init__(self, coding: Coding, wire: Wire, queue: DeviceQueue | None = None) -> None:
        """`queue`: where the buckets are exchanged that are not on the CPU."""
        self.totals = Totals()
        self.last_step = StepCounters()
        self._coding = coding
        self._wire = wire
        self._queue = queue
        self._captured: list[Bucket] = []  # graphs write to their memory as long as they live
        self._unplaced = ResidualPool()
        self._unplaced_machines: int | None = None  # ranks a machine where they were kept
        self._found_machines = False
        self._buckets: dict[int, Bucket] = {}
        self._step = StepCounters(step=-1)
        self._done: list[int] = []  # bucket indices of the step under way
        self._sent_before = 0
        self.loss_scale: float | None = None
        self._warned = False
        self._warned_of_scales = False
        self._checked_patterns = False
        self._released: tuple[RawTensor, ...] | None = None  # what went raw, then

    def run(self, job: BucketJob) -> None:
        """Averages the bucket in place; afterwards it holds the same bits on every rank."""
        started = time.perf_counter()
        if job.step != self._step.step:
            self._begin_step(job)
        bucket = self._bucket_for(job)
        ready = time.perf_counter()
        waited, cpu = self._wire.traffic.waited_seconds, time.thread_time()
        with torch.profiler.record_function(f"gradwire bucket {job.index}"):
            bucket.average(job, self._wire)
        finished = time.perf_counter()
        waited = self._wire.traffic.waited_seconds - waited

        step = self._step
        self._done.append(job.index)
        bucket.count_into(step)
        step.setup_seconds += ready - started
        step.wire_seconds += waited
        step.own_seconds += job.hook_seconds + finished - ready - waited
        step.own_cpu_seconds += job.hook_cpu_seconds + time.thread_time() - cpu
        step.buckets.append(BucketTiming(job.index, job.queued, started, finished))
        if bucket.exchange.non_finite is not None or self._passed_non_finite(bucket, job):
            self._note_non_finite(bucket)
        if job.last:
            self._end_step()
            if self._captured:
                self._settle()  # now: replays overwrite what was sent

    def capture(self, job: BucketJob) -> None:
        """Averages the bucket by work in the caller's stream that a CUDA graph can replay."""
        bucket = self._buckets.get(job.index)
        if job.raw or bucket is None or not bucket.fits(job):
            raise RuntimeError(
                "a CUDA graph can be captured when the hook has averaged the same buckets before, "
                "compressed: take some more iterations first (start_iter goes raw)"
            )
        if self._step.skipped and self._done:
            raise RuntimeError("the last step was skipped: take another one before the capture")
        assert self._queue is not None, "else no bucket is captured"
        if job.index == 0:
            self._queue.replays.begin_step()
        if bucket not in self._captured:
            self._captured.append(bucket)
        bucket.capture(job)
        if job.last:
            self._queue.replays.end_step()

    def void_replays(self) -> int:
        """Replays of CUDA graphs that were not finite. Waits for the device."""
        return self._queue.replays.count if self._queue else 0

    def residuals(self) -> list[Residual]:
        """All that this rank keeps for later steps."""
        with nullcontext() if self._queue is None else self._queue.after_all():
            self._settle()
            self._begin_behind_replays()
            placed = [r for bucket in self._buckets.values() for r in bucket.residuals()]
        return placed + list(self._unplaced)

    def replace_residuals(self, state: StateDict) -> None:
        """Forgets all residuals and goes on with those of a saved state.

        Raises ValueError if other ranks keep them here; where the ranks have not agreed on their
        machines yet, `find_machines` does.
        """
        residuals = residuals_of(state)
        if self._captured:
            raise RuntimeError("a CUDA graph holds the residuals: load a state before the capture")
        self._unplaced_machines = ranks_per_machine_of(state) if residuals else None
        if self._found_machines:
            self._check_machines()
        self._buckets.clear()
        self._done.clear()
        self._unplaced.clear()
        self._unplaced.add(residuals)
        self.loss_scale = state["loss_scale"]

    def release(self) -> None:
        """Lets go of all exchanges; residuals and counters stay. No step can be taken then."""
        raw_tensors, residuals = self.raw_tensors(), self.residuals()
        self._buckets.clear()
        self._unplaced.clear()
        self._unplaced.add(residuals)
        self._released = raw_tensors

    @property
    def ranks_per_machine(self) -> int | None:
        """That share residuals: 1 unless the exchange is hierarchical; None: not known yet."""
        if self._coding.exchange != HIERARCHICAL:
            return 1
        return self._coding.ranks_per_machine if self._found_machines else self._unplaced_machines

    def find_machines(self) -> None:
        """Agrees with the peers on the ranks of a machine, unless that is done or not needed."""
        if self._found_machines:
            return
        if self._coding.exchange == HIERARCHICAL:
            size = agree_on_machines(self._coding.ranks_per_machine, self._wire)
            self._coding = replace(self._coding, ranks_per_machine=size)
            if size == self._wire.world_size > 1:
                warnings.warn(
                    f"all {size} ranks are on one machine, where exchange='{HIERARCHICAL}' "
                    "compresses nothing",
                    OneMachineWarning,
                    stacklevel=2,
                )
        self._found_machines = True
        self._check_machines()

    def _check_machines(self) -> None:
        saved, here = self._unplaced_machines, self.ranks_per_machine
        if saved not in (None, here):
            raise ValueError(
                f"the state was saved with ranks_per_machine={saved}, here it is {here}: "
                f"gradwire.torch.reshard(states, world_size, ranks_per_machine={here}) moves its "
                "residuals"
            )

    def raw_tensors(self) -> tuple[RawTensor, ...]:
        """What goes raw although the codec is another."""
        if self._released is not None:
            return self._released
        found: dict[tuple[str, str], int] = {}
        for bucket in list(self._buckets.values()):
            for segment in bucket.layout.segments:
                if segment["reason"]:
                    key = (segment["name"], segment["reason"])
                    found[key] = found.get(key, 0) + segment["numel"]
        return tuple(RawTensor(name, numel, reason) for (name, reason), numel in found.items())

    def _begin_step(self, job: BucketJob) -> None:
        self._settle()
        self._begin_behind_replays()
        self._rescale(job.loss_scale)
        self._step = StepCounters(step=job.step, raw=job.raw)
        self._done.clear()
        traffic = self._wire.traffic
        self._sent_before = traffic.sent_bytes + traffic.framing_bytes

    def _end_step(self) -> None:
        traffic = self._wire.traffic
        sent = traffic.sent_bytes + traffic.framing_bytes - self._sent_before
        step = self._step
        step.control_bytes = sent - step.push_bytes - step.pull_bytes - step.local_bytes
        self.totals.add(self._step)
        self.last_step = self._step
        if not self._checked_patterns and not self._step.raw:
            self._checked_patterns = True
            self._warn_of_unmatched()

    def _warn_of_unmatched(self) -> None:
        layouts = [self._buckets[index].layout for index in self._done]
        for pattern in layouts[0].unmatched:
            if all(pattern in layout.unmatched for layout in layouts):
                warnings.warn(
                    f"no tensor of the model matches {pattern!r}, which rules= or exclude= has; "
                    "names are those of model.named_parameters()",
                    UnmatchedPatternWarning,
                    stacklevel=2,
                )

    def _warn_of_growing_scales(self, layout: Layout) -> None:
        world_size = self._wire.world_size
        if self._coding.exchange != RING or world_size < 3 or self._warned_of_scales:
            return
        codecs = [segment["push_codec"] for segment in layout.segments]
        growth, codec = max(((sparsity_multiplier(c), c) for c in codecs), default=(1.0, ""))
        if growth <= 1.0:
            return
        self._warned_of_scales = True
        warnings.warn(
            f"{codec} in a ring of {world_size} ranks: every hop encodes the sum so far, and its "
            f"scale grows by {growth:g} at least each time, so by {growth ** (world_size - 1):.3g} "
            "on the way: most values are never sent. Take exchange='sharded', or s=1",
            GrowingScalesWarning,
            stacklevel=2,
        )

    def _bucket_for(self, job: BucketJob) -> Bucket:
        bucket = self._buckets.get(job.index)
        if bucket is not None and bucket.fits(job):
            return bucket
        # The gradients are cut anew: what this step has not come to yet makes room.
        for index in self._buckets.keys() - set(self._done):
            if self._buckets[index] in self._captured:
                raise RuntimeError(
                    "DDP cuts its gradients anew, and a CUDA graph holds the buckets as they were"
                )
            self._unplaced.add(self._buckets.pop(index).residuals())
        self.find_machines()
        bucket = Bucket(job, self._coding, self._wire, self._queue)
        agree(bucket.description(self._wire.rank), self._wire)
        if not job.raw:
            self._warn_of_growing_scales(bucket.layout)
            bucket.adopt(self._unplaced.take(name for name, _ in job.tensors))
        self._buckets[job.index] = bucket
        return bucket

    def _begin_behind_replays(self) -> None:
        """What the last replay sent is put back by the buckets, where it was not finite."""
        if self._captured and self._queue is not None:
            self._queue.replays.begin_step()

    def _settle(self) -> None:
        """After a skipped step: what was sent in it, and applied nowhere, is owed again."""
        if self._step.skipped:
            for index in self._done:
                self._buckets[index].exchange.retract()
            self._done.clear()

    def _rescale(self, loss_scale: float | None) -> None:
        """Residuals are sums of scaled gradients: they follow the gradient scaler's scale."""
        before, self.loss_scale = self.loss_scale, loss_scale
        if before is None or loss_scale is None or before == loss_scale:
            return
        for bucket in self._buckets.values():
            bucket.exchange.scale_residuals(loss_scale / before)
        self._unplaced.scale(loss_scale / before)

    def _passed_non_finite(self, bucket: Bucket, job: BucketJob) -> bool:
        """Whether NaN or Inf came through a bucket that is not marked.

        One without residuals, or one of 16 bits, beyond whose range the average came to lie. It
        matters only where some bucket keeps residuals. The result has the same bits on every rank,
        and so has the verdict.
        """
        if job.raw or (bucket.exchange.keeps_residuals and bucket.dtype == torch.float32):
            return False
        if not any(other.exchange.keeps_residuals for other in self._buckets.values()):
            return False
        return not bool(torch.isfinite(job.values).all())

    def skip_last_step(self, why: str) -> None:
        """For a caller that will not apply the result: what was sent is owed again."""
        self._step.skipped = True
        self.totals.skipped_steps += 1
        self._warn_of_skipped(why)

    def _note_non_finite(self, bucket: Bucket) -> None:
        self._step.skipped = True
        where = bucket.exchange.non_finite
        what = (
            f"the average of {', '.join(name for name, _ in bucket.tensors)} is not finite"
            if where is None
            else f"the gradient of rank {where['rank']} is not finite at element "
            f"{where['element']} of {where['tensor']}; the bucket is NaN on every rank"
        )
        self._warn_of_skipped(what)

    def _warn_of_skipped(self, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"step {self._step.step}: {why}, so that the step is skipped (after a hook, by a "
            "gradient scaler), and the residuals are kept. Further steps like this are only "
            "counted (stats().skipped_steps)",
            NonFiniteStepWarning,
            stacklevel=2,
        )
