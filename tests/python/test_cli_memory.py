"""The memory that `compress`, `decompress` and `inspect` take, as the system measures it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import gradwire
from cli_runner import run
from golden import container as spec_container
from golden import encoder
from gradwire.container import Tensor, TensorFile, serialize
from payloads.three_lc import NUMBER as THREE_LC

MIB = 2**20
OWN = 96 * MIB  # of Python and NumPy

# The peak of the process alone: that of getrusage has the parent's before it.
MEASURED = """
import re, sys
from gradwire.cli import main

try:
    main(sys.argv[1:])
finally:
    print(re.search("VmHWM:(.*) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def measure(*command: object) -> tuple[int, str, int]:
    """Exit status, message, and the most bytes that the command held."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *message, kilobytes = done.stderr.splitlines()
    return done.returncode, "\n".join(message), 1024 * int(kilobytes)


def many(unit: bytes, size: int) -> bytes:
    """The header of a container with an array of so many `unit`s."""
    front = b'{"kind":"safetensors","metadata":{},"tensors":['
    count = (size - len(front) - 2) // (len(unit) + 1)
    return front + b",".join([unit] * count) + b"]}"


def test_a_long_header_of_a_container_takes_little(tmp_path: Path) -> None:
    """A header of 128 MiB took 3.5 GB."""
    path = tmp_path / "x.gw"
    for size, factor, reason in ((16 * MIB, 2, "are allowed"), (4 * MIB, 30, "tensor 0")):
        path.write_bytes(spec_container.seal_container(many(b"{}", size), b""))
        status, message, most = measure("inspect", path)
        assert status == 1
        assert reason in message
        assert most < OWN + factor * size


def test_a_long_header_of_a_safetensors_file_takes_little(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    text = b'{"a":' + many(b"{}", 16 * MIB) + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    status, message, most = measure("compress", path, "-c", "raw")
    assert status == 1
    assert "are allowed" in message
    assert most < OWN + 2 * len(text)


def test_decompress_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A file of 27 kB took 2.5 GB: all tensors, and then the file that is written."""
    zeros = gradwire.encode(np.zeros(2**24, np.float32), "3lc")
    tensors = tuple(Tensor(f"t{i}", "F32", (2**24,), zeros, "frame") for i in range(4))
    path, target = tmp_path / "x.gw", tmp_path / "x.safetensors"
    path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    target.symlink_to("/dev/null")
    status, message, most = measure("decompress", path, "--force")
    assert (status, message) == (0, "")
    assert most < OWN + 1.5 * 4 * 2**24


def test_how_many_values_a_small_file_may_hold(tmp_path: Path) -> None:
    """Without --max-values: 2^28, or 256 for each byte."""
    path = tmp_path / "x.gw"
    n = 2**30
    frame = encoder.seal_frame(THREE_LC, 0, 0, n, b"")
    for plain, more in ((1, False), (2**21, True)):
        tensors = (
            Tensor("a", "F32", (n,), frame, "frame"),
            Tensor("b", "U8", (plain,), bytes(plain)),
        )
        path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
        allowed = 256 * path.stat().st_size if more else 2**28
        assert f"{n} values in all; --max-values allows {allowed}" in run("decompress", path).err
