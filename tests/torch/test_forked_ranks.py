"""A child that is forked from a rank must leave the rank's connections and threads alone.

The workers of a DataLoader are such children.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster import free_port

HOOK = """
import gc, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradwire, gradwire.torch

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(64, 64))
state = gradwire.torch.GradwireState(start_iter=0)
ddp.register_comm_hook(state, gradwire.torch.gradwire_hook)

def step():
    ddp(torch.ones(2, 64)).sum().backward()

def fork(work):
    child = os.fork()
    if child == 0:
        work()
        # Python's own end of a process, without PyTorch's destructors, which wait for its threads.
        import atexit
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def use():
    try:
        state._session.check()
    except gradwire.torch.errors.CommunicationError as error:
        assert "a child that was forked from it" in str(error), error
    else:
        raise AssertionError("the child may use the parent's connections")
    assert state.explain(ValueError("an error")).args == ("an error",)

def drop(close=False):
    global ddp, state
    signal.alarm(60)  # ends a child that waits for the parent's threads
    if close:
        state.close()
    del ddp, state
    gc.collect()

step()
fork(lambda: None)
step()
fork(use)
fork(state.close)
fork(drop)
fork(lambda: drop(close=True))
for _ in range(3):
    step()
assert state.stats().steps == 5, state.stats().steps
state.close()
dist.destroy_process_group()
print("done")
"""

LOADER = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import gradwire.torch

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(64, 64))
state = gradwire.torch.GradwireState(start_iter=0)
ddp.register_comm_hook(state, gradwire.torch.gradwire_hook)
data = TensorDataset(torch.ones(8, 64))
for epoch in range(3):
    for (x,) in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
        ddp(x).sum().backward()
assert state.stats().steps == 12, state.stats().steps
state.close()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("script", [HOOK, LOADER], ids=["hook", "loader"])
def test_children_of_a_rank_leave_it_alone(script: str) -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            | meet
            | {"RANK": r},
        )
        for r in "01"
    ]
    try:
        said = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, out) for rank, (out, _) in zip(ranks, said, strict=True)] == [
        (0, "done\n")
    ] * 2, said
