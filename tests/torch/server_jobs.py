"""The functions that workers and servers of a ServerOptimizer run in the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import ServerOptimizer
from runs import sgd
from training import digest, loss_of, make_model
from ways import Inner, Way, build


@dataclass(frozen=True)
class Job:
    versions: int = 8
    inner: Inner = sgd
    arguments: dict[str, Any] = field(default_factory=dict)  # of ServerOptimizer
    decay: float = 1.0  # a scheduler on the workers multiplies lr by it in each step
    stalled: int = -1  # a worker that waits, before its step 3,
    stall_versions: int = 8  # until another one has so many versions more
    non_finite: int = -1  # a worker whose gradient of step 2 holds NaN
    non_finite_at_backward: int = -1  # the same, but the backward pass computes it
    victim: int = -1  # a rank that sends itself `signal` from version 4 on
    signal: int = signal.SIGKILL
    leaver: int = -1  # a worker that leaves after 3 steps
    other: dict[str, Any] = field(default_factory=dict)  # arguments of rank 1 that differ
    owed: float = 0.0  # every value of rank 0's residual of second.weight at the beginning
    folder: str = ""  # every rank saves its state there at every second version
    resume: bool = False  # load the state from `folder`


@dataclass
class Served:
    version: int
    digests: dict[int, str]  # of a worker's model, by version
    losses: list[float]
    final: str  # digest of the model at the end
    model: dict[str, torch.Tensor]
    stats: dict[str, Any]
    report: str
    warnings: list[str]


def run(job: Job) -> Served:
    rank = dist.get_rank()
    model = make_model()
    if rank == 0:  # connect() must replace a model that differs
        with torch.no_grad():
            model.first.bias.add_(1.0)
    usual = {"timeout": 20.0, "servers": 1}
    way = Way("server", usual | job.arguments | (job.other if rank == 1 else {}))
    optimizer: ServerOptimizer = build(way, model, job.inner).optimizer
    path = Path(job.folder) / f"rank{rank}.pt"
    if job.resume:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    if job.owed and rank == 0:
        values = torch.full((model.second.weight.numel(),), job.owed)
        piece = {"kind": "push", "name": "second.weight", "offset": 0, "values": values}
        state = optimizer.state_dict()
        state["gradwire"]["residuals"] = [piece]
        optimizer.load_state_dict(state)
    served = Served(0, {}, [], "", {}, {}, "", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.connect()
        if optimizer.is_server:
            optimizer.serve(lambda version: _on_version(job, optimizer, version))
        else:
            try:
                _train(job, model, optimizer, served)
            finally:
                with contextlib.suppress(RuntimeError):  # its host may have ended, too
                    _store().set("ended", "")
    served.version = optimizer.version
    served.final = digest(model)
    served.model = {name: p.detach().clone() for name, p in model.named_parameters()}
    served.stats = optimizer.stats().as_dict()
    served.report = optimizer.stats().report()
    served.warnings = [str(w.message) for w in caught if "gradwire" in w.category.__module__]
    return served


def _train(job: Job, model: nn.Module, optimizer: ServerOptimizer, served: Served) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, job.decay)
    step = 0
    while optimizer.version < job.versions:
        if job.stalled >= 0:
            _stall_or_tell(job, optimizer, step)
        if step == 3 and optimizer.rank == job.leaver:
            break
        _on_version(job, optimizer, optimizer.version)
        optimizer.zero_grad()
        loss = loss_of(model, optimizer.rank, optimizer.version % 3)
        spoil = step == 2 and optimizer.rank == job.non_finite_at_backward
        with _spoiled(model) if spoil else contextlib.nullcontext():
            loss.backward()
        if step == 2 and optimizer.rank == job.non_finite:
            gradient = model.get_parameter("second.weight").grad
            assert gradient is not None
            gradient[0, 5] = float("nan")
        optimizer.step()
        scheduler.step()
        step += 1
        served.losses.append(loss.item())
        optimizer.synchronize()
        served.digests[optimizer.version] = digest(model)
    optimizer.close()


def _stall_or_tell(job: Job, optimizer: ServerOptimizer, step: int) -> None:
    if optimizer.rank != job.stalled:
        _store().set("version", str(optimizer.version))
    elif step == 3:
        ahead = optimizer.version + job.stall_versions
        while int(_store().get("version")) < ahead and not _store().check(["ended"]):
            time.sleep(0.05)


def _store() -> dist.Store:  # type: ignore[name-defined] # PyTorch hides it from checkers
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def _spoiled(model: nn.Module) -> Iterator[None]:
    """Inside, gradients of second.weight hold NaN."""
    weight = model.get_parameter("second.weight")
    nan = torch.zeros_like(weight)
    nan[0, 5] = float("nan")
    handle = weight.register_hook(lambda gradient: gradient + nan)
    yield
    handle.remove()


def _on_version(job: Job, optimizer: ServerOptimizer, version: int) -> None:
    if optimizer.rank == job.victim and version >= 4:
        os.kill(os.getpid(), job.signal)
    if job.folder and version % 2 == 0 and not job.resume:
        path = Path(job.folder) / f"rank{optimizer.rank}.pt"
        torch.save(optimizer.state_dict(), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


def train_alone(job: Job, workers: int) -> dict[str, torch.Tensor]:
    """The same training in one process, without gradwire."""
    model = make_model()
    optimizer = job.inner(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, job.decay)
    for version in range(job.versions):
        optimizer.zero_grad()
        for rank in range(workers):
            (loss_of(model, rank, version % 3) / workers).backward()
        optimizer.step()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}
