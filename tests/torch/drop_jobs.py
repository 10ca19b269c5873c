"""What is left of a training whose last reference is gone; for two ranks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    CommunicationError,
    GradwireState,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
)
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
    optimizer = ServerOptimizer(local, model=model, timeout=60.0)
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
