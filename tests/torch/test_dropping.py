"""A model whose last reference is gone: its memory and its threads go, too, also after an error."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import (
    Execution,
    GradwireState,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
)
from gradwire.torch.errors import CommunicationError
from selection import long
from training import batch, make_model

Watched = dict[str, weakref.ref[Any]]


def leftovers(way: str, fails: bool) -> list[str]:
    """Names of objects and threads that outlive a training. `fails`: an error ended it."""
    gc.collect()
    earlier = set(threading.enumerate())
    watched = _WAYS[way](fails)
    gc.collect()
    kept = [name for name, reference in watched.items() if reference() is not None]
    own = set(threading.enumerate()) - earlier
    threads = [thread for thread in own if thread.name.startswith("gradwire")]
    for thread in threads:  # on a loaded machine it may be ending still
        thread.join(60.0)
    return kept + [thread.name for thread in threads if thread.is_alive()]


def _hook(fails: bool) -> Watched:
    ddp = DistributedDataParallel(make_model())
    state = GradwireState()
    ddp.register_comm_hook(state, gradwire_hook)

    def step(number: int) -> None:
        ddp(batch(0, number)[0]).sum().backward()

    _train(step, state.close, state, fails)
    return {"model": weakref.ref(ddp), "owner": weakref.ref(state)}


def _sharded(fails: bool) -> Watched:
    model = make_model()
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step(number: int) -> None:
        model(batch(0, number)[0]).sum().backward()
        optimizer.step()

    _train(step, optimizer.close, optimizer, fails)
    watched = {"model": model, "owner": optimizer, "shard": optimizer._shard}
    return {name: weakref.ref(value) for name, value in watched.items()}


def _train(step: Callable[[int], None], close: Callable[[], None], owner: Any, fails: bool) -> None:
    """With `fails`, rank 0 leaves after two steps, and the others see that in the third."""
    for number in range(2):
        step(number)
    if not fails:
        return
    if dist.get_rank() == 0:
        close()
    else:
        _expect_error(lambda: step(2))
    assert isinstance(owner.error, CommunicationError)


def _server(fails: bool) -> Watched:
    """Rank 1 serves. With `fails`, it stops with an error of its own after two versions."""
    model = make_model()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ServerOptimizer(local, model=model, execution=Execution(timeout=60.0))
    optimizer.connect()

    def stop(version: int) -> None:
        if fails and version == 2:
            raise ValueError("stopped by the test")

    def run() -> None:
        if optimizer.is_server:
            optimizer.serve(stop)
            return
        for number in range(2 + fails):
            nn.functional.cross_entropy(model(batch(0, number)[0]), batch(0, number)[1]).backward()
            optimizer.step()
        optimizer.close()

    _expect_error(run) if fails else run()
    watched = {"model": model, "owner": optimizer, "side": optimizer._side}
    return {name: weakref.ref(value) for name, value in watched.items()}


@dataclass(frozen=True)
class Held:
    """What a process holds. memory: resident, in bytes."""

    files: int
    threads: int
    memory: int


def serve_many(way: str, times: int) -> list[Held]:
    """Makes a ServerOptimizer again and again; rank 1 serves. What this process holds after each.

    way: "close" (the worker closes after two steps), "drop" (they only connect), "error" (the
    server stops with an error of its own).
    """
    held = []
    for _ in range(times):
        _serve_once(way)
        gc.collect()
        dist.barrier()
        held.append(_count_held())
    return held


def _serve_once(way: str) -> None:
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = ServerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), execution=Execution(timeout=60.0)
    )
    optimizer.connect()

    def stop(version: int) -> None:
        if version == 2 and way == "error":
            raise ValueError("stopped by the test")

    def run() -> None:
        if optimizer.is_server:
            optimizer.serve(stop)
            return
        for _ in range(2 + (way == "error")):
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        if way == "close":
            optimizer.close()

    if way == "error":
        _expect_error(run)
    elif way == "close":
        run()
    else:
        dist.barrier()  # what was not flushed may be lost


def _count_held() -> Held:
    """Waits for threads that are ending, and gives free memory back to the system."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end and any(
        thread.name.startswith("gradwire") for thread in threading.enumerate()
    ):
        time.sleep(0.05)
    ctypes.CDLL(None).malloc_trim(0)
    folder = Path("/proc/self")
    memory = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    return Held(files, threads, memory)


def _expect_error(run: Callable[[], None]) -> None:
    try:
        run()
    except (RuntimeError, ValueError):
        return
    raise AssertionError("there was no error")


_WAYS: dict[str, Callable[[bool], Watched]] = {
    "hook": _hook,
    "sharded": _sharded,
    "server": _server,
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["hook", "sharded", "server"])
def test_nothing_stays_of_a_model_that_is_dropped(
    fragile_cluster: Cluster, way: str, fails: bool
) -> None:
    assert fragile_cluster.run(2, leftovers, way, fails) == [[], []]


@pytest.mark.without_sanitizers
@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc, of glibc")
@pytest.mark.parametrize("way", ["close", *long("drop", "error")])
def test_many_servers_in_one_process_hold_no_more_than_a_few(
    fragile_cluster: Cluster, way: str
) -> None:
    """A model takes 4 MB."""
    for held in fragile_cluster.run(2, serve_many, way, 20):
        settled = held[9]
        assert held[-1].files <= settled.files, held
        assert held[-1].threads <= settled.threads, held
        early, late = (min(each.memory for each in part) for part in (held[5:10], held[15:]))
        # One model that stayed each time would be 40 MB. Arenas grow by a few models, and stop.
        assert late - early < 16_000_000, held
