"""Limits that take much memory or time: `scripts/test.sh limits`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import gradwire

GIB = 2**30
pytestmark = pytest.mark.skipif(
    "GRADWIRE_LIMITS" not in os.environ, reason="takes minutes: scripts/test.sh limits"
)


def need_memory(gib: int) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    entry = next(line for line in lines if line.startswith("MemAvailable:"))
    available = int(entry.split()[1]) * 1024
    if available < gib * GIB:
        pytest.skip(f"needs {gib} GiB of memory; {available / GIB:.1f} are available")


@pytest.mark.parametrize("codec", ["3lc:s=1.00", "int8", "topk:ratio=0.01,index=rice"])
def test_a_tensor_beyond_32_bits_of_a_signed_index(codec: str) -> None:
    need_memory(20)
    n = 2**31 + 7
    x = np.zeros(n, np.float32)
    places = [0, 2**31 - 1, 2**31, n - 1]
    x[places] = [1, -1, 1, -1]
    start = time.monotonic()
    frame = gradwire.encode(x, codec)
    del x
    encoded = time.monotonic()
    values = gradwire.decode(frame, max_numel=n)
    decoded = time.monotonic()
    print(f"{codec}: {encoded - start:.0f} s to encode, {decoded - encoded:.0f} s to decode")
    assert values.shape == (n,)
    np.testing.assert_allclose(values[places], [1, -1, 1, -1], rtol=0.01)
    if codec != "int8":
        values[places] = 0
    for begin in range(0, n, 2**28):
        assert np.count_nonzero(values[begin : begin + 2**28]) <= 4


def test_a_residual_of_such_a_tensor() -> None:
    need_memory(20)
    n = 2**31 + 7
    x = np.zeros(n, np.float32)
    places = [0, 2**31, n - 1]
    x[places] = [1, -1, -0.25]
    compressor = gradwire.Compressor("3lc:s=1,residual=bf16", numel=n)
    start = time.monotonic()
    for step in range(2):
        compressor.encode(x, step)
    print(f"two steps: {time.monotonic() - start:.0f} s")
    del x
    residual = compressor.residual
    assert residual is not None
    np.testing.assert_array_equal(residual[places], [0, 0, -0.5])  # half a scale becomes 0


def test_64_ranks_of_the_hook_on_one_machine(tmp_path: Path) -> None:
    need_memory(16)
    run_ranks(tmp_path, 64, steps=5)


def test_100_000_tensors_of_one_value(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, steps=2, tensors=100_000)


def run_ranks(folder: Path, ranks: int, steps: int, tensors: int = 0) -> None:
    """The hook trains; all ranks must end with the same model."""
    program = Path(__file__).with_name("rank.py")
    environment = os.environ | {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder, str(steps), str(tensors)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=1500)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    assert len({digest for digest, _ in printed}) == 1, "the replicas differ"
    seconds, gib = time.monotonic() - start, max(float(words[1]) for words in printed)
    print(f"{ranks} ranks, {steps} steps: {seconds:.0f} s, at most {gib:.1f} GiB in a rank")
