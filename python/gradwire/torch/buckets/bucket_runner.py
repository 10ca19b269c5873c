"""Runs the buckets of a training: an exchange for each, and steps that are skipped.

Everything here happens in the communication thread, or while it is idle.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.distributed as dist

from gradwire.torch.buckets.auto_codecs import AutoCodecs
from gradwire.torch.buckets.bucket import Bucket, BucketJob
from gradwire.torch.buckets.ledger import Ledger, warn_of_growing_scales
from gradwire.torch.buckets.residuals import ResidualStore
from gradwire.torch.checkpoint import Residual, StateDict, ranks_per_machine_of, residuals_of
from gradwire.torch.errors import OneMachineWarning, PeerMismatchError, WorkerDiffersWarning
from gradwire.torch.exchange_settings import RAW, ExchangeSettings, check_machines
from gradwire.torch.network.connection import Connection
from gradwire.torch.network.engine import Alike, agree, gather, larger
from gradwire.torch.network.transport import Transport
from gradwire.torch.parameters import all_finite
from gradwire.torch.staging.stage import Stage
from gradwire.torch.stats import (
    BucketTiming,
    OutgrownResidual,
    RawTensor,
    StepCounters,
    TensorTraffic,
    raw_tensors_of,
    sum_by_name,
)

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # of torchrun: its processes on this machine


def count_on_each_host(hosts: Sequence[str]) -> int | None:
    """How many consecutive ranks each host has. hosts: of all ranks. None: their numbers differ, or
    ranks of a host are not consecutive."""
    count = hosts.count(hosts[0])
    is_even = hosts == [host for host in dict.fromkeys(hosts) for _ in range(count)]
    return count if is_even else None


def agree_on_machines(settings: ExchangeSettings, wire: Transport) -> int:
    """The number of ranks on one machine, which is the same on every rank of the wire.

    It is the number in the settings, or torchrun's number if the wire has all ranks, or else it is
    found by host names. Raises PeerMismatchError if ranks were given different numbers. Raises
    ValueError if the number does not divide the ranks, if hosts have different numbers of ranks, or
    if the ranks of a host are not consecutive.
    """
    origin, given = "ranks_per_machine", settings.ranks_per_machine
    # torchrun counts all ranks
    whole = dist.is_initialized() and wire.world_size == dist.get_world_size()
    if given is None and whole and LOCAL_WORLD_SIZE in os.environ:
        origin, given = f"{LOCAL_WORLD_SIZE} of torchrun", int(os.environ[LOCAL_WORLD_SIZE])
    size = "found by host names" if given is None else given
    agree(f"exchange {settings.info['name']}, ranks_per_machine {size}", wire)
    if given is not None:
        check_machines(given, wire.world_size, origin)
        return given
    hosts = gather(socket.gethostname(), wire)
    given = count_on_each_host(hosts)
    if given is None:
        raise ValueError(
            "the exchange needs the same number of consecutive ranks on every machine; "
            f"ranks 0 to {len(hosts) - 1} are on {', '.join(hosts)}. Start them so, "
            "or give ranks_per_machine"
        )
    return given


class BucketRunner:
    """Averages buckets in the order in which they come, which is the same on every rank.

    Attributes:
        ledger: what was counted and said.
        kept: the residuals.
        choice: the settings, with the codecs that hold now.
        may_differ: whether jobs whose `alike` differ between ranks give a warning, and no error.
    """

    def __init__(self, settings: ExchangeSettings, connection: Connection, stage: Stage) -> None:
        """stage: of the device that the buckets are on."""
        self._buckets: dict[int, Bucket] = {}
        self._stale: set[int] = set()  # buckets whose codecs are no longer those that were chosen
        self._done: list[int] = []  # bucket indices of the step under way
        self._current = -1  # index
        self._is_in_step = False
        self.ledger = Ledger(of_changes=settings.of_changes)
        self.kept = ResidualStore(self._buckets)
        self.choice = AutoCodecs(settings)
        self._wire = connection.wire
        self._name_ranks = connection.name_ranks
        self._stage = stage
        self._loaded_machines: int | None = None  # ranks_per_machine of the loaded state
        self._has_agreed = False
        self._alike = Alike()
        self.may_differ = False

    def run(self, job: BucketJob, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Averages the bucket in place. After this it holds the same bits on every rank.

        meanwhile: called before each wait for a peer; it may call `encode_ahead`."""
        started = time.perf_counter()
        self._wire.begin_turn()
        # After a state was loaded, the step of this number is taken once more.
        if not self._is_in_step or job.step != self.ledger.step.step:
            self._begin_step(job)
        bucket = self._bucket_for(job)
        self._current = job.index
        self.kept.begin(job.index)
        ready = time.perf_counter()
        waited, cpu = self._wire.waited_seconds, time.thread_time()
        with torch.profiler.record_function(f"gradwire bucket {job.index}"):
            bucket.average(job, self._wire, self._alike, self.choice.trying, meanwhile)
            self._check_alike()
        finished = time.perf_counter()
        waited = self._wire.waited_seconds - waited

        step = self.ledger.step
        if job.index not in self._done:  # a step may have a bucket more than once
            self._done.append(job.index)
        bucket.count_into(step)
        for found in bucket.exchange.outgrown_residuals:
            self.ledger.note_outgrown(OutgrownResidual(**found))
        step.setup_seconds += ready - started
        step.wire_seconds += waited
        step.own_seconds += job.hook_seconds + finished - ready - waited
        step.own_cpu_seconds += job.hook_cpu_seconds + time.thread_time() - cpu
        step.buckets.append(BucketTiming(job.index, job.queued, started, finished))
        if what := self._describe_non_finite(bucket, job):
            self.ledger.skip(what)
        if job.last:
            self.end_step(job.parts)

    def can_encode_ahead(self, job: BucketJob) -> bool:
        """Whether `encode_ahead` may be called for the job after the one that `run` is at. Bits and
        the order of messages are the same with it.

        In any thread, from the first call of `meanwhile` until `run` returns."""
        bucket = self._buckets.get(job.index)
        # A step that ends may change codecs and residuals.
        return (
            job.step == self.ledger.step.step
            and bucket is not None
            and bucket.takes_ahead
            and bucket.fits(job)
            and job.index not in {self._current, *self._done, *self._stale}
            and self.choice.trying is None
            and not self.kept.keeps_undo
        )

    def encode_ahead(self, job: BucketJob) -> Callable[[], None]:
        """What encodes and sends the pushes of the next job of `run`, in another thread."""
        sends = not self._alike.is_news(job.alike)  # which goes first, and in turn
        return self._buckets[job.index].encode_ahead(job, self._wire, sends)

    def _check_alike(self) -> None:
        try:
            self._alike.check(self._wire)
        except PeerMismatchError as error:
            if not self.may_differ:
                raise
            self.ledger.warn_once(self._name_ranks(str(error)), WorkerDiffersWarning)

    def residuals(self) -> list[Residual]:
        """All residuals of this rank."""
        self._settle()
        return self.kept.all()

    def residuals_before(self) -> list[Residual]:
        """As `residuals`, but those of the unfinished bucket as they were before its exchange."""
        return self.residuals() if self.kept.unfinished is None else self.kept.before_unfinished()

    def counted(self) -> Ledger:
        """The ledger, for another runner to go on from."""
        return replace(self.ledger, raw_tensors=self.raw_tensors(), traffic=self.traffic())

    def replace_residuals(self, state: StateDict) -> None:
        """Replaces all residuals by those of a saved state.

        Raises ValueError if the state has another `ranks_per_machine`. If the ranks have not agreed
        on their machines yet, `agree_with_peers` raises it.
        """
        residuals = residuals_of(state)
        self._loaded_machines = ranks_per_machine_of(state) if residuals else None
        if self._has_agreed:
            self._check_machines()
        self.ledger.traffic = self.traffic()
        self._buckets.clear()
        self._done.clear()
        self.kept.replace(residuals)
        self.kept.loss_scale = state["loss_scale"]
        self.choice.load_state_dict(state.get("auto"))

    def release(self) -> None:
        """Releases all exchanges. Residuals and counters stay, but no step can be taken."""
        self.kept.replace(self.residuals())
        self.ledger = self.counted()
        self._buckets.clear()

    @property
    def ranks_per_machine(self) -> int | None:
        """Ranks of which the first keeps residuals: 1 unless hierarchical; None: not known yet."""
        settings = self.choice.settings
        if not settings.info["between_machines"]:
            return 1
        return settings.ranks_per_machine if self._has_agreed else self._loaded_machines

    def agree_with_peers(self) -> None:
        """Compares the settings with the peers' and agrees with them on `ranks_per_machine`, once.

        Raises PeerMismatchError for settings that differ."""
        if self._has_agreed:
            return
        settings = self.choice.settings
        agree("\n".join(settings.describe()), self._wire)
        if settings.info["between_machines"]:
            size = agree_on_machines(settings, self._wire)
            self.choice.settings = replace(settings, ranks_per_machine=size)
            compresses = settings.choice["within_codec"] != RAW
            if size == self._wire.world_size > 1 and not compresses:
                self.ledger.warn_once(
                    f"all {size} ranks are on one machine, where "
                    f"exchange='{settings.exchange}' compresses nothing",
                    OneMachineWarning,
                )
        self._has_agreed = True
        self._check_machines()

    def _check_machines(self) -> None:
        saved, here = self._loaded_machines, self.ranks_per_machine
        if saved not in (None, here):
            raise ValueError(
                f"the state was saved with ranks_per_machine={saved}, here it is {here}: "
                f"gradwire.torch.reshard(states, world_size, ranks_per_machine={here}) moves its "
                "residuals"
            )

    def raw_tensors(self) -> tuple[RawTensor, ...]:
        """The tensors that go raw although another codec is set."""
        buckets = list(self._buckets.values())
        return self.ledger.raw_tensors or raw_tensors_of([bucket.layout for bucket in buckets])

    def traffic(self) -> tuple[TensorTraffic, ...]:
        """What this rank has encoded of each tensor."""
        there = [part for bucket in list(self._buckets.values()) for part in bucket.traffic()]
        return sum_by_name([*self.ledger.traffic, *there])

    def _begin_step(self, job: BucketJob) -> None:
        self._settle()
        self._is_in_step = True
        self.kept.rescale(job.loss_scale)
        self.ledger.begin(StepCounters(step=job.step, raw=job.raw), self._wire.sent_bytes)
        self._done.clear()
        self.choice.begin_step(job.raw)

    def end_step(self, parts: int = 1) -> None:
        """Counts the step under way. For a caller whose jobs are never the last of their step.
        parts: see BucketJob."""
        step, self._is_in_step = self.ledger.step, False
        if not step.raw:
            started = time.perf_counter()
            if self.choice.end_step(self._wire):
                self._stale = set(self._buckets)
            step.setup_seconds += time.perf_counter() - started
        self.ledger.end(self._wire.sent_bytes)
        if len(self._buckets) >= parts and not step.raw:
            self.ledger.warn_of_unmatched([bucket.layout for bucket in self._buckets.values()])

    def _bucket_for(self, job: BucketJob) -> Bucket:
        bucket = self._buckets.get(job.index)
        if bucket is not None and bucket.fits(job) and job.index not in self._stale:
            return bucket
        # DDP made new buckets: the old ones, which this step has not used, are released.
        old = {job.index} if job.parts > 1 else set(self._buckets)
        for index in self._buckets.keys() & old - set(self._done):
            gone = self._buckets.pop(index)
            self.kept.add(gone.residuals())
            self.ledger.traffic = sum_by_name([*self.ledger.traffic, *gone.traffic()])
        self.agree_with_peers()
        self._stale.discard(job.index)
        self.choice.prepare(job, self._wire)
        settings = self.choice.settings
        bucket = Bucket(job, settings, self._wire, self._stage)
        agree(bucket.describe(), self._wire)
        if not job.raw:
            warn_of_growing_scales(settings, bucket.layout, self._wire.world_size, self.ledger)
            self.kept.place(bucket)
        self._buckets[job.index] = bucket
        self._wire.ahead_limits = reduce(
            larger, (each.ahead_limits for each in self._buckets.values())
        )
        return bucket

    def _settle(self) -> None:
        """After a skipped step: puts the values that were sent in it back into the residuals."""
        if self.ledger.step.skipped:
            for index in self._done:
                self._buckets[index].retract()
            self._done.clear()

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
        self._buckets[bucket].scale_residuals(factor)

    def skip_last_step(self, why: str) -> None:
        """For a caller that will not apply the result: the sent values go back to the residuals."""
        self.ledger.totals.skipped_steps += 1
        self.ledger.skip(why)
