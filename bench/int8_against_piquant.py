#!/usr/bin/env python3
"""Compares the speed of `int8:ef=off` with pi-quant's uint8, in one process, on one thread.

    python bench/int8_against_piquant.py [--numel 25600000] [--numel 200000] [--seconds 2] [--json]

Needs pi-quant (`pip install pypiquant==4.1.0 cffi`); without it the script says so and ends. Both
encoders first find their scale: pi-quant by compute_quant_params, gradwire by the largest
magnitude. Both round to the nearest level; both decoders add to float32 sums. Input, output and
sums are the same arrays for both, and the calls alternate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

import gradwire
from gradwire.cli.output import print_table, significant
from gradwire.machine import describe_build, describe_machine
from gradwire_lab.bench_data import Floats, load_data

CODEC = "int8:ef=off"
REPETITION_SECONDS = 0.003
WINDOWS = 8


@dataclass(frozen=True)
class Row:
    """Medians of GB/s of float32 values; speed_ratio: the median of the rounds' ratios."""

    numel: int
    operation: str
    memcpy_gb_per_s: float
    piquant_gb_per_s: float
    gradwire_gb_per_s: float
    speed_ratio: float


class PiQuant:
    """pi-quant's uint8, which writes to memory of ours. piquant: the module."""

    def __init__(self, piquant: Any, numel: int) -> None:
        self.context = piquant.Context(1)
        self.types = piquant.DataType.F32, piquant.DataType.UINT8
        self.nearest = piquant.RoundMode.NEAREST
        self.add = piquant.ReduceOp.ADD
        self.levels = np.zeros(numel, np.uint8)
        self.parameters: tuple[float, int] = 1.0, 0

    def encode(self, x: Floats) -> None:
        f32, uint8 = self.types
        at = x.ctypes.data
        self.parameters = self.context.compute_quant_params_ptr_float32(at, uint8, x.size)
        self.context.quantize_ptr(
            at, f32, self.levels.ctypes.data, uint8, x.size, *self.parameters, self.nearest
        )

    def decode_add(self, total: Floats) -> None:
        f32, uint8 = self.types
        self.context.dequantize_ptr(
            self.levels.ctypes.data,
            uint8,
            total.ctypes.data,
            f32,
            total.size,
            *self.parameters,
            self.add,
        )


def measure(piquant: Any, numel: int, seconds: float) -> list[Row]:
    windows = load_data("auto", 0).windows(numel, WINDOWS, 0)
    other = PiQuant(piquant, numel)
    compressor = gradwire.Compressor(CODEC, numel)
    out = np.zeros(compressor.max_encoded_size, np.uint8)
    total = np.zeros(numel, np.float32)
    check(other, windows[0])
    frame = out[: compressor.encode_into(windows[0], out)].copy()
    step = 0

    def window() -> Floats:
        nonlocal step
        step += 1
        return windows[step % WINDOWS]

    operations: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "encode": (
            lambda: other.encode(window()),
            lambda: compressor.encode_into(window(), out),
        ),
        "decode_add": (
            lambda: other.decode_add(total),
            lambda: gradwire.decode_into(frame, total, accumulate=True),
        ),
    }
    rows = []
    for operation, (theirs, ours) in operations.items():
        calls = (lambda: np.copyto(total, window()), theirs, ours)
        copy, slow, fast = alternate(calls, seconds / len(operations))
        memcpy, piquant_rate, rate = (4e-9 * numel / median(t) for t in (copy, slow, fast))
        ratio = median(a / b for a, b in zip(slow, fast, strict=True))
        rows.append(Row(numel, operation, memcpy, piquant_rate, rate, ratio))
    return rows


def check(other: PiQuant, x: Floats) -> None:
    """Both must restore x up to their quantization step, or the comparison means nothing."""
    other.encode(x)
    step = 1.01 * max(other.parameters[0], float(np.abs(x).max()) / 127)
    total = np.zeros_like(x)
    other.decode_add(total)
    for decoded in (total, gradwire.decode(gradwire.encode(x, CODEC))):
        # pi-quant's scale may be too small for the range; then the largest values are clipped.
        assert np.mean(np.abs(decoded - x) > step) < 0.01


def alternate(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Runs the calls alternately for about `seconds`; returns the seconds of each call."""
    counts = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        counts.append(max(1, round(REPETITION_SECONDS / elapsed)))
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < deadline:
        for call, count, samples in zip(calls, counts, times, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples.append((time.perf_counter() - start) / count)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, action="append", help="float32 values (repeatable)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each size")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        piquant = importlib.import_module("piquant")
    except ImportError as error:
        sys.exit(f"{error}; install it: {sys.executable} -m pip install pypiquant==4.1.0 cffi")
    sizes = arguments.numel or [25_600_000, 200_000]
    rows = [row for numel in sizes for row in measure(piquant, numel, arguments.seconds)]
    machine, build = describe_machine(), describe_build()
    if arguments.json:
        results = [asdict(row) for row in rows]
        print(json.dumps({"machine": machine, "build": build, "results": results}, indent=2))
        return
    print(
        f"{machine['cpu']}, target {build['simd_targets'][0]}, commit {build['commit']}, 1 thread"
    )
    print_table(
        ("values", "operation", "memcpy GB/s", "pi-quant GB/s", "gradwire GB/s", "speed ratio"),
        [
            (str(row.numel), row.operation, *map(significant, list(asdict(row).values())[2:]))
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
