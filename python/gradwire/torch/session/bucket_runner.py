"""Runs the buckets of a training: an exchange for each, residuals, skipped steps, counters.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gradwire._core import Layout, scale_growth
from gradwire.torch.device.device_queue import DeviceQueue
from gradwire.torch.link.alike import Alike
from gradwire.torch.link.connection import Connection
from gradwire.torch.link.engine import agree
from gradwire.torch.link.errors import (
    GrowingScalesWarning,
    NonFiniteStepWarning,
    OneMachineWarning,
    OutgrownResidualWarning,
    PeerMismatchError,
    UnmatchedPatternWarning,
    WorkerDiffersWarning,
)
from gradwire.torch.records.checkpoint import (
    Residual,
    StateDict,
    ranks_per_machine_of,
    residuals_of,
)
from gradwire.torch.records.exchange_settings import RAW, RAW_CODECS, ExchangeSettings
from gradwire.torch.records.parameters import all_finite
from gradwire.torch.records.stats import (
    BucketTiming,
    ChosenCodec,
    OutgrownResidual,
    RawTensor,
    StepCounters,
    TensorTraffic,
    Totals,
    raw_tensors_of,
    sum_by_name,
)
from gradwire.torch.session.auto_codecs import AutoCodecs
from gradwire.torch.session.bucket import Bucket, BucketJob
from gradwire.torch.session.machines import agree_on_machines

# In rings whose sums may grow further, least squares and a small network lost accuracy or diverged
# (docs/reference/exchanges.md).
_MOST_GROWTH = 8.0


@dataclass
class Counted:
    """What a runner has counted and said. Another one can go on from it."""

    totals: Totals = field(default_factory=Totals)
    last_step: StepCounters = field(default_factory=StepCounters)
    warned: set[type[Warning]] = field(default_factory=set)
    raw_tensors: tuple[RawTensor, ...] = ()
    traffic: tuple[TensorTraffic, ...] = ()


class BucketRunner:
    """Averages buckets in the order in which they come, which is the same on every rank."""

    def __init__(
        self, settings: ExchangeSettings, connection: Connection, queue: DeviceQueue | None = None
    ) -> None:
        """`queue`: of the device that the buckets are on; None: they are on the CPU."""
        self.totals = Totals()
        self.last_step = StepCounters()
        self._settings = settings
        self._auto = AutoCodecs(settings.goals, settings.remedy) if settings.goals else None
        self._stale: set[int] = set()  # buckets whose codecs are no longer those that were chosen
        self._decides = False  # whether a decision about codecs ends the step under way
        self._wire = connection.wire
        self._name_ranks = connection.name_ranks
        self._queue = queue
        # Residuals of parameters that no bucket has yet. They come from a checkpoint, or from
        # buckets that DDP has replaced.
        self._unplaced: list[Residual] = []
        self._unplaced_machines: int | None = None  # ranks_per_machine of the loaded state
        self._has_agreed = False
        self._buckets: dict[int, Bucket] = {}
        self._step = StepCounters(step=-1)
        self._done: list[int] = []  # bucket indices of the step under way
        self._sent_before = 0
        self.loss_scale: float | None = None
        self._warned: set[type[Warning]] = set()
        self._alike = Alike()
        self._may_differ = False
        self._keeps_undo = False
        self._undo: tuple[int, list[Residual]] | None = None  # see keep_undo
        self._released: tuple[RawTensor, ...] | None = None  # `raw_tensors`, after `release`
        self._traffic: tuple[TensorTraffic, ...] = ()  # of buckets that are no more

    def run(self, job: BucketJob) -> None:
        """Averages the bucket in place. After this it holds the same bits on every rank."""
        started = time.perf_counter()
        if job.step != self._step.step:
            self._begin_step(job)
        bucket = self._bucket_for(job)
        if self._keeps_undo:
            self._undo = job.index, bucket.residuals()
        ready = time.perf_counter()
        waited, cpu = self._wire.waited_seconds, time.thread_time()
        with torch.profiler.record_function(f"gradwire bucket {job.index}"):
            bucket.average(job, self._wire, self._alike, self._auto if self._decides else None)
            self._check_alike()
        finished = time.perf_counter()
        waited = self._wire.waited_seconds - waited

        step = self._step
        if job.index not in self._done:  # a step may have a bucket more than once
            self._done.append(job.index)
        bucket.count_into(step)
        for found in bucket.exchange.outgrown_residuals:
            self._note_outgrown(OutgrownResidual(**found))
        step.setup_seconds += ready - started
        step.wire_seconds += waited
        step.own_seconds += job.hook_seconds + finished - ready - waited
        step.own_cpu_seconds += job.hook_cpu_seconds + time.thread_time() - cpu
        step.buckets.append(BucketTiming(job.index, job.queued, started, finished))
        if what := self._describe_non_finite(bucket, job):
            step.skipped = True
            self._warn_of_skipped(what)
        if job.last:
            self.end_step(job.parts)

    def residuals(self) -> list[Residual]:
        """All residuals of this rank."""
        self._settle()
        placed = [r for bucket in self._buckets.values() for r in bucket.residuals()]
        return placed + self._unplaced

    def keep_undo(self) -> None:
        """From now on a copy of the residuals is kept while a bucket is averaged, so that an
        exchange that is broken off can be undone."""
        self._keeps_undo = True

    def let_differ(self) -> None:
        """From now on jobs whose `alike` differ from other ranks' give a warning, and no error."""
        self._may_differ = True

    def confirm(self) -> None:
        """The bucket is averaged, and nothing will be undone."""
        self._undo = None

    @property
    def unfinished(self) -> int | None:
        """The index of the bucket whose exchange was broken off, if there is one (keep_undo)."""
        return None if self._undo is None else self._undo[0]

    def residuals_before(self) -> list[Residual]:
        """As `residuals`, but those of the unfinished bucket as they were before its exchange."""
        if self._undo is None:
            return self.residuals()
        index, before = self._undo
        others = [b for i, b in self._buckets.items() if i != index]
        placed = [r for bucket in others for r in bucket.residuals()]
        return before + placed + self._unplaced

    def counted(self) -> Counted:
        return Counted(
            self.totals, self.last_step, self._warned, self.raw_tensors(), self.traffic()
        )

    def go_on_from(self, earlier: Counted) -> None:
        """Counts on where an earlier runner stopped; its residuals are left out."""
        self.totals, self.last_step = earlier.totals, earlier.last_step
        self._warned = earlier.warned
        self._traffic = earlier.traffic

    def adopt(self, residuals: list[Residual]) -> None:
        """Residuals of an exchange with other ranks. Each rank keeps what it owes itself; what it
        owed as the owner of a part is scaled so that it still counts once."""
        self._unplaced += residuals

    def replace_residuals(self, state: StateDict) -> None:
        """Replaces all residuals by those of a saved state.

        Raises ValueError if the state has another `ranks_per_machine`. If the ranks have not agreed
        on their machines yet, `agree_with_peers` raises it.
        """
        residuals = residuals_of(state)
        self._unplaced_machines = ranks_per_machine_of(state) if residuals else None
        if self._has_agreed:
            self._check_machines()
        self._traffic = self.traffic()
        self._buckets.clear()
        self._done.clear()
        self._unplaced = residuals
        self.loss_scale = state["loss_scale"]
        if self._auto is not None and (chosen := state.get("auto")) is not None:
            self._auto.load_state_dict(chosen)
            self._settings = replace(self._settings, chosen=self._auto.chosen)

    def auto_state(self) -> StateDict | None:
        """What was chosen for `auto` codecs; None if there are none."""
        return None if self._auto is None else self._auto.state_dict()

    def chosen_codecs(self) -> tuple[ChosenCodec, ...]:
        return () if self._auto is None else self._auto.summary()

    def auto_remarks(self) -> tuple[str, ...]:
        return () if self._auto is None else self._auto.remarks()

    def release(self) -> None:
        """Releases all exchanges. Residuals and counters stay, but no step can be taken."""
        self._released, self._unplaced = self.raw_tensors(), self.residuals()
        self._traffic = self.traffic()
        self._buckets.clear()

    @property
    def ranks_per_machine(self) -> int | None:
        """Ranks of which the first keeps residuals: 1 unless hierarchical; None: not known yet."""
        if not self._settings.info["between_machines"]:
            return 1
        return self._settings.ranks_per_machine if self._has_agreed else self._unplaced_machines

    def agree_with_peers(self) -> None:
        """Compares the settings with the peers' and agrees with them on `ranks_per_machine`, once.

        Raises PeerMismatchError for settings that differ."""
        if self._has_agreed:
            return
        agree("\n".join(self._settings.describe()), self._wire)
        if self._settings.info["between_machines"]:
            size = agree_on_machines(self._settings, self._wire)
            self._settings = replace(self._settings, ranks_per_machine=size)
            compresses = self._settings.choice["within_codec"] != RAW
            if size == self._wire.world_size > 1 and not compresses:
                self._warn_once(
                    f"all {size} ranks are on one machine, where "
                    f"exchange='{self._settings.exchange}' compresses nothing",
                    OneMachineWarning,
                )
        self._has_agreed = True
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
        """The tensors that go raw although another codec is set."""
        if self._released is not None:
            return self._released
        return raw_tensors_of([bucket.layout for bucket in list(self._buckets.values())])

    def traffic(self) -> tuple[TensorTraffic, ...]:
        """What this rank has encoded of each tensor."""
        there = [part for bucket in list(self._buckets.values()) for part in bucket.traffic()]
        return sum_by_name([*self._traffic, *there])

    def _begin_step(self, job: BucketJob) -> None:
        self._settle()
        self._rescale(job.loss_scale)
        self._step = StepCounters(step=job.step, raw=job.raw)
        self._done.clear()
        self._decides = self._auto is not None and not job.raw and self._auto.is_due()
        self._sent_before = self._wire.sent_bytes

    def end_step(self, parts: int = 1) -> None:
        """Counts the step under way. For a caller whose jobs are never the last of their step.
        parts: see BucketJob."""
        step = self._step
        if self._auto is not None and not step.raw:
            started = time.perf_counter()
            if self._auto.end_step(self._decides, self._wire):
                self._settings = replace(self._settings, chosen=self._auto.chosen)
                self._stale = set(self._buckets)
            step.setup_seconds += time.perf_counter() - started
        sent = self._wire.sent_bytes - self._sent_before
        step.control_bytes = sent - step.push_bytes - step.pull_bytes - step.local_bytes
        self.totals.add(step)
        self.last_step = step
        is_complete = len(self._buckets) >= parts
        if is_complete and not step.raw and UnmatchedPatternWarning not in self._warned:
            self._warned.add(UnmatchedPatternWarning)
            self._warn_of_unmatched()

    def _warn_of_unmatched(self) -> None:
        layouts = [bucket.layout for bucket in self._buckets.values()]
        for pattern in layouts[0].unmatched:
            if all(pattern in layout.unmatched for layout in layouts):
                warnings.warn(
                    f"no tensor of the model matches {pattern!r}, which rules= or exclude= has; "
                    "names are those of model.named_parameters()",
                    UnmatchedPatternWarning,
                    stacklevel=2,
                )

    def _check_alike(self) -> None:
        try:
            self._alike.check(self._wire)
        except PeerMismatchError as error:
            if not self._may_differ:
                raise
            self._warn_once(self._name_ranks(str(error)), WorkerDiffersWarning)

    def _note_outgrown(self, found: OutgrownResidual) -> None:
        if any(noted.name == found.name for noted in self.totals.outgrown_residuals):
            return
        self.totals.outgrown_residuals.append(found)
        # The text differs from tensor to tensor, so that Python shows each once.
        warnings.warn(found.describe(), OutgrownResidualWarning, stacklevel=2)

    def _warn_of_growing_scales(self, layout: Layout) -> None:
        settings = self._settings
        machines = settings.machines(self._wire.world_size)
        codecs = [segment["push_codec"] for segment in layout.segments]
        self._warn_of_growth(settings.inner_info, machines, codecs)
        if settings.within_info is not None:
            size = self._wire.world_size // machines
            self._warn_of_growth(settings.within_info, size, [settings.choice["within_codec"]])

    def _warn_of_growth(self, info: dict[str, Any], world_size: int, codecs: Sequence[str]) -> None:
        if not info["encodes_sums_on_the_way"] or world_size < 3:
            return
        growth, codec = max(((scale_growth(c), c) for c in codecs), default=(1.0, ""))
        whole = growth ** (world_size - 1)
        if whole <= _MOST_GROWTH:
            return
        self._warn_once(
            f"{codec} in a ring of {world_size} ranks: every hop encodes the sum so far and what "
            f"it still owes, so the values that are sent can grow {growth:.3g} times in each hop "
            f"and {whole:.3g} times on the whole way; the training loses accuracy or diverges. "
            f"Take codec='{info['default_codec']}', or exchange='sharded'",
            GrowingScalesWarning,
        )

    def _bucket_for(self, job: BucketJob) -> Bucket:
        bucket = self._buckets.get(job.index)
        if bucket is not None and bucket.fits(job) and job.index not in self._stale:
            return bucket
        # DDP made new buckets: the old ones, which this step has not used, are released.
        old = {job.index} if job.parts > 1 else set(self._buckets)
        for index in self._buckets.keys() & old - set(self._done):
            gone = self._buckets.pop(index)
            self._unplaced += gone.residuals()
            self._traffic = sum_by_name([*self._traffic, *gone.traffic()])
        self.agree_with_peers()
        self._stale.discard(job.index)
        if self._auto is not None and not job.raw:
            layout = self._settings.bucket_layout(
                job.tensors, self._wire.world_size, RAW_CODECS[job.values.dtype]
            )
            if self._auto.prepare(layout, job.values.float().cpu().numpy(), self._wire):
                self._settings = replace(self._settings, chosen=self._auto.chosen)
        bucket = Bucket(job, self._settings, self._wire, self._queue)
        agree(bucket.describe(), self._wire)
        if not job.raw:
            self._warn_of_growing_scales(bucket.layout)
            names = {name for name, _ in job.tensors}
            bucket.adopt([residual for residual in self._unplaced if residual.name in names])
            self._unplaced = [r for r in self._unplaced if r.name not in names]
        self._buckets[job.index] = bucket
        return bucket

    def _settle(self) -> None:
        """After a skipped step: puts the values that were sent in it back into the residuals."""
        if self._step.skipped:
            for index in self._done:
                self._buckets[index].retract()
            self._done.clear()

    def _rescale(self, loss_scale: float | None) -> None:
        """Gives residuals, which are sums of scaled gradients, the gradient scaler's new scale."""
        before, self.loss_scale = self.loss_scale, loss_scale
        if before is None or loss_scale is None or before == loss_scale:
            return
        factor = loss_scale / before
        for bucket in self._buckets.values():
            bucket.exchange.scale_residuals(factor)
        self._unplaced = [r._replace(values=r.values * np.float32(factor)) for r in self._unplaced]

    def _describe_non_finite(self, bucket: Bucket, job: BucketJob) -> str:
        """Says where NaN or Inf is if the step must be skipped, else "". All ranks skip the same
        steps.

        The average may hold NaN or Inf though the exchange found none in its input: in a bucket
        without residuals, and in a bucket of 16-bit values if the average is outside their range.
        Such a step must be skipped only if some bucket keeps residuals.
        """
        if (where := bucket.exchange.non_finite) is not None:
            return f"{self._name_ranks(where['text'])}; the bucket is NaN on every rank"
        if job.raw or (bucket.exchange.keeps_residuals and bucket.dtype == torch.float32):
            return ""
        if not any(other.exchange.keeps_residuals for other in self._buckets.values()):
            return ""
        if all_finite(job.values):
            return ""
        return f"the average of {', '.join(name for name, _ in bucket.tensors)} is not finite"

    def scale_residuals(self, bucket: int, factor: float) -> None:
        """Multiplies all residuals of a bucket, which has been averaged."""
        self._buckets[bucket].exchange.scale_residuals(factor)

    def skip_last_step(self, why: str) -> None:
        """For a caller that will not apply the result: the sent values go back to the residuals."""
        self._step.skipped = True
        self.totals.skipped_steps += 1
        self._warn_of_skipped(why)

    def _warn_of_skipped(self, why: str) -> None:
        self._warn_once(
            f"step {self._step.step}: {why}, so that the step is skipped (after a hook, by a "
            "gradient scaler), and the residuals are kept. Further steps like this are only "
            "counted (stats().skipped_steps)",
            NonFiniteStepWarning,
        )

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if category not in self._warned:
            self._warned.add(category)
            warnings.warn(text, category, stacklevel=2)
