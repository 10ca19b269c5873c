"""A bucket of gradients: what is to be done with it, and the exchange that does it.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from gradwire._core import Exchange
from gradwire.torch.coding import RAW_CODECS, Coding
from gradwire.torch.device_exchange import DeviceExchange
from gradwire.torch.device_queue import DeviceQueue
from gradwire.torch.engine import Lines, exchange_bucket
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.names import NamedShape
from gradwire.torch.residuals import Residual
from gradwire.torch.stats import COUNTED_BY_EXCHANGE, StepCounters
from gradwire.torch.transports import CollectiveTransport, run_step
from gradwire.torch.wire import Wire


@dataclass(frozen=True)
class BucketJob:
    """A bucket to average in place. `tensors` lie one behind the other in `values` (flat).

    `values` are float32, bfloat16 or float16; on a GPU, what is in them when `ready` has come.
    """

    step: int
    index: int
    last: bool  # of its step
    raw: bool
    tensors: list[NamedShape]
    values: torch.Tensor
    loss_scale: float | None
    queued: float
    hook_seconds: float
    hook_cpu_seconds: float
    ready: torch.cuda.Event | None = None


class Bucket:
    """The exchange of one bucket, as long as the bucket keeps its tensors and its coding."""

    def __init__(
        self, job: BucketJob, coding: Coding, wire: Wire, queue: DeviceQueue | None
    ) -> None:
        self.tensors = job.tensors
        self.raw = job.raw
        self.dtype = job.values.dtype
        raw_codec = RAW_CODECS[self.dtype]
        self.layout = coding.layout(job.tensors, wire.world_size, raw_codec, job.raw)
        self._queue = queue
        self.exchange: Exchange | DeviceExchange = (
            coding.make_exchange(self.layout, wire.rank)
            if queue is None
            else DeviceExchange(
                self.layout, wire.rank, queue.device, queue.replays, seed=coding.seed
            )
        )
        self._pullers = coding.machines(wire.world_size) - 1  # of each pull packet
        self.counted = self.exchange.stats()

    def description(self, rank: int) -> Lines:
        """The exchange's, with the dtype: replicas differ if their gradients are rounded unlike."""
        exchange, *layout = self.exchange.describe().split("\n")
        return Lines(rank, [exchange, f"gradients {self.dtype}", *layout])

    def fits(self, job: BucketJob) -> bool:
        same = self.raw == job.raw and self.dtype == job.values.dtype
        return same and self.tensors == job.tensors

    def average(self, job: BucketJob, wire: Wire) -> None:
        """In float32, whatever the gradients are; their average is rounded half to even."""
        wide = job.values.float()  # the bucket itself where it is float32
        if isinstance(self.exchange, DeviceExchange):
            assert self._queue is not None, "it was made for one"
            run_step(self.exchange.average(wide, job.step), self._queue.transport)
        else:
            exchange_bucket(self.exchange, wire, wide.numpy(), job.step)
        if wide is not job.values:
            job.values.copy_(wide)

    def capture(self, job: BucketJob) -> None:
        """The same in a CUDA graph."""
        if self._queue is None or not isinstance(self._queue.transport, CollectiveTransport):
            raise RuntimeError(
                "what is staged through the host can't be captured in a CUDA graph: it takes "
                "transport='nccl'"
            )
        assert isinstance(self.exchange, DeviceExchange), "there is a queue"
        wide = job.values.float()
        run_step(self.exchange.captured(wide), self._queue.transport)
        if wide is not job.values:
            job.values.copy_(wide)
        if wide is not job.values or not self.exchange.keeps_residuals:
            self._queue.replays.note(torch.isfinite(job.values).all().logical_not())

    def residuals(self) -> list[Residual]:
        return [Residual(**entry) for entry in self.exchange.export_residuals()]

    def adopt(self, residuals: list[Residual]) -> None:
        """Takes over what another exchange kept for these tensors."""
        for residual in residuals:
            self.exchange.import_residual(
                residual.kind, residual.name, residual.offset, residual.values
            )
        kept = {residual.name for residual in self.residuals()}
        for residual in residuals:
            if residual.name not in kept and residual.values.any():
                warnings.warn(
                    f"the {residual.kind} residual of {residual.name} is left out: the tensor's "
                    "codec keeps none now",
                    ResidualDroppedWarning,
                    stacklevel=2,
                )

    def count_into(self, step: StepCounters) -> None:
        """Adds what the exchange did since the last call."""
        values = step.values_pushed + self._pullers * step.values_pulled
        before, self.counted = self.counted, self.exchange.stats()
        for name in COUNTED_BY_EXCHANGE:
            increase = self.counted[name] - before[name]
            setattr(step, name, getattr(step, name) + increase)
        values = step.values_pushed + self._pullers * step.values_pulled - values
        step.raw_bytes += self.dtype.itemsize * values
        step.values += self.layout.numel
        step.dtypes.add(str(self.dtype).removeprefix("torch."))
