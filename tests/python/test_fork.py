"""A forked child has none of its parent's threads: it must start its own, and wait for none.

Pools of multiprocessing and the workers of a DataLoader are such children.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PREPARE = """
import os, signal, sys
import numpy as np
import gradwire

def run_in_child(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)  # as a program ends: with all destructors
    assert os.waitpid(child, 0)[1] == 0

x = np.random.default_rng(1).standard_normal(3_000_000, dtype=np.float32)
want = gradwire.encode(x, "3lc", threads=1)
"""

FUNCTIONS = """
def check():
    assert gradwire.encode(x, "3lc", threads=2) == want
    assert np.array_equal(gradwire.decode(want, threads=2), gradwire.decode(want))

check()
run_in_child(check)
run_in_child(lambda: None)
run_in_child(lambda: run_in_child(check))
check()
"""

COMPRESSOR = """
compressor = gradwire.Compressor("3lc", x.size, threads=2)
first = compressor.encode(x, 0)
other = gradwire.Compressor("3lc", x.size)
assert other.encode(x, 0) == first
second = other.encode(x, 1)

def check():
    assert compressor.encode(x, 1) == second

run_in_child(check)
check()
"""

POOL = """
import multiprocessing

def encode(seed):
    return gradwire.encode(x, "qsgd", seed=seed, threads=2)

seeds = range(4)
here = [encode(seed) for seed in seeds]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(encode, seeds) == here
"""


@pytest.mark.parametrize("script", [FUNCTIONS, COMPRESSOR, POOL], ids=["calls", "object", "pool"])
def test_a_forked_child_starts_threads_of_its_own(script: str) -> None:
    """It waited for ever for threads that it does not have."""
    ended = subprocess.run(
        [sys.executable, "-c", PREPARE + script], timeout=120, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


DAEMON = """
import threading
import numpy as np
import gradwire

x = np.ones(100_000, np.float32)
began = threading.Event()

def encode():
    while True:
        gradwire.encode(x, "3lc", threads=%d)
        began.set()

for _ in range(4):
    threading.Thread(target=encode, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_daemon_threads_may_encode_while_the_interpreter_exits(threads: int) -> None:
    """Python ended them inside C++, which aborted the process."""
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", DAEMON % threads], timeout=60, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stderr) == (0, "")
