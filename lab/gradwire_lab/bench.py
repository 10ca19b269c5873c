"""Measures encode and decode_add next to memcpy, in one process, after checking them.

GB/s are 10^9 bytes of float32 a second: an encoder's input, a decoder's output. Each number is a
median over repetitions. Repetitions of the operation and of memcpy take turns, so that both meet
the same machine. memcpy is NumPy's copyto of the same number of values into a buffer that was
written before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import fmean, median
from timeit import Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire.errors import UserError
from gradwire_lab.bench_data import BenchData, Floats

OPERATIONS = ("encode", "decode_add")
SIZES = (200_000, 25_600_000)
# The variants to measure of a codec. A codec that is not here is measured with its defaults.
_VARIANTS = {
    "3lc": [f"3lc:s={s}{coder}" for s in ("1.00", "1.75") for coder in ("", ",coder=rice")],
    "qsgd": ["qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8", "qsgd:bits=2,coder=elias"],
}
_NAMES = [codec["name"] for codec in gradwire.codecs()]
CODECS = tuple(text for name in _NAMES for text in _VARIANTS.get(name, [name]))

# One timed repetition lasts at least about this long, so that the clock and the loop do not count.
# It is not much longer, so that on a busy machine most repetitions run without an interruption.
_REPETITION_SECONDS = 0.0005
_LEAST_REPETITIONS = 7
_WINDOWS = 64
# Steps before anything is timed, after which a residual has its usual size. They are done on at
# most _WARM_UP_NUMEL values, and the residual is repeated as the data are.
_WARM_UP_STEPS = 400
_WARM_UP_NUMEL = 1_000_000
_FRAMES = 8
_FRAME_BYTES = 1 << 28
# Below this size starting threads costs more than copying, so no parallel memcpy is measured.
_PARALLEL_MEMCPY_BYTES = 1 << 24

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    codec: str
    numel: int
    operation: str
    target: str
    threads: int


@dataclass(frozen=True)
class Measurement:
    """Rates in 10^9 bytes of float32 a second.

    parallel_memcpy: with as many threads as the case; None for one thread or a small size.
    relative_error: |b - decoded| / |b| of one step, where b is input plus residual.
    call_overhead: seconds that the same call takes on a single value, with all of Python's part;
    `seconds` includes them.
    class_shares: of inceptionn, the share of the values that takes 0, 8, 16 and 32 bits.
    """

    seconds: float
    repetitions: int
    gb_per_s: float
    memcpy_gb_per_s: float
    parallel_memcpy_gb_per_s: float | None
    share_of_memcpy: float
    bits_per_value: float
    relative_error: float
    call_overhead: float
    class_shares: dict[str, float] | None


class CheckError(UserError):
    """A codec gave a wrong result; nothing was timed."""


class Workload:
    """The inputs of all cases of one codec and size: windows, a warmed-up residual, frames."""

    def __init__(self, codec: str, numel: int, data: BenchData, seed: int) -> None:
        self.codec = codec
        self.numel = numel
        self.windows = data.windows(numel, _WINDOWS, seed)
        self.state = _warm_up(codec, numel, data, seed)
        # The bytes do not depend on the number of threads, so all threads are used here.
        compressor = self.compressor("auto", len(os.sched_getaffinity(0)))
        out = np.zeros(compressor.max_encoded_size, np.uint8)
        self.frames: list[NDArray[np.uint8]] = []
        for window in self.windows[:_FRAMES]:
            size = compressor.encode_into(window, out)
            self.frames.append(out[:size].copy())
            if len(self.frames) >= 2 and size * (len(self.frames) + 1) > _FRAME_BYTES:
                break
        self.relative_error = self._relative_error()
        self.class_shares = gradwire.inspect(self.frames[0]).get("class_shares")

    def _relative_error(self) -> float:
        grown = self.compressor("auto", 1).residual
        values = self.windows[0] if grown is None else self.windows[0] + grown
        # Encoding the sum without a residual gives the same frame as encoding with the residual.
        decoded = gradwire.decode(gradwire.encode(values, self.codec))
        error, norm = float(np.linalg.norm(values - decoded)), float(np.linalg.norm(values))
        return error / norm if norm else 0.0

    def compressor(self, target: str, threads: int) -> gradwire.Compressor:
        """A compressor with the warmed-up residual."""
        compressor = gradwire.Compressor(self.codec, self.numel, target=target, threads=threads)
        compressor.load_state_dict(self.state)
        return compressor


def _warm_up(codec: str, numel: int, data: BenchData, seed: int) -> dict[str, Any]:
    """The state of a compressor of `numel` values whose residual has its usual size."""
    state = gradwire.Compressor(codec, numel).state_dict()
    if state["residual"] is None:
        return state
    short = min(numel, _WARM_UP_NUMEL)
    windows = data.windows(short, _WINDOWS, seed + 1)
    compressor = gradwire.Compressor(codec, short)
    out = np.zeros(compressor.max_encoded_size, np.uint8)
    for step in range(_WARM_UP_STEPS):
        compressor.encode_into(windows[step % _WINDOWS], out)
    grown = compressor.residual
    assert grown is not None
    return state | {"residual": np.resize(grown, numel)}


def check(work: Workload, target: str, threads: int) -> None:
    """Compares one step of `target` with the codec's definition, which is the scalar target on one
    thread: frame, residual and decoded values must be equal bit for bit. Raises CheckError."""
    x = work.windows[0]
    compressor = work.compressor(target, threads)
    frame = compressor.encode(x)
    scalar = work.compressor("scalar", 1)
    where = f"check failed: {work.codec}, {work.numel} values, target {target}, {threads} threads"
    if frame != scalar.encode(x):
        raise CheckError(f"{where}: not the bytes of the scalar target")
    if not _same_bits(compressor.residual, scalar.residual):
        raise CheckError(f"{where}: not the residual of the scalar target")

    def decode(**options: Any) -> Floats:
        values = np.ones(work.numel, np.float32)
        gradwire.decode_into(frame, values, **options)
        return values

    decoded = decode(target=target, threads=threads)
    total = decode(accumulate=True, target=target, threads=threads)
    if not _same_bits(total, np.float32(1) + decoded):
        raise CheckError(f"{where}: decode_add is not decode and add")
    if not _same_bits(decoded, decode(target="scalar")):
        raise CheckError(f"{where}: not the values of the scalar target")


def measure(work: Workload, case: Case, seconds: float) -> Measurement:
    """Checks, then times one case for about `seconds`."""
    check(work, case.target, case.threads)
    sizes: list[int] = []
    operation = _operation(work, case, sizes)
    source, copied = work.windows[1], np.zeros(case.numel, np.float32)
    turns = [operation, lambda: np.copyto(copied, source)]
    with ThreadPoolExecutor(case.threads) as pool:
        if case.threads > 1 and copied.nbytes >= _PARALLEL_MEMCPY_BYTES:
            turns.append(lambda: _parallel_copy(pool, case.threads, copied, source))
        times = interleave(turns, seconds)
    rates = [4e-9 * case.numel / median(samples) for samples in times]
    return Measurement(
        seconds=median(times[0]),
        repetitions=len(times[0]),
        gb_per_s=rates[0],
        memcpy_gb_per_s=rates[1],
        parallel_memcpy_gb_per_s=rates[2] if len(rates) > 2 else None,
        share_of_memcpy=rates[0] / rates[1],
        relative_error=work.relative_error,
        bits_per_value=8 * fmean(sizes or map(len, work.frames)) / case.numel,
        call_overhead=_call_overhead(case),
        class_shares=work.class_shares,
    )


def _operation(work: Workload, case: Case, sizes: list[int]) -> Call:
    """One call of the case's operation; encoding notes the bytes of each frame in `sizes`."""
    if case.operation == "encode":
        compressor = work.compressor(case.target, case.threads)
        out = np.zeros(compressor.max_encoded_size, np.uint8)
        windows = cycle(work.windows)

        def encode() -> None:
            sizes.append(compressor.encode_into(next(windows), out))

        return encode
    total = np.zeros(case.numel, np.float32)
    frames = cycle(work.frames)

    def decode_add() -> None:
        gradwire.decode_into(
            next(frames), total, accumulate=True, target=case.target, threads=case.threads
        )

    return decode_add


def interleave(
    calls: Sequence[Call], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Runs the calls in turn until each has its share of `seconds`; seconds a call, for each."""
    timers = [Timer(call, timer=clock) for call in calls]
    for timer in timers:
        timer.timeit(1)
    counts = [max(1, round(_REPETITION_SECONDS / max(t.timeit(1), 1e-7))) for t in timers]
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    while len(times[0]) < _LEAST_REPETITIONS or time.perf_counter() < deadline:
        for timer, count, samples in zip(timers, counts, times, strict=True):
            samples.append(timer.timeit(count) / count)
    return times


def _parallel_copy(pool: ThreadPoolExecutor, threads: int, target: Floats, source: Floats) -> None:
    parts = np.array_split(target, threads), np.array_split(source, threads)
    list(pool.map(np.copyto, *parts))


def _call_overhead(case: Case) -> float:
    tiny = BenchData("one", "one value", np.ones(1, np.float32))
    work = Workload(case.codec, 1, tiny, 0)
    return median(interleave([_operation(work, replace(case, numel=1), [])], 0.02)[0])


def _same_bits(a: Floats | None, b: Floats | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
