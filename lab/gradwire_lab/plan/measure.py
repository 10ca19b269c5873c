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
from itertools import count, cycle
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire.machine import describe_build, describe_machine, load_average
from gradwire_lab.plan.profile import CodecSpeed, Layer, MessageCosts, Profile
from gradwire_lab.train.settings import TrainSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from gradwire_lab.plan.meters import MessageMeter
    from gradwire_lab.plan.recorder import Marks

Gradients = dict[str, NDArray[np.float32]]

KEPT_GRADIENTS = 3
# Bits are those of the second half, when residuals have about their usual size. From a step to the
# next they may differ by half.
_RESIDUAL_STEPS = 24
_CODEC_SECONDS = 0.15  # for each codec and operation
_TRANSPORT_ROUNDS = 12
_PATIENCE = timedelta(minutes=10)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class _Measured:
    """By one process. steps, codecs: empty where it only exchanges messages."""

    steps: list[Marks]
    codecs: dict[str, CodecSpeed]
    transport: MessageCosts


def measure_profile(settings: TrainSettings, codecs: Sequence[str], steps: int) -> Profile:
    """Takes `steps` steps of the settings' model with settings.workers processes.

    Raises TrainError (no data), GradwireError (an unknown codec).
    """
    from gradwire_lab.plan.recorder import profile_of
    from gradwire_lab.train import data, models

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


def measure_transport(processes: int, values: int) -> MessageCosts:
    """Measures messages between processes that compute nothing, and bytes of so many values."""
    with tempfile.TemporaryDirectory() as folder, _environment():
        store = str(Path(folder) / "store")
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            waiting = [
                pool.submit(_exchange, rank, processes, store, values) for rank in range(processes)
            ]
            return cast(MessageCosts, _mean([work.result() for work in waiting]))


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

    from gradwire_lab.plan.meters import MessageMeter

    _join(rank, processes, store)
    workers = dist.new_group(list(range(settings.workers)))
    messages = MessageMeter()
    marks: list[Marks] = []
    speeds: dict[str, CodecSpeed] = {}
    values = torch.zeros(1, dtype=torch.int64)
    if rank < settings.workers:
        marks, gradients = _compute(settings, rank, steps, workers, messages)
        for codec in codecs:
            dist.barrier(workers)
            speeds[codec] = measure_codec(codec, gradients, workers)
        values[0] = sum(gradient.size for gradient in gradients[0].values())
    else:
        for _ in range(_TRANSPORT_ROUNDS):
            messages.measure(None)
    dist.broadcast(values, 0)
    return _Measured(marks, speeds, _close(messages, int(values)))


def _exchange(rank: int, processes: int, store: str, values: int) -> MessageCosts:
    """One of the processes of which none computes."""
    from gradwire_lab.plan.meters import MessageMeter

    _join(rank, processes, store)
    messages = MessageMeter()
    for _ in range(_TRANSPORT_ROUNDS):
        messages.measure(None)
    return _close(messages, values)


def _join(rank: int, processes: int, store: str) -> None:
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


def _close(messages: MessageMeter, values: int) -> MessageCosts:
    """Measures bytes, and leaves the process group."""
    import torch.distributed as dist

    from gradwire_lab.plan.meters import ByteMeter

    of_bytes = ByteMeter(values)
    for _ in range(_TRANSPORT_ROUNDS):
        of_bytes.measure()
    message_seconds, allreduce_seconds = messages.close()
    byte_seconds, allreduce_byte_seconds = of_bytes.close()
    dist.destroy_process_group()
    return MessageCosts(message_seconds, byte_seconds, allreduce_seconds, allreduce_byte_seconds)


def _compute(
    settings: TrainSettings,
    rank: int,
    steps: int,
    workers: dist.ProcessGroup,
    messages: MessageMeter,
) -> tuple[list[Marks], list[Gradients]]:
    """Steps of DDP that exchange nothing; the last of them keep their gradients. Then some with
    messages."""
    import torch
    import torch.distributed as dist

    from gradwire_lab.plan.recorder import StepRecorder, without_exchange
    from gradwire_lab.train import data, models
    from gradwire_lab.train.strategies import local_optimizer
    from gradwire_lab.train.strategy import Strategy

    images = data.load(settings.data, settings.data_dir)
    model = models.build(
        settings.model,
        *images.shape,
        seed=settings.seed,
        width=settings.width,
        dropout=settings.dropout,
    )
    optimizer = local_optimizer(model, settings)
    forward = without_exchange(model, workers, messages.begin)
    strategy = Strategy(model, optimizer, forward=forward, clip=settings.clip)
    batches = images.batches(settings.batch, settings.workers, rank, settings.seed)
    numbers = count()

    def take_step() -> None:
        inputs, targets = (torch.from_numpy(array) for array in batches.at(next(numbers)))
        strategy.take_step(inputs, targets).item()

    gradients: list[Gradients] = []
    with StepRecorder(model) as recorder:
        for step in range(steps):
            dist.barrier(workers)
            recorder.begin_step()
            take_step()
            recorder.end_step()
            if step >= steps - KEPT_GRADIENTS:
                gradients.append(gradients_of(model))
    for _ in range(_TRANSPORT_ROUNDS):
        messages.measure(take_step)
    return recorder.steps, gradients


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Copies."""
    from gradwire.torch.parameters import named_parameters

    return {
        name: parameter.grad.detach().numpy().copy()
        for name, parameter in named_parameters(model)
        if parameter.grad is not None
    }


def measure_codec(
    codec: str, gradients: Sequence[Gradients], workers: dist.ProcessGroup
) -> CodecSpeed:
    """Measures the tensors that do not go raw, with the residuals of some steps, and payloads
    alone. All workers call it together."""
    names = [n for n, g in gradients[0].items() if not Layer(n, g.shape, 0.0).goes_raw]
    steps = [[np.ravel(step[name]) for name in names] for step in gradients]
    pushes = [gradwire.Compressor(codec, values.size) for values in steps[0]]
    pulls = [gradwire.Compressor(codec, values.size) for values in steps[0]]
    turns = cycle(steps)
    pushed, pulled = [], []  # payload bytes of each step
    for number in range(_RESIDUAL_STEPS):
        frames = _encode(pushes, next(turns), number)
        averages = [_average(gradwire.decode(frame), workers) for frame in frames]
        pushed.append(_payload_bytes(frames))
        pulled.append(_payload_bytes(_encode(pulls, averages, number)))
    later = slice(_RESIDUAL_STEPS // 2, None)
    total = sum(values.size for values in steps[0])
    # One array, so that Python's part of a call does not count.
    flat = [np.concatenate([_scale(values) for values in step]) for step in steps]
    compressor = gradwire.Compressor(codec, total)
    out = np.zeros(compressor.max_encoded_size, np.uint8)
    inputs = cycle(flat)
    encode = _time(lambda: compressor.encode_into(next(inputs), out))
    frame = compressor.encode(flat[0], 0)
    added = np.zeros(total, np.float32)
    decode = _time(lambda: gradwire.decode_into(frame, added, accumulate=True))
    return CodecSpeed(
        encode_seconds=encode / total,
        decode_seconds=decode / total,
        bits=8 * fmean(pushed[later]) / total,
        pull_bits=8 * fmean(pulled[later]) / total,
    )


def _encode(
    compressors: Sequence[gradwire.Compressor], step: Sequence[NDArray[np.float32]], number: int
) -> list[bytes]:
    return [c.encode(values, number) for c, values in zip(compressors, step, strict=True)]


def _average(values: NDArray[np.float32], workers: dist.ProcessGroup) -> NDArray[np.float32]:
    """The average over all workers."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.from_numpy(values), group=workers)
    return values / np.float32(workers.size())


def _payload_bytes(frames: Sequence[bytes]) -> int:
    return sum(gradwire.inspect(frame)["payload_bytes"] for frame in frames)


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
