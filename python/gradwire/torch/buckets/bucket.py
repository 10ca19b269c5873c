"""A bucket of gradients: a job to average it, the exchange that does so, and its codecs.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch

from gradwire.torch.buckets.residuals import Shares
from gradwire.torch.checkpoint import (
    MemoryOrder,
    Orders,
    Residual,
    StateDict,
    reordered,
    residuals_in,
    take_residuals,
)
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.network.engine import Alike, StepEvents, Unused, finish_step
from gradwire.torch.network.transport import Transport
from gradwire.torch.parameters import NamedShape, writing_to
from gradwire.torch.staging.pieces import Arriving
from gradwire.torch.staging.stage import Stage
from gradwire.torch.stats import (
    ChosenCodec,
    StepCounters,
    TensorTraffic,
)

if TYPE_CHECKING:
    from gradwire.torch.buckets.auto_codecs import AutoCodecs


@dataclass(frozen=True)
class BucketJob:
    """A bucket to average in place. `tensors` lie one after the other in `values`, which is flat.

    `values` are float32, bfloat16 or float16.
    `factor`: multiplies the average before it is rounded to the dtype of the values.
    `unused`: the tensors that this rank has no gradient of, which are 0 in `values`; after the
    exchange, also those that no rank has one of. These stay 0, and their residuals as they were.
    `orders`: of the tensors that do not lie in `values` row-major.
    `parts`: buckets that together hold the model and take turns, each in steps of its own; 1: every
    step has all buckets. `moment`: says more about the step, equal on all ranks.
    `arriving`: `values` on their way to the host; None: they are there.
    `alike`: what else must be equal on all ranks in this step; compared when it has changed.
    """

    step: int
    tensors: list[NamedShape]
    values: torch.Tensor
    index: int = 0
    last: bool = True  # of its step
    parts: int = 1
    raw: bool = False
    moment: str = ""
    alike: str = ""
    factor: int = 1
    unused: Unused = field(default_factory=Unused)
    arriving: Arriving | None = None
    loss_scale: float | None = None
    orders: Orders = field(default_factory=dict)
    queued: float = field(default_factory=time.perf_counter)
    hook_seconds: float = 0.0
    hook_cpu_seconds: float = 0.0

    def all_values(self) -> torch.Tensor:
        """`values`, when all have arrived."""
        if self.arriving is not None:
            self.arriving.wait()
        return self.values


class Bucket:
    """The exchange of one bucket, as long as the bucket keeps its tensors and its settings."""

    def __init__(
        self,
        job: BucketJob,
        settings: ExchangeSettings,
        wire: Transport,
        stage: Stage,
    ) -> None:
        self.tensors = job.tensors
        self._orders = job.orders
        self._moment = f"step {job.step}{job.moment}"
        self.raw = job.raw
        self.dtype = job.values.dtype
        raw_codec = RAW_CODECS[self.dtype]
        self.layout = settings.bucket_layout(job.tensors, wire.world_size, raw_codec, job.raw)
        self._shares = Shares(self.layout, settings)
        self._on_device = stage.shard_codecs is not None
        self.exchange = settings.make_exchange(self.layout, wire.rank, stage.shard_codecs, job.raw)
        nbytes = self.exchange.residual_bytes
        self._memory = stage.keep(nbytes) if nbytes else None
        self._hands = 0  # that have the residuals
        info = settings.info
        self._passes_on = info["encodes_sums_on_the_way"] or info["between_machines"]
        # The last step's tensors that no rank has a gradient of, and their residuals.
        self._left_out: set[str] = set()
        self._kept: list[Residual] = []
        self._pullers = settings.machines(wire.world_size) - 1  # of each pull packet
        self._counted = self.exchange.stats()
        self._traffic = [(0, 0, 0, 0)] * len(job.tensors)

    def describe(self) -> str:
        """What must be equal on all ranks: the step in which the bucket is made (others have loaded
        the state of another step), the dtype, which decides how averages are rounded, the
        exchange's description, and the orders in memory."""
        orders = [f"{name} in memory {order.dims}" for name, order in self._orders.items()]
        described = [f"gradients {self.dtype}", self.exchange.describe().rstrip(), *orders]
        return "\n".join([self._moment, *described])

    def fits(self, job: BucketJob) -> bool:
        same = self.raw == job.raw and self.dtype == job.values.dtype
        return same and self.tensors == job.tensors and self._orders == job.orders

    def average(
        self,
        job: BucketJob,
        wire: Transport,
        alike: Alike | None = None,
        auto: AutoCodecs | None = None,
    ) -> None:
        """Averages in float32. The average is rounded half to even to the gradients' dtype.

        `alike`: hears what other ranks say of theirs; its `check` must follow.
        `auto`: tries the codecs among which it chooses on what this rank sends.
        """
        with self._residuals_at_hand():
            self._average(job, wire, alike, auto)

    def _average(
        self, job: BucketJob, wire: Transport, alike: Alike | None, auto: AutoCodecs | None
    ) -> None:
        arriving = job.arriving or Arriving(job.values)
        is_wide = self.dtype == torch.float32
        unused = job.unused
        if unused.own or auto is not None or not is_wide:
            arriving.wait()
        wide = job.values.float()  # the bucket itself if it is float32
        # A program may have taken a gradient off its parameter after it came into the bucket.
        unused.own = [at for at in unused.own if not any(v.any() for v in self._places(at, wide))]
        before = residuals_in(self.exchange, self._names(unused.own)) if unused.own else []
        said = [unused.begin(wire, len(self.tensors), self._passes_on)]
        if alike is not None:
            said.append(alike.begin(job.alike, wire, self._passes_on))
        if auto is not None:
            auto.record_pushes(self.layout, self.exchange, wide.cpu().numpy(), wire)
        if self._on_device:
            self.exchange.start_on_device(wide.data_ptr(), wide.numel(), job.step)
            finish_step(self.exchange, wire, said)
        else:
            events = StepEvents(wire, said, arriving, is_wide and job.factor == 1)
            self.exchange.start(wide, job.step, events)
            finish_step(self.exchange, wire, said, events.check)
        if self._left_out or unused.own:
            arriving.take_back()
            self._leave_out(unused.everywhere(), before, wide)
        if auto is not None:
            auto.record_pulls(self.layout, self.exchange, wide.cpu().numpy(), wire)
        if job.factor != 1:
            with writing_to(wide):
                wide.mul_(job.factor)
        if wide is not job.values:
            with writing_to(job.values):
                job.values.copy_(wide)

    @contextlib.contextmanager
    def _residuals_at_hand(self) -> Iterator[None]:
        """Around all that touches the exchange's residuals, which may lie elsewhere."""
        if self._memory is None or self._hands:
            yield
            return
        with self._memory.at_hand() as memory:
            self.exchange.keep_residuals_in(memory.numpy())
            self._hands += 1
            try:
                yield
            finally:
                self._hands -= 1

    def retract(self) -> None:
        """After a step whose result no rank applied: the residuals take back what it sent."""
        with self._residuals_at_hand():
            self.exchange.retract()
            self._restore_kept()

    def scale_residuals(self, factor: float) -> None:
        with self._residuals_at_hand():
            self.exchange.scale_residuals(factor)

    @cached_property
    def _slices(self) -> dict[str, list[slice]]:
        """Where each tensor lies in the bucket, by its name."""
        slices: dict[str, list[slice]] = {name: [] for name, _ in self.tensors}
        for segment in self.layout.segments:
            start = segment["bucket_offset"]
            slices[segment["name"]].append(slice(start, start + segment["numel"]))
        return slices

    def _places(self, tensor: int, values: torch.Tensor) -> list[torch.Tensor]:
        """The tensor's parts of the bucket."""
        name, _ = self.tensors[tensor]
        return [values[part] for part in self._slices[name]]

    def _names(self, tensors: Sequence[int]) -> set[str]:
        return {self.tensors[tensor][0] for tensor in tensors}

    def _leave_out(self, tensors: list[int], before: list[Residual], values: torch.Tensor) -> None:
        """Gives tensors that no rank has a gradient of the residuals `before` again, and zeros."""
        self._left_out = self._names(tensors)
        self._kept = [residual for residual in before if residual.name in self._left_out]
        self._restore_kept()
        for tensor in tensors:
            for part in self._places(tensor, values):
                with writing_to(part):
                    part.zero_()

    def _restore_kept(self) -> None:
        """Gives the tensors that were left out the residuals that they had."""
        take_residuals(self.exchange, self._left_out)
        for residual in self._kept:
            self.exchange.import_residual(*residual)

    @property
    def kept_values(self) -> int:
        """How many values this rank's residuals have."""
        with self._residuals_at_hand():
            return sum(residual.values.size for residual in residuals_in(self.exchange))

    def residuals(self) -> list[Residual]:
        """All of this rank, row-major."""
        with self._residuals_at_hand():
            kept = residuals_in(self.exchange)
        return list(reordered(kept, self._orders, MemoryOrder.to_rows))

    def adopt(self, residuals: list[Residual]) -> None:
        """Takes over the residuals that another exchange kept for these tensors, and this rank's
        share of what all ranks owe together."""
        if not residuals:
            return  # residuals_in copies all residuals
        in_memory = list(reordered(residuals, self._orders, MemoryOrder.from_rows))
        with self._residuals_at_hand():
            held = residuals_in(self.exchange)
            for residual in self._shares.take(in_memory, held):
                self.exchange.import_residual(*residual)
        for residual in residuals:
            if self._shares.drop(residual, held):
                warnings.warn(
                    f"the {residual.kind} residual of {residual.name} is dropped, as far as this "
                    "rank keeps none for its elements now: the codec has no error feedback, or "
                    "only that of the other direction has",
                    ResidualDroppedWarning,
                    stacklevel=2,
                )

    def count_into(self, step: StepCounters) -> None:
        """Adds what the exchange counted since the last call."""
        before, self._counted = self._counted, self.exchange.stats()
        grown = {name: count - before[name] for name, count in self._counted.items()}
        step.count(grown)
        values = grown["values_pushed"] + self._pullers * grown["values_pulled"]
        step.raw_bytes += self.dtype.itemsize * values
        step.values += self.layout.numel
        step.dtypes.add(str(self.dtype).removeprefix("torch."))
        self._traffic = self.exchange.tensor_traffic()

    def traffic(self) -> tuple[TensorTraffic, ...]:
        """The traffic of the steps that were counted; none of a bucket that goes raw as a whole."""
        if self.raw:
            return ()
        return tuple(
            TensorTraffic(name, prod(shape), *counted)
            for (name, shape), counted in zip(self.tensors, self._traffic, strict=True)
        )


class CodecChoice:
    """The codecs of the settings, or those that are chosen for their `auto` texts.

    Attributes:
        settings: with the codecs that hold now.
    """

    def __init__(self, settings: ExchangeSettings) -> None:
        self.settings = settings
        self._auto: AutoCodecs | None = None
        if settings.goals:
            from gradwire.torch.buckets.auto_codecs import AutoCodecs

            self._auto = AutoCodecs(settings.goals, settings.remedy)
        self._decides = False  # whether a decision ends the step under way

    @property
    def trying(self) -> AutoCodecs | None:
        """Tries codecs on what the step under way sends, if a decision ends it."""
        return self._auto if self._decides else None

    def begin_step(self, raw: bool) -> None:
        self._decides = self._auto is not None and not raw and self._auto.is_due()

    def end_step(self, wire: Transport) -> bool:
        """Ends a step that was compressed. Returns whether a codec changed."""
        return self._auto is not None and self._take(self._auto.end_step(self._decides, wire))

    def prepare(self, job: BucketJob, wire: Transport) -> None:
        """Chooses for the tensors of a new bucket."""
        if self._auto is None or job.raw:
            return
        layout = self.settings.bucket_layout(
            job.tensors, wire.world_size, RAW_CODECS[job.values.dtype]
        )
        values = job.all_values().float().cpu().numpy()
        self._take(self._auto.prepare(layout, values, wire))

    def load(self, state: StateDict) -> None:
        """Goes on with what a saved state has chosen."""
        if self._auto is not None and (chosen := state.get("auto")) is not None:
            self._auto.load_state_dict(chosen)
            self._take(True)

    def state_dict(self) -> StateDict | None:
        """None if nothing is chosen."""
        return None if self._auto is None else self._auto.state_dict()

    def summary(self) -> tuple[ChosenCodec, ...]:
        return () if self._auto is None else self._auto.summary()

    def remarks(self) -> tuple[str, ...]:
        return () if self._auto is None else self._auto.remarks()

    def _take(self, changed: bool) -> bool:
        if changed and self._auto is not None:
            self.settings = replace(self.settings, chosen=self._auto.chosen)
        return changed
