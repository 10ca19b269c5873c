"""Makes the profile of a model of `gradwire train` on this machine.

As many workers as the training has compute at once, each in a process with one thread, so that
they share cores, caches and memory as in the training. All begin each step together. Messages go
over loopback, which no bandwidth limits, between two processes at least: beside a single worker,
one that only exchanges messages.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count, cycle
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import gradwire
from gradwire.files import terminating_late
from gradwire.machine import describe_build, describe_machine, load_average
from gradwire.torch.parameters import named_parameters
from gradwire_lab.bench_data import scale
from gradwire_lab.plan.meters import MessageMeter, measure_bytes
from gradwire_lab.plan.profile import CodecSpeed, Layer, MessageCosts, Profile
from gradwire_lab.plan.recorder import Marks, StepRecorder, profile_of, without_exchange
from gradwire_lab.train import data, models
from gradwire_lab.train.settings import TrainSettings
from gradwire_lab.train.strategies import local_optimizer
from gradwire_lab.train.strategy import Strategy

Gradients = dict[str, NDArray[np.float32]]

KEPT_GRADIENTS = 3
# Bits are those of the second half, when residuals have about their usual size. From a step to the
# next they may differ by half.
_RESIDUAL_STEPS = 24
_CODEC_SECONDS = 0.15  # for each codec and operation
_RAW_BITS = 32.0
_TRANSPORT_ROUNDS = 12
_PATIENCE = timedelta(minutes=10)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}

# What a process measured; no steps and codecs where it only exchanges messages.
Measured = tuple[list[Marks], dict[str, CodecSpeed], MessageCosts]


def measure_profile(settings: TrainSettings, codecs: Sequence[str], steps: int) -> Profile:
    """Takes `steps` steps of the settings' model with settings.workers processes.

    Raises TrainError (no data), GradwireError (an unknown codec).
    """
    processes, load = max(2, settings.workers), load_average()
    images = data.load(settings.data, settings.data_dir)  # here, so that an error is seen once
    for codec in codecs:
        gradwire.max_encoded_size(codec, 0)
    model = models.build(settings.model, *images.shape, seed=0, width=settings.width, dropout=0.0)
    values = models.parameter_count(model)
    measured = _run_together(processes, _work, settings, codecs, steps, values)
    marks, speeds, costs = zip(*measured, strict=True)
    return replace(
        profile_of(settings.model, model, marks[: settings.workers]),
        codecs={c: mean([speed[c] for speed in speeds[: settings.workers]]) for c in codecs},
        transport=mean(costs),
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
    return cast(MessageCosts, mean(_run_together(processes, _exchange, values)))


def mean(measured: Sequence[Any]) -> Any:
    """The same dataclass with the means of all fields."""
    fields = vars(measured[0])
    return type(measured[0])(**{name: fmean(vars(m)[name] for m in measured) for name in fields})


def _run_together(processes: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work` returns in each of the processes, which are a process group. If one fails, or
    this one is interrupted, they end at once."""
    with (
        terminating_late(),
        tempfile.TemporaryDirectory() as folder,
        _environment(),
        ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent) as pool,
    ):
        store = (Path(folder) / "store").as_uri()
        try:
            with _uninterrupted():
                waiting = [
                    pool.submit(_join, store, rank, processes, work, *arguments)
                    for rank in range(processes)
                ]
            for one in as_completed(waiting):
                one.result()
            return [one.result() for one in waiting]
        except BaseException:
            for process in [*pool._processes.values()]:
                process.kill()
            raise


def _end_with_parent() -> None:
    """Ends this process, whatever it does, when the one that started it has died."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that start in the block never see Ctrl-C; this one does after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment() -> Iterator[None]:
    """Variables that the processes must have before they import PyTorch."""
    before = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    os.environ |= _ENVIRONMENT
    try:
        yield
    finally:
        for name in _ENVIRONMENT:
            del os.environ[name]
        os.environ |= before


def _join(
    store: str, rank: int, processes: int, work: Callable[..., Any], *arguments: Any
) -> object:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=processes, timeout=_PATIENCE
    )
    result = work(*arguments)
    dist.destroy_process_group()
    return result


def _work(settings: TrainSettings, codecs: Sequence[str], steps: int, values: int) -> Measured:
    """One of the processes; the first settings.workers of them compute."""
    workers, rank = dist.new_group(list(range(settings.workers))), dist.get_rank()
    if rank >= settings.workers:
        return [], {}, _exchange(values)
    images = data.load(settings.data, settings.data_dir)
    model = models.build(
        settings.model,
        *images.shape,
        seed=settings.seed,
        width=settings.width,
        dropout=settings.dropout,
    )
    messages = MessageMeter()
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
    speeds = {}
    for codec in codecs:
        dist.barrier(workers)
        speeds[codec] = measure_codec(codec, gradients, workers)
    return recorder.steps, speeds, _costs(messages, values)


def _exchange(values: int) -> MessageCosts:
    """One of the processes that computes nothing."""
    messages = MessageMeter()
    for _ in range(_TRANSPORT_ROUNDS):
        messages.measure(None)
    return _costs(messages, values)


def _costs(messages: MessageMeter, values: int) -> MessageCosts:
    """Measures bytes, too."""
    byte_seconds, allreduce_byte_seconds = measure_bytes(values, _TRANSPORT_ROUNDS)
    message_seconds, allreduce_seconds = messages.close()
    return MessageCosts(message_seconds, byte_seconds, allreduce_seconds, allreduce_byte_seconds)


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Copies."""
    return {
        name: parameter.grad.detach().to_dense().float().cpu().numpy().copy()
        for name, parameter in named_parameters(model)
        if parameter.grad is not None
    }


def measure_codec(
    codec: str, gradients: Sequence[Gradients], workers: dist.ProcessGroup | None = None
) -> CodecSpeed:
    """Measures the tensors that do not go raw, with the residuals of some steps, and payloads
    alone. A model of which all tensors go raw gives the codec no work.

    workers: whose averages are pulled; all call it together. None: the last steps of this one take
    their place.
    """
    names = [n for n, g in gradients[0].items() if not Layer(n, g.shape, 0.0).goes_raw]
    if not names:
        return CodecSpeed(0.0, 0.0, _RAW_BITS, _RAW_BITS)
    steps = [[np.ravel(step[name]) for name in names] for step in gradients]
    pushes = [gradwire.Compressor(codec, values.size) for values in steps[0]]
    pulls = [gradwire.Compressor(codec, values.size) for values in steps[0]]
    turns = cycle(steps)
    recent: deque[list[NDArray[np.float32]]] = deque(maxlen=len(gradients))
    pushed, pulled = [], []  # payload bytes of each step
    for number in range(_RESIDUAL_STEPS):
        frames = _encode(pushes, next(turns), number)
        recent.append([gradwire.decode(frame) for frame in frames])
        if workers is None:
            averages = [np.mean(steps, axis=0) for steps in zip(*recent, strict=True)]
        else:
            averages = [_average(values, workers) for values in recent[-1]]
        pushed.append(_payload_bytes(frames))
        pulled.append(_payload_bytes(_encode(pulls, averages, number)))
    later = slice(_RESIDUAL_STEPS // 2, None)
    total = sum(values.size for values in steps[0])
    # One array, so that Python's part of a call does not count. One scale fits it whole, as each
    # tensor's would fit the tensor.
    flat = [np.concatenate([scale(values) for values in step]) for step in steps]
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
    dist.all_reduce(torch.from_numpy(values), group=workers)
    return values / np.float32(workers.size())


def _payload_bytes(frames: Sequence[bytes]) -> int:
    return sum(gradwire.inspect(frame)["payload_bytes"] for frame in frames)


def _time(call: Callable[[], object]) -> float:
    """Mean seconds of a call; means include the time in which other workers have the core."""
    call()
    began, calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < _CODEC_SECONDS or calls < 3:
        call()
        calls += 1
    return seconds / calls
