"""Meters of what messages cost beside codecs and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.buckets.session import Session
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.costs import Volume, allreduce, sharded

_BLOCK = 2  # steps
_ALONE, _HOOK, _REDUCE = "alone", "hook", "all-reduce"


class MessageMeter:
    """Measures what the messages of an exchange of the hook and of an all-reduce add to a step of
    DDP: both of one value, when the last gradient is there. Between steps they would cost less.

    Needs an initialised process group, of which all ranks make it, and call `measure` and `close`
    together.
    """

    def __init__(self) -> None:
        self._session = Session(ExchangeSettings(codec="raw"))
        self._value = torch.zeros(1)
        self._exchanges = 0
        self._kind = _ALONE  # of the steps under way
        self._seconds: dict[str, list[float]] = {_ALONE: [], _HOOK: [], _REDUCE: []}

    def begin(self) -> torch.futures.Future[Any] | None:
        """For `without_exchange`."""
        if self._kind == _ALONE:
            return None
        if self._kind == _REDUCE:
            work = dist.all_reduce(self._value, async_op=True)
            assert work is not None
            return work.get_future()
        self._exchanges += 1
        return self._session.submit_for_ddp(_job(self._exchanges, self._value))

    def measure(self, take_step: Callable[[], object] | None) -> None:
        """Some steps of each kind. take_step: without the exchange, with `begin` beside it; None:
        this rank does not compute."""
        for kind, seconds in self._seconds.items():
            self._kind = kind
            seconds += [_time_together(take_step or self._wait) for _ in range(_BLOCK)]
        self._kind = _ALONE

    def close(self) -> tuple[float, float]:
        """MessageCosts.message_seconds and allreduce_seconds, if `measure` was called twice or
        more: the first steps make connections."""
        self._session.close()
        later = [seconds[_BLOCK:] for seconds in self._seconds.values()]
        seconds = torch.tensor(later, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step ends when that of the last rank ends
        alone, *others = seconds
        hook, reduce = (max(0.0, float((other - alone).median())) for other in others)
        cluster = Cluster(dist.get_world_size(), None)
        return hook / sharded(Volume(1, 4, 4), cluster).handled, reduce

    def _wait(self) -> None:
        future = self.begin()
        if future is not None:
            future.wait()


class ByteMeter:
    """Measures what the bytes of an exchange of the hook and of an all-reduce cost beside bandwidth
    and codec.

    Needs an initialised process group, of which all ranks make it, and call `measure` together.
    """

    def __init__(self, values: int) -> None:
        self._workers = dist.get_world_size()
        self._buckets = torch.zeros(1), torch.zeros(values)
        self._session = Session(ExchangeSettings(codec="raw"))
        self._step = 0
        self._hook: tuple[list[float], ...] = [], []  # seconds, of each bucket
        self._reduce: tuple[list[float], ...] = [], []
        self.measure()  # connections, memory
        for times in (*self._hook, *self._reduce):
            times.clear()

    def measure(self) -> None:
        """One exchange and one all-reduce of each bucket."""
        for index, bucket in enumerate(self._buckets):
            self._hook[index].append(_time_together(partial(self._exchange, index, bucket)))
            self._reduce[index].append(_time_together(partial(dist.all_reduce, bucket)))

    def close(self) -> tuple[float, float]:
        """MessageCosts.byte_seconds and allreduce_byte_seconds."""
        self._session.close()
        numel = self._buckets[1].numel()
        cluster, volume = Cluster(self._workers, None), Volume(numel, 4 * numel, 4 * numel)
        hook, reduce = (
            max(0.0, median(large) - median(small)) for small, large in (self._hook, self._reduce)
        )
        return (
            hook / sharded(volume, cluster).rank_bytes,
            reduce / allreduce(volume, cluster).rank_bytes,
        )

    def _exchange(self, index: int, bucket: torch.Tensor) -> None:
        self._step += 1
        self._session.submit(_job(self._step, bucket, index)).result()


def _job(step: int, values: torch.Tensor, index: int = 0) -> BucketJob:
    """The only one of its step. index: of buckets that have other sizes."""
    tensors = [("values", [values.numel()])]
    return BucketJob(step=step, index=index, tensors=tensors, values=values)


def _time_together(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin at once."""

    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
