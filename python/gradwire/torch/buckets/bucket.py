"""A bucket of gradients: a job to average it, the exchange that does so, and its codecs.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from gradwire.errors import warn_user
from gradwire.torch.buckets.residuals import Shares
from gradwire.torch.checkpoint import (
    MemoryOrder,
    Orders,
    Residual,
    reordered,
    residuals_in,
    take_residuals,
)
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.network.engine import Alike, Announcements, StepEvents, Unused, finish_step
from gradwire.torch.network.transport import Kind, Transport
from gradwire.torch.parameters import NamedShape, writing_to
from gradwire.torch.staging.pieces import Arriving
from gradwire.torch.staging.stage import Stage
from gradwire.torch.stats import StepCounters, TensorTraffic

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
    `values_alike`: describes values that must be, too; compared when a rank `asks`.
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
    values_alike: Callable[[], str] | None = None
    asks: bool = False
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


class _Turn(NamedTuple):
    """A step of a bucket that has begun: its pushes are encoded."""

    job: BucketJob
    wide: torch.Tensor  # its values in float32
    before: list[Residual]  # of the tensors that this rank has no gradient of
    unused: Announcements
    events: StepEvents


class Bucket:
    """The exchange of one bucket, as long as the bucket keeps its tensors and its settings."""

    def __init__(
        self, job: BucketJob, settings: ExchangeSettings, wire: Transport, stage: Stage
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
        self._ahead: Future[_Turn] | None = None  # a turn that has begun, or its error
        self._ahead_seconds = self._ahead_cpu_seconds = 0.0  # not counted yet
        info = settings.info
        self._passes_on = info["encodes_sums_on_the_way"] or info["between_machines"]
        self.ahead_limits = {  # what a peer may send before the bucket's turn
            Kind.PACKET: self.exchange.max_message_size,
            Kind.UNUSED: Unused().begin(wire, len(job.tensors), self._passes_on).max_size,
        }
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
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Averages in float32. The average is rounded half to even to the gradients' dtype.

        `alike`: hears what other ranks say of theirs; its `check` must follow.
        `auto`: tries the codecs among which it chooses on what this rank sends.
        `meanwhile`: called before each wait for a peer.
        """
        ahead, self._ahead = self._ahead, None
        waits = time.perf_counter()
        begun = None if ahead is None else ahead.result()
        self._ahead_seconds -= time.perf_counter() - waits  # which the caller counts
        said = []
        if alike is not None:
            said.append(alike.begin(job.alike, wire, self._passes_on, job.values_alike, job.asks))
        with self._residuals_at_hand():
            turn = self._begin(job, wire, said, auto, wire.turn) if begun is None else begun
            if begun is not None:
                turn.events.go([turn.unused, *said], wire.turn)
            self._finish(turn, wire, [turn.unused, *said], auto, meanwhile)

    def encode_ahead(self, job: BucketJob, wire: Transport, sends: bool) -> Callable[[], None]:
        """What encodes, in another thread, what this rank pushes, while the bucket before this one
        has its turn. sends: at once; otherwise `average` does so."""
        number = wire.next_turn
        assert self.takes_ahead
        assert self._ahead is None, "a bucket has one turn in a step"
        ahead: Future[_Turn] = Future()
        self._ahead = ahead

        def work() -> None:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                with self._residuals_at_hand():
                    turn = self._begin(job, wire, [] if sends else None, None, number)
            except Exception as error:  # of this bucket, and not of the other
                ahead.set_exception(error)
            else:
                self._ahead_seconds = time.perf_counter() - began
                self._ahead_cpu_seconds = time.thread_time() - cpu
                ahead.set_result(turn)

        return work

    @property
    def takes_ahead(self) -> bool:
        """Whether `encode_ahead` is possible: residuals of a device come for one turn."""
        return not self._on_device and (self._memory is None or self._memory.stays)

    def _begin(
        self,
        job: BucketJob,
        wire: Transport,
        said: Sequence[Announcements] | None,
        auto: AutoCodecs | None,
        number: int,
    ) -> _Turn:
        """said: of others; None: messages are held. number: of the turn, as the wire counts."""
        arriving = job.arriving or Arriving(job.values)
        is_wide = self.dtype == torch.float32
        unused = job.unused
        if unused.own or auto is not None or not is_wide:
            arriving.wait()
        wide = job.values.float()  # the bucket itself if it is float32
        # A program may have taken a gradient off its parameter after it came into the bucket.
        unused.own = [at for at in unused.own if not any(v.any() for v in self._places(at, wide))]
        before = residuals_in(self.exchange, self._names(unused.own)) if unused.own else []
        announced = unused.begin(wire, len(self.tensors), self._passes_on)
        if auto is not None:
            auto.record_pushes(self.layout, self.exchange, wide.cpu().numpy(), wire)
        events = StepEvents(wire, arriving, is_wide and job.factor == 1)
        if said is not None:
            events.go([announced, *said], number)
        if self._on_device:
            self.exchange.start_on_device(wide.data_ptr(), wide.numel(), job.step)
        else:
            self.exchange.start(wide, job.step, events)
        return _Turn(job, wide, before, announced, events)

    def _finish(
        self,
        turn: _Turn,
        wire: Transport,
        said: Sequence[Announcements],
        auto: AutoCodecs | None,
        meanwhile: Callable[[], None],
    ) -> None:
        job, wide, unused = turn.job, turn.wide, turn.job.unused
        finish_step(self.exchange, wire, said, turn.events.check, meanwhile)
        if self._left_out or unused.own:
            if job.arriving is not None:
                job.arriving.take_back()
            self._leave_out(unused.everywhere(), turn.before, wide)
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
                warn_user(
                    f"the {residual.kind} residual of {residual.name} is dropped, as far as this "
                    "rank keeps none for its elements now: the codec has no error feedback, or "
                    "only that of the other direction has",
                    ResidualDroppedWarning,
                )

    def count_into(self, step: StepCounters) -> None:
        """Adds what the exchange counted since the last call."""
        before, self._counted = self._counted, self.exchange.stats()
        grown = {name: count - before[name] for name, count in self._counted.items()}
        step.count(grown)
        values = grown["values_pushed"] + self._pullers * grown["values_pulled"]
        step.raw_bytes += self.dtype.itemsize * values
        step.values += self.layout.numel
        step.own_seconds += self._ahead_seconds
        step.own_cpu_seconds += self._ahead_cpu_seconds
        self._ahead_seconds = self._ahead_cpu_seconds = 0.0
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
