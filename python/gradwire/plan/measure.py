"""Makes the profile of a model of `gradwire train` on this machine.

As many workers as the training has compute at once, each in a process with one thread, so that
they share cores, caches and memory as in the training. All begin each step together. Messages go
over loopback, which no bandwidth limits, between two processes at least: beside a single worker,
one that only exchanges messages.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire.machine import describe_build, describe_machine, load_average
from gradwire.plan.cluster import Cluster
from gradwire.plan.costs import Volume, allreduce, sharded
from gradwire.plan.profile import CodecSpeed, Layer, Profile, Transport
from gradwire.train.settings import TrainSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from gradwire.plan.recorder import Marks

Gradients = dict[str, NDArray[np.float32]]

_KEPT_GRADIENTS = 3
_RESIDUAL_STEPS = 24  # until residuals have about their usual size
_CODEC_SECONDS = 0.15  # for each codec and operation
_TRANSPORT_ROUNDS = 12
_PATIENCE = timedelta(minutes=10)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class _Measured:
    """By one process. steps, codecs: empty where it only exchanges messages."""

    steps: list[Marks]
    codecs: dict[str, CodecSpeed]
    transport: Transport


def measure_profile(settings: TrainSettings, codecs: Sequence[str], steps: int) -> Profile:
    """Takes `steps` steps of the settings' model with settings.workers processes.

    Raises TrainError (no data), GradwireError (an unknown codec).
    """
    from gradwire.plan.recorder import profile_of
    from gradwire.train import data, models

    processes, load = max(2, settings.workers), load_average()
    images = data.load(settings.data, settings.data_dir)  # here, so that an error is seen once
    for codec in codecs:
        gradwire.max_encoded_size(codec, 0)
    with tempfile.TemporaryDirectory() as folder, _environment():
        store = str(Path(folder) / "store")
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            waiting = [
                pool.submit(_work, settings, rank, processes, store, tuple(codecs), steps)
                for rank in range(processes)
            ]
            measured = [work.result() for work in waiting]
    workers = measured[: settings.workers]
    model = models.build(settings.model, *images.shape, seed=0, width=settings.width, dropout=0.0)
    profile = profile_of(settings.model, model, [worker.steps for worker in workers])
    return replace(
        profile,
        codecs={codec: _mean([worker.codecs[codec] for worker in workers]) for codec in codecs},
        transport=_mean([process.transport for process in measured]),
        how={
            "machine": describe_machine(),
            "load_average": load,  # of other work, before
            "build": describe_build(),
            "batch": settings.batch,
            "data": settings.data,
            "steps": steps,
        },
    )


def _mean(measured: Sequence[Any]) -> Any:
    """The same dataclass with the means of all fields."""
    fields = vars(measured[0])
    return type(measured[0])(**{name: fmean(vars(m)[name] for m in measured) for name in fields})


@contextmanager
def _environment() -> Iterator[None]:
    """Variables that the processes must have before they import PyTorch."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(
    settings: TrainSettings,
    rank: int,
    processes: int,
    store: str,
    codecs: tuple[str, ...],
    steps: int,
) -> _Measured:
    """One of the processes; the first settings.workers of them compute."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=_PATIENCE,
    )
    workers = dist.new_group(list(range(settings.workers)))
    marks: list[Marks] = []
    speeds: dict[str, CodecSpeed] = {}
    values = torch.zeros(1, dtype=torch.int64)
    if rank < settings.workers:
        marks, gradients = _compute(settings, rank, steps, workers)
        for codec in codecs:
            dist.barrier(workers)
            speeds[codec] = measure_codec(codec, gradients)
        values[0] = sum(gradient.size for gradient in gradients[0].values())
    dist.broadcast(values, 0)
    meter = TransportMeter([1, int(values)])
    for _ in range(_TRANSPORT_ROUNDS):
        meter.measure()
    transport = meter.close()
    dist.destroy_process_group()
    return _Measured(marks, speeds, transport)


def _compute(
    settings: TrainSettings, rank: int, steps: int, workers: dist.ProcessGroup
) -> tuple[list[Marks], list[Gradients]]:
    """Steps of DDP that exchange nothing; the last of them keep their gradients."""
    import torch
    import torch.distributed as dist

    from gradwire.plan.recorder import StepRecorder, without_exchange
    from gradwire.train import data, models
    from gradwire.train.strategies import local_optimizer
    from gradwire.train.strategy import Strategy

    images = data.load(settings.data, settings.data_dir)
    model = models.build(
        settings.model,
        *images.shape,
        seed=settings.seed,
        width=settings.width,
        dropout=settings.dropout,
    )
    optimizer = local_optimizer(model, settings)
    strategy = Strategy(
        model, optimizer, forward=without_exchange(model, workers), clip=settings.clip
    )
    batches = images.batches(settings.batch, settings.workers, rank, settings.seed)
    gradients: list[Gradients] = []
    with StepRecorder(model) as recorder:
        for step in range(steps):
            dist.barrier(workers)
            recorder.begin_step()
            inputs, targets = (torch.from_numpy(array) for array in batches.at(step))
            strategy.take_step(inputs, targets).item()
            recorder.end_step()
            if step >= steps - _KEPT_GRADIENTS:
                gradients.append(
                    {
                        name: p.grad.detach().numpy().copy()
                        for name, p in model.named_parameters()
                        if p.grad is not None
                    }
                )
    return recorder.steps, gradients


def measure_codec(codec: str, gradients: Sequence[Gradients]) -> CodecSpeed:
    """Of the tensors that do not go raw, with the residuals of some steps; payloads alone."""
    names = [n for n, g in gradients[0].items() if not Layer(n, g.shape, 0.0).goes_raw]
    steps = [[np.ravel(step[name]) for name in names] for step in gradients]
    compressors = [gradwire.Compressor(codec, values.size) for values in steps[0]]
    turns = cycle(steps)
    frames = [
        [c.encode(values, number) for c, values in zip(compressors, next(turns), strict=True)]
        for number in range(_RESIDUAL_STEPS)
    ]
    total = sum(values.size for values in steps[0])
    payload = sum(gradwire.inspect(frame)["payload_bytes"] for frame in frames[-1])
    # One array, so that Python's part of a call does not count.
    flat = [np.concatenate([_scale(values) for values in step]) for step in steps]
    compressor = gradwire.Compressor(codec, total)
    out = np.zeros(compressor.max_encoded_size, np.uint8)
    inputs = cycle(flat)
    encode = _time(lambda: compressor.encode_into(next(inputs), out))
    frame = compressor.encode(flat[0], 0)
    added = np.zeros(total, np.float32)
    decode = _time(lambda: gradwire.decode_into(frame, added, accumulate=True))
    return CodecSpeed(encode / total, decode / total, 8 * payload / total)


def _scale(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """One scale fits the whole array, as each tensor's would fit it."""
    largest = np.abs(values).max()
    return values / largest if np.isfinite(largest) and largest > 0 else values


def _time(call: Callable[[], object]) -> float:
    """Mean seconds of a call; means include the time in which other workers have the core."""
    call()
    began, calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < _CODEC_SECONDS or calls < 3:
        call()
        calls += 1
    return seconds / calls


class TransportMeter:
    """Measures what an exchange of the hook and an all-reduce cost beside codec and bandwidth.

    Needs an initialised process group; all ranks make it, and call `measure`, together. sizes: of
    buckets; the first for the cost of messages, a second one for that of bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        from gradwire.torch.records.exchange_settings import ExchangeSettings
        from gradwire.torch.session.session import Session

        self._workers = dist.get_world_size()
        self._buckets = [torch.zeros(size) for size in sizes]
        self._session = Session(ExchangeSettings(codec="raw"))
        self._step = 0
        self._hook: list[list[float]] = [[] for _ in sizes]  # seconds, of each size
        self._reduce: list[list[float]] = [[] for _ in sizes]
        self.measure()  # connections, memory
        for times in (*self._hook, *self._reduce):
            times.clear()

    def measure(self) -> None:
        """One exchange and one all-reduce of each size."""
        import torch.distributed as dist

        for index, bucket in enumerate(self._buckets):
            self._hook[index].append(_time_together(partial(self._exchange, index, bucket)))
            self._reduce[index].append(_time_together(partial(dist.all_reduce, bucket)))

    def close(self) -> Transport:
        """The medians."""
        self._session.close()
        hook = [median(times) for times in self._hook]
        reduce = [median(times) for times in self._reduce]
        cluster = Cluster(self._workers, None)
        volumes = [Volume(b.numel(), 4 * b.numel(), 4 * b.numel()) for b in self._buckets]
        whole = volumes[-1]
        return Transport(
            message_seconds=hook[0] / sharded(volumes[0], cluster).handled,
            byte_seconds=max(0.0, hook[-1] - hook[0]) / sharded(whole, cluster).rank_bytes,
            allreduce_seconds=reduce[0],
            allreduce_byte_seconds=max(0.0, reduce[-1] - reduce[0])
            / allreduce(whole, cluster).rank_bytes,
        )

    def _exchange(self, index: int, bucket: torch.Tensor) -> None:
        from gradwire.torch.session.bucket import BucketJob

        tensors = [("values", [bucket.numel()])]
        job = BucketJob(step=self._step, index=index, tensors=tensors, values=bucket)
        self._step += 1
        self._session.submit(job).result()


def _time_together(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin at once."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
