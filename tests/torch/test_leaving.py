"""The end of a process: no thread may come back from C++ while the interpreter ends.

Python ends such a thread in the middle of C++, which aborts the process: "terminate called without
an active exception". Each program here prolongs a moment that is short in practice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from cluster import free_port
from gradwire import GradwireError
from gradwire.torch.buckets import session
from gradwire.torch.errors import PeerLostError

SLOW_RELEASE = """
import os, threading, time
import gradwire.torch
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Slow:
    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            return
        slow.append("a group's thread")
        for _ in range(1000):
            time.sleep(0.001)

slow = []
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(nn.Linear(4, 4))
state = gradwire.torch.GradwireState(start_iter=0)
ddp.register_comm_hook(state, gradwire.torch.gradwire_hook)
ddp(torch.ones(2, 4)).sum().backward()
state.close()
del ddp, state
while not slow:  # until the group's thread is the last to release the tensor
    values = torch.ones(1 << 20)
    values.slow = Slow()
    work = dist.all_reduce(values, async_op=True)
    del values, work
    time.sleep(0.001)
dist.destroy_process_group()
print("slow:", *slow)
if os.path.exists("/proc/self/task"):
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print("left", [name for name in names if "gloo" in name])
"""

TWO_RANKS = """
import atexit, sys, threading, time

def show():
    print([thread.name for thread in threading.enumerate()])
    time.sleep(0.5)  # the other rank's connections close meanwhile

atexit.register(show)  # runs last
import torch, torch.distributed as dist
from torch import nn
import gradwire.torch

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(64, 64)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
"""

LEAVES_IN_A_STEP = """
from torch.nn.parallel import DistributedDataParallel
ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]),
                              bucket_cap_mb=0.01)
state = gradwire.torch.GradwireState()
ddp.register_comm_hook(state, gradwire.torch.gradwire_hook)
for step in range(3):
    output = ddp(torch.ones(2, 64)).sum()
    if step == 2:
        # Each rank waits for a bucket that the other one never has.
        state._session.start(lambda wire: wire.receive(1 - rank, {}), "a bucket")
        dist.barrier()
    else:
        output.backward()

# The same for a group that the program has destroyed.
optimizer = gradwire.torch.ShardedOptimizer(sgd, model)
dist.barrier()
optimizer._session.start(lambda wire: wire.receive(1 - rank, {}), "a step")
dist.destroy_process_group()
sys.exit(7)
"""

LEAVES_A_CLOSE = """
import signal

def interrupt(*_):
    raise KeyboardInterrupt

optimizer = gradwire.torch.ShardedOptimizer(sgd, model)
dist.barrier()
optimizer._session.start(lambda wire: wire.receive(1 - rank, {}), "a step")
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)  # close() waits longer for the step
try:
    optimizer.close()
except KeyboardInterrupt:
    sys.exit(7)
"""

LEAVES_SERVERS = """
optimizer = gradwire.torch.ServerOptimizer(sgd)
optimizer.connect()
dist.barrier()
sys.exit(7)
"""


LEAVES_IN_THE_MIDDLE = """
import pathlib, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from gradwire.torch import GradwireState, gradwire_hook

dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
ddp.register_comm_hook(GradwireState(), gradwire_hook)
for step in range(3):
    output = ddp(torch.ones(2, 64)).sum()
    if step == 2 and dist.get_rank() == 1:
        time.sleep(300)  # the test ends it
    if step == 2:
        def stop(gradient):
            pathlib.Path(sys.argv[1]).write_text(str(time.monotonic()))
            raise RuntimeError("an error of the program")
        model[0].weight.register_hook(stop)
    output.backward()
"""


def test_a_groups_thread_ends_before_the_interpreter() -> None:
    result = _start(SLOW_RELEASE).communicate(timeout=180)
    said = "".join(result)
    assert "terminate" not in said
    assert "slow: a group's thread" in said
    if sys.platform == "linux":
        assert "left []" in said


@pytest.mark.parametrize(
    "leaves",
    [LEAVES_IN_A_STEP, LEAVES_A_CLOSE, LEAVES_SERVERS],
    ids=["hook", "interrupted close", "server"],
)
def test_two_ranks_leave_without_close_and_wait_for_each_other(leaves: str) -> None:
    ranks = _start_two(TWO_RANKS + leaves)
    said = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [7, 7], said
    assert [out for out, _ in said] == ["['MainThread']\n"] * 2
    assert not any("gradwire: rank" in err for _, err in said)


def test_a_rank_leaves_though_its_communication_waits(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    begin = time.monotonic()
    leaver, other = _start_two(LEAVES_IN_THE_MIDDLE, str(stopped))
    _, said = leaver.communicate(timeout=240)
    end = time.monotonic()
    other.kill()
    other.communicate()
    assert "an error of the program" in said
    assert leaver.returncode == 1
    raised = float(stopped.read_text())
    # The time until the processes began shows how busy the machine is.
    assert end - raised < 30 + (raised - begin)


def _start_two(script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [_start(script, *arguments, **meet, RANK=rank) for rank in "01"]


def _start(script: str, *arguments: str, **place: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | place,
    )


@pytest.mark.parametrize(
    ("error", "is_explained"),
    [
        (RuntimeError("Connection closed by peer"), True),  # PyTorch's
        (PeerLostError("rank 1 is gone", (1,)), False),
        (GradwireError("message from rank 1: packet: the checksum does not match"), False),
        (ValueError("the data of this rank"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x32 and 64x8)"), False),
    ],
)
def test_only_an_error_that_may_be_pytorchs_is_explained_at_exit(
    error: Exception,
    is_explained: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank with two sessions, as FullyShardComm with weights= has, ended with a GradwireError and
    then said that other ranks were gone: they had stopped because of it."""
    other = mock.Mock(error=None)
    other._find_cause.return_value = None
    other.explain.return_value = PeerLostError("rank 2 is gone", (2,))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    session._finish(other)
    assert capsys.readouterr().err == ("gradwire: rank 2 is gone\n" if is_explained else "")
    other._end.assert_called_once_with()
