"""Meters of what messages cost beside codecs and bandwidth."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
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
        return self._session.submit_for_torch(_job(self._exchanges, self._value))

    def measure(self, take_step: Callable[[], object] | None) -> None:
        """Some steps of each kind. take_step: without the exchange, with `begin` beside it; None:
        this rank does not compute."""
        for kind, seconds in self._seconds.items():
            self._kind = kind
            seconds += [time_together(take_step or self._wait) for _ in range(_BLOCK)]
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


def measure_bytes(values: int, rounds: int) -> tuple[float, float]:
    """Measures what the bytes of an exchange of the hook and of an all-reduce cost beside bandwidth
    and codec: MessageCosts.byte_seconds and allreduce_byte_seconds.

    Needs an initialised process group, of which all ranks call it together.
    """
    buckets, steps = (torch.zeros(1), torch.zeros(values)), count(1)
    session = Session(ExchangeSettings(codec="raw"))

    def exchange(index: int) -> None:
        session.submit(_job(next(steps), buckets[index], index)).result()

    def reduce(index: int) -> None:
        dist.all_reduce(buckets[index])

    seconds: dict[tuple[Callable[[int], None], int], list[float]] = defaultdict(list)
    for _ in range(1 + rounds):  # the first makes connections and takes memory
        for index in range(len(buckets)):
            for way in (exchange, reduce):
                seconds[way, index].append(time_together(partial(way, index)))
    session.close()

    def seconds_of_bytes(way: Callable[[int], None]) -> float:
        small, large = (median(seconds[way, index][1:]) for index in range(len(buckets)))
        return max(0.0, large - small)

    cluster, volume = Cluster(dist.get_world_size(), None), Volume(values, 4 * values, 4 * values)
    return (
        seconds_of_bytes(exchange) / sharded(volume, cluster).rank_bytes,
        seconds_of_bytes(reduce) / allreduce(volume, cluster).rank_bytes,
    )


def _job(step: int, values: torch.Tensor, index: int = 0) -> BucketJob:
    """The only one of its step. index: of buckets that have other sizes."""
    tensors = [("values", [values.numel()])]
    return BucketJob(step=step, index=index, tensors=tensors, values=values)


def time_together(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin at once."""
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
