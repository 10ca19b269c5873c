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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cluster import Cluster
from gradwire.torch import loopback
from gradwire.torch.buckets.session import Session
from gradwire.torch.errors import CommunicationError, PeerLostError, forget_frames
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.transport import LostError
from gradwire.torch.shared_parameters import ModuleHook
from selection import long
from training import loss_of, make_model
from ways import WAYS, Training, Way, build, sgd

Watched = dict[str, weakref.ref[Any]]


def leftovers(way: str, fails: bool) -> list[str]:
    """Names of objects and threads that outlive a training. `fails`: an error ended it."""
    gc.collect()
    earlier = set(threading.enumerate())
    watched = _train(_WAYS[way], fails)
    gc.collect()
    kept = [name for name, reference in watched.items() if reference() is not None]
    own = set(threading.enumerate()) - earlier
    threads = [thread for thread in own if thread.name.startswith("gradwire")]
    for thread in threads:  # on a loaded machine it may be ending still
        thread.join(60.0)
    return kept + [thread.name for thread in threads if thread.is_alive()]


def _train(way: Way, fails: bool) -> Watched:
    """With `fails`, rank 0, or the server, stops with an error after two steps, and the others see
    that in the third."""
    training = build(way, make_model(), timeout=60.0)
    source = training.source
    stops = source.is_server if way.servers else dist.get_rank() == 0

    def on_step(steps: int) -> None:
        if fails and stops and steps == 2:
            raise ValueError("stopped by the test")

    def run() -> None:
        training.run(2 + fails, loss_of, on_step)

    if fails:
        _expect_error(run)
        if stops:
            training.close()
        assert isinstance(source.error, CommunicationError) or way.servers
    else:
        run()
        if way.servers:
            training.close()
    watched = {"model": training.module, "owner": source}
    for part in ("_shard", "_side"):
        if hasattr(source, part):
            watched[part] = getattr(source, part)
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
    training = build(_WAYS["server"], nn.Linear(1000, 1000, bias=False), timeout=60.0)
    training.optimizer.connect()

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        outputs: torch.Tensor = module(torch.ones(1, 1000))
        return outputs.sum()

    def on_step(steps: int) -> None:
        if steps == 2 and way == "error" and training.optimizer.is_server:
            raise ValueError("stopped by the test")

    if way == "error":
        _expect_error(lambda: training.run(3, loss, on_step))
    elif way == "close":
        training.run(2, loss)
        training.close()
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


_WAYS = {"hook": Way("hook"), "sharded": Way("sharded"), "server": Way("server", servers=1)}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["hook", "sharded", "server"])
def test_nothing_stays_of_a_model_that_is_dropped(
    fragile_cluster: Cluster, way: str, fails: bool
) -> None:
    assert fragile_cluster.run(2, leftovers, way, fails) == [[], []]


class Keeper:
    """Raises an error that it kept before, so that error and frames hold each other."""

    def __init__(self) -> None:
        self._error = LostError((1,), False, "closed")

    def from_attribute(self) -> None:
        raise self._error

    def from_local(self) -> None:
        error = self._error
        del self._error
        raise error


def lose_peer(keeper: str, rank: int) -> bool:
    """Whether a session that has lost its peer stays in memory after its close."""
    session = Session(ExchangeSettings.of())
    if rank == 0:
        raising = getattr(Keeper(), keeper)
        error = session.start(lambda wire: raising(), "losing a peer").exception()
        assert isinstance(error, PeerLostError)
        del error, raising
    session.close()
    forget_frames(session.error)
    left = weakref.ref(session)
    del session
    return left() is not None


@pytest.mark.parametrize("keeper", ["from_attribute", "from_local"])
def test_a_session_that_lost_a_peer_goes_without_a_search_for_cycles(keeper: str) -> None:
    """Elastic ranks lose many peers, and a session holds residuals."""
    gc.collect()
    gc.disable()
    try:
        assert loopback.run(2, partial(lose_peer, keeper)) == [False, False]
    finally:
        gc.enable()


_USES: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "state": lambda model, optimizer: optimizer.state_dict(),
    "load": lambda model, optimizer: optimizer.load_state_dict({**optimizer.state_dict()}),
    "model's state": lambda model, optimizer: model.state_dict(),
    "model's load": lambda model, optimizer: model.load_state_dict(model.state_dict()),
}


def drop_within(way: Way, use: str, rank: int) -> tuple[bool, int]:
    """Drops a training within hooks of what it wrapped, where the garbage collector may find it.
    Returns whether it is gone, and the hooks it has left when there is another training."""
    held: list[Training] = []

    def drop(*given: object) -> None:
        held.clear()
        gc.collect()

    def inner(parameters: list[nn.Parameter]) -> Optimizer:
        made = sgd(parameters)
        made.register_step_pre_hook(drop)
        made.register_step_post_hook(drop)
        made.register_state_dict_pre_hook(drop)
        made.register_load_state_dict_pre_hook(drop)
        return made

    model: Any = make_model()
    model.register_state_dict_pre_hook(drop)
    model.register_load_state_dict_pre_hook(drop)
    held.append(build(way, model, inner))
    optimizer, source = held[0].inner, weakref.ref(held[0].source)
    _USES[use](model, optimizer)
    build(way, make_model())
    return source() is None, _count_hooks(model, optimizer)


def _count_hooks(model: nn.Module, optimizer: Optimizer) -> int:
    """Those of gradwire."""
    registries = [
        value
        for held in (*model.modules(), *model.parameters(), optimizer)
        for name, value in vars(held).items()
        if name.endswith("_hooks") and value
    ]
    hooks = [hook for registry in registries for hook in registry.values()]
    return sum(isinstance(getattr(hook, "hook", hook), ModuleHook) for hook in hooks)


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("way", ["ShardedOptimizer", "LocalSteps", "servers"])
def test_a_training_may_be_dropped_while_pytorch_calls_hooks(way: str, use: str) -> None:
    """PyTorch raises if one is removed meanwhile."""
    assert loopback.run(2, partial(drop_within, WAYS[way], use)) == [(True, 0)] * 2


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
