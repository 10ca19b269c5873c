"""The backend "gradwire" of torch.distributed: it compresses large sums, and passes all else on."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.errors import warn_user
from gradwire.option_record import explains_arguments
from gradwire.torch.backend.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    Memories,
    Rules,
)
from gradwire.torch.backend.uncompressed import Uncompressed
from gradwire.torch.buckets.bucket import Bucket, BucketJob
from gradwire.torch.buckets.reduction import ExchangeWork, factor_of
from gradwire.torch.buckets.session import Session
from gradwire.torch.errors import ResidualDroppedWarning
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.network.engine import agree
from gradwire.torch.network.meeting import Meeting, Where
from gradwire.torch.network.transport import MakesTransports, Transport
from gradwire.torch.options import Execution
from gradwire.torch.parameters import writing_to
from gradwire.torch.stats import StepCounters

NAME = "gradwire"
CODEC = "int8:bucket=256"
# What the base class answers itself; all else that is not compressed is passed on.
_OWN = {"rank", "size", "name", "boxed", "unbox", "BackendType"}
# A group without residuals keeps so many for each device, those that were used last. Another size
# needs another exchange, which takes 2.4 bytes a value (int8, two ranks).
_MOST_EXCHANGES = 32


# Operation, device, dtype, values, whether they go raw, and the residual's number.
_Key = tuple[str, torch.device, torch.dtype, int, bool, int]


@dataclass
class OperationStats:
    """How often an operation was compressed on this rank, and what that saved."""

    codec: str | None
    compressed: int = 0
    passed_on: int = 0
    sent_bytes: int = 0  # by the compressed ones
    raw_bytes: int = 0  # what they would have sent uncompressed, in the values' own dtype


class GradwireGroup(dist.ProcessGroup):
    """A process group that sends what it does not compress through another one.

    It needs no world of torch.distributed. Every rank of the store must make it. ranks: their
    numbers in the world; empty: there is none.

    Attributes:
        has_compressed: Whether any group of this process has.
    """

    has_compressed = False

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        rules: Rules,
        timeout: timedelta,
        ranks: Sequence[int] = (),
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self._uncompressed = Uncompressed(store, rank, size, timeout)
        self._inner = self._uncompressed.group
        self._store = PrefixStore("gradwire/", store)
        self._rules = rules
        self._ranks = ranks
        self.timeout = timeout
        self._group_name = ""
        self._buckets: OrderedDict[_Key, Bucket] = OrderedDict()
        self._memories = Memories()
        self._counts = {op: OperationStats(codec) for op, codec in rules.codecs.items()}
        self._calls = 0
        self._sessions: dict[torch.device, Session] = {}
        if size > 1 and any(rules.codecs.values()):
            # Not at the first collective, which must not wait for other ranks if it is async_op.
            self._connect(torch.device("cpu"))

    # What is compressed ------------------------------------------------------------------------

    def allreduce(  # type: ignore[override] # as c10d calls it
        self, tensors: Any, options: Any = None
    ) -> dist.Work:
        options = dist.AllreduceOptions() if options is None else options
        several = isinstance(tensors, Sequence)
        values = tensors[0] if several else tensors
        alone = not several or len(tensors) == 1
        if not alone or not self._takes(ALL_REDUCE, values, options.reduceOp):
            return self._uncompressed.run("allreduce", tensors, options)
        given = values.view(1, -1)
        return self._exchange(
            Collective(
                ALL_REDUCE,
                values,
                rows=1,
                fill=lambda rows: rows.copy_(given),
                deliver=lambda rows: given.copy_(rows),
                factor=factor_of(options.reduceOp, self.size()),
            ),
            values,
        )

    def reduce_scatter_single(self, output: Any, given: Any, options: Any = None) -> dist.Work:
        options = dist.ReduceScatterOptions() if options is None else options
        if not self._takes(REDUCE_SCATTER, given, options.reduceOp, shard=output):
            return self._uncompressed.run("reduce_scatter_single", output, given, options)

        own, size = self.rank(), self.size()
        return self._exchange(
            Collective(
                REDUCE_SCATTER,
                given,
                rows=size,
                fill=lambda rows: rows.copy_(given.view(size, -1)),
                deliver=lambda rows: output.view(-1).copy_(rows[own]),
                factor=factor_of(options.reduceOp, size),
                sent_as=self._rules.sent_as(REDUCE_SCATTER),
            ),
            output,
        )

    def all_gather_single(self, output: Any, given: Any, options: Any = None) -> dist.Work:
        options = AllgatherOptions() if options is None else options
        if not self._takes(ALL_GATHER, output, shard=given):
            return self._uncompressed.run("all_gather_single", output, given, options)
        own, size = self.rank(), self.size()
        return self._exchange(
            Collective(
                ALL_GATHER,
                output,
                rows=size,
                fill=lambda rows: rows[own].copy_(given.reshape(-1)),
                deliver=lambda rows: output.view(size, -1).copy_(rows),
            ),
            output,
        )

    # Names that earlier versions of PyTorch call, and the lists of functional collectives.
    _reduce_scatter_base: Any = reduce_scatter_single
    _allgather_base: Any = all_gather_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist.Work:
        return self._one_by_one(self.reduce_scatter_single, outputs, inputs, options)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist.Work:
        return self._one_by_one(self.all_gather_single, outputs, inputs, options)

    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._uncompressed.barrier(opts)

    # What a group is asked for -----------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        return NAME

    def _set_group_name(self, name: Any) -> None:
        self._group_name = name
        self._inner._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        """PyTorch picks devices of tensors by it. It looks at a group that has some before that has
        its name."""
        is_known = self in distributed_c10d._world.pg_names
        return self._inner._device_types if is_known else []

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication of what is compressed."""
        errors = [session.error for session in list(self._sessions.values())]
        return next(filter(None, errors), None)

    def _check_session(self) -> None:
        for session in self._sessions.values():
            session.check()

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def shutdown(self) -> None:
        self.close()
        self._inner.shutdown()

    def abort(self) -> None:
        self.close()
        self._inner.abort()

    @property
    def kept_values(self) -> int:
        """How many values this rank's residuals have."""
        return sum(bucket.kept_values for bucket in self._buckets.values())

    def stats(self) -> dict[str, dict[str, Any]]:
        """OperationStats of each operation, as dictionaries."""
        return {op: asdict(counts) for op, counts in self._counts.items()}

    # -------------------------------------------------------------------------------------------

    def _takes(
        self,
        op: str,
        values: torch.Tensor,
        reduction: Any = None,
        shard: torch.Tensor | None = None,
    ) -> bool:
        """shard: the smaller tensor of the call. What does not fit together is passed on, too: the
        group below says so."""
        takes = self.size() > 1 and self._rules.takes(op, values, reduction)
        if shard is not None:
            takes &= shard.dtype == values.dtype and shard.device == values.device
            takes &= shard.is_contiguous()
            takes &= shard.numel() * self.size() == values.numel()
        if not takes:
            self._counts[op].passed_on += 1
        return takes

    def _one_by_one(
        self, run: Callable[..., dist.Work], outputs: Any, inputs: Any, options: Any
    ) -> dist.Work:
        works = [run(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def _exchange(self, collective: Collective, output: torch.Tensor) -> dist.Work:
        self._check_session()
        if output.device not in self._sessions:
            self._connect(output.device)
        session = self._sessions[output.device]
        if self._calls == 0:
            GradwireGroup.has_compressed = True
            if self.rank() == 0:
                print(self._rules.describe(), file=sys.stderr)
        self._calls += 1
        step, counts = self._calls, self._counts[collective.op]
        number, released = self._find_residual(collective.whole)

        def run(wire: Transport, raw: bool) -> tuple[torch.Tensor, bool]:
            """The exchanged values, and whether they must go raw."""
            job, device = collective.job(step, raw), output.device
            with session.stage.on_host(job.values) as values:
                there = replace(job, values=values)
                bucket = self._bucket_for(collective.op, device, number, there, wire)
                bucket.average(there, wire)
                is_spoiled = collective.found_non_finite(bucket, values, wire.rank)
            counted = StepCounters()
            bucket.count_into(counted)
            counts.sent_bytes += counted.push_bytes + counted.pull_bytes
            counts.raw_bytes += counted.raw_bytes
            return job.values, is_spoiled

        def work(wire: Transport) -> torch.Tensor:
            self._drop(released)
            values, is_spoiled = run(wire, raw=False)
            counts.compressed += 1
            if is_spoiled:
                values, _ = run(wire, raw=True)  # residuals are as before
            with writing_to(output):
                collective.deliver(collective.rows_of(values))
            return output

        doing = f"{collective.op} of {collective.whole.numel()} values"
        return ExchangeWork(session.start_for_torch(work, doing, output), [output])

    def _find_residual(self, values: torch.Tensor) -> tuple[int, list[int]]:
        """The number of the residual that belongs to the tensor (0 where none is kept), and those
        of the residuals whose tensors are no more."""
        if not self._rules.keeps_residuals:
            return 0, []
        return self._memories.number_of(values), self._memories.forget_released()

    def _drop(self, numbers: list[int]) -> None:
        for key in [key for key in list(self._buckets) if key[-1] in numbers]:
            if values := self._release(key).kept_values:
                warn_user(
                    f"a residual of {values:,} values is dropped, because the memory of the tensor "
                    "was released. Reduce the same memory in each step, as DDP does with its "
                    "buckets",
                    ResidualDroppedWarning,
                )

    def _bucket_for(
        self, op: str, device: torch.device, number: int, job: BucketJob, wire: Transport
    ) -> Bucket:
        values = job.values
        key = op, device, values.dtype, values.numel(), job.raw, number
        if key not in self._buckets:
            settings = self._rules.settings_of(op)
            first = next(iter(self._ranks), 0)
            settings = replace(settings, seed=settings.seed + first)  # groups draw apart
            bucket = Bucket(job, settings, wire, self._sessions[device].stage)
            agree("\n".join([op, *settings.describe(), bucket.describe()]), wire)
            self._buckets[key] = bucket
        if not self._rules.keeps_residuals:
            # Calls for one device come in the same order on all ranks, which so release alike.
            self._buckets.move_to_end(key)
            here = [known for known in list(self._buckets) if known[1] == device]
            for earlier in here[:-_MOST_EXCHANGES]:
                self._release(earlier)
        return self._buckets[key]

    def _release(self, key: _Key) -> Bucket:
        """For an exchange that is not under way; its messages have left when it ends."""
        _, device, dtype, numel, *_ = key
        self._sessions[device].stage.release_memory(dtype, numel)
        return self._buckets.pop(key)

    def _connect(self, device: torch.device) -> None:
        settings = replace(self._rules.settings, timeout=self.timeout.total_seconds())
        where: Where = self._inner
        if not isinstance(where, MakesTransports):
            where = Meeting(self._store, self.rank(), self.size(), self._ranks)
        session = self._sessions[device] = Session(settings, device, where)
        session.close_with(self)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: GradwireGroup, *args: Any, **options: Any) -> Any:
        return self._uncompressed.run(name, *args, **options)

    call.__name__ = name
    return call


for _name in dir(dist.ProcessGroup):
    _is_ours = _name in _OWN or _name in vars(GradwireGroup) or _name.startswith("__")
    if not _is_ours and callable(getattr(dist.ProcessGroup, _name)):
        setattr(GradwireGroup, _name, _passed_on(_name))


@explains_arguments
def register_backend(
    all_reduce: str | None = CODEC,
    reduce_scatter: str | None = CODEC,
    all_gather: str | None = None,
    *,
    min_numel: int = 65536,
    dtypes: Sequence[torch.dtype] = tuple(RAW_CODECS),
    name: str = NAME,
    execution: Execution = Execution(),
) -> None:
    """Makes a backend of torch.distributed that compresses large sums.

        gradwire.torch.register_backend()
        dist.init_process_group("cpu:gradwire,cuda:gradwire")

    Every group of this backend (also those of dist.new_group and of a DeviceMesh) compresses the
    operations that have a codec, on any device, and sends the rest over Gloo on the CPU and NCCL on
    CUDA; on another device the rest is copied to the host, sent over Gloo and copied back. What it
    compresses, it says on stderr of the group's first rank. DDP, FSDP2 and DTensor call these
    operations. A group knows values alone, and not whose they are, so it keeps no residuals:
    gradwire_hook, FullyShardComm and LocalSteps, which do, need fewer bits. A tensor with NaN or
    Inf is exchanged once more, uncompressed, so that they are where Gloo would have them.

    Every rank must register the same. The groups compare what they exchange; ranks that differ get
    an error that names both.

    Args:
        all_reduce: Codec of sums and averages, both ways. None: not compressed.
        reduce_scatter: Codec of sums and averages of tensors (reduce_scatter_tensor).
        all_gather: Codec of gathered tensors (all_gather_into_tensor). It is exact by default,
            because a program may gather more than weights.
        min_numel: Operations with fewer values are not compressed (of reduce-scatter and all-gather
            the larger tensor counts), nor those of other dtypes.
        dtypes: Some of float32, bfloat16 and float16; by default all.
        name: Another name, for a second backend with other codecs.
        execution: Threads, target and seed.

    Raises:
        GradwireError: A codec is unknown.
        ValueError: Another argument is not valid.
    """
    codecs = {ALL_REDUCE: all_reduce, REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather}
    rules = Rules(codecs, min_numel, dtypes, ExchangeSettings(**vars(execution)))

    def make(of: Any, _: Any) -> GradwireGroup:
        ranks = of.global_ranks_in_group or range(of.group_size)
        return GradwireGroup(of.store, of.group_rank, of.group_size, rules, of.timeout, ranks)

    # (PyTorch would make it the default of a device that has no backend.)
    devices = sorted(dist.Backend.default_device_backend_map)
    dist.Backend.register_backend(name, make, extended_api=True, devices=devices)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _monitored_barrier


_pytorchs_barrier = distributed_c10d.monitored_barrier


@wraps(_pytorchs_barrier)
def _monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """PyTorch's own looks for Gloo by its name, and refuses the group that has one inside."""
    target = dist.group.WORLD if group is None else group
    if isinstance(target, GradwireGroup):
        target.monitored_barrier(timeout or target.timeout, wait_all_ranks)  # type: ignore[attr-defined] # passed on
    else:
        _pytorchs_barrier(group, timeout, wait_all_ranks)
