"""The ways to train, as short programs: what a user would write, without any care for faults.

A process runs `train(Job)` and then ends. An exception ends it as it would end the user's program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.tensor import DTensor

from gradwire.torch import (
    LocalSteps,
    ServerOptimizer,
    pulse_loco,
    register_backend,
    save,
    sparse_loco,
)
from gradwire_lab.train import network
from training import BATCH, CLASSES, INPUTS, digest, make_model
from ways import Training, Way, build

DATA_FAULT = "the data of this rank cannot be read"


@dataclass(frozen=True)
class Job:
    """What a rank does.

    rank         of the process. LocalSteps(on_lost="continue") counts the ranks as they come
    folder       of the cell: progress-RANK, result-RANK.json, checkpoints/RANK/STEP.pt; number-RANK
                 is the rank by which errors name the process; last-step, if it is there, has the
                 number of steps instead of `steps`
    timeout      seconds, of gradwire and of PyTorch's group
    lost_after   seconds, where ranks come and go; None: `timeout`
    resume_from  the step of the checkpoint to begin with; None: the beginning
    raise_at     raises an exception in this step
    ends_early   is killed before its first step, when the model is made
    pause        seconds that the program sleeps in each step
    disk_kib     the size of the disk for this rank's checkpoints; None: the machine's
    namespace    a process in whose network namespace this rank is; None: the machine's
    """

    way: str
    rank: int
    folder: str
    port: int
    world_size: int = 4
    steps: int = 200
    timeout: float = 30.0
    lost_after: float | None = None
    save_every: int = 50
    resume_from: int | None = None
    raise_at: int | None = None
    ends_early: bool = False
    pause: float = 0.0
    disk_kib: int | None = None
    namespace: int | None = None

    @property
    def address(self) -> str:
        return "127.0.0.1" if self.namespace is None else network.address(0)

    @property
    def interface(self) -> str:
        return "lo" if self.namespace is None else network.INTERFACE

    @property
    def last_step(self) -> int:
        try:
            return int((Path(self.folder) / "last-step").read_text())
        except FileNotFoundError:
            return self.steps

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints" / str(self.rank)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _join_group(job: Job, backend: str) -> None:
    dist.init_process_group(
        backend,
        init_method=f"tcp://{job.address}:{job.port}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


WAYS = {
    "hook-sharded": Way("hook", {"codec": "3lc"}),
    "hook-ring": Way("hook", {"codec": "int8", "exchange": "ring"}),
    "hook-terngrad": Way("hook", {"codec": "terngrad", "exchange": "terngrad"}),
    "hook-hierarchical": Way(
        "hook", {"codec": "3lc", "exchange": "hierarchical", "ranks_per_machine": 2}
    ),
    "hook-broadcast": Way("hook", {"codec": "3lc", "exchange": "broadcast"}),
    "sharded-optimizer": Way("sharded"),
    "local-steps": Way("local", {"every": 4}),
    "local-steps-fragments": Way("local", {"every": 4, "fragments": 2, "delay": 1}),
    "sparse-loco": Way("local", {"every": 4, **sparse_loco(density=0.02)}),
    "pulse-loco": Way("local", {"every": 4, **pulse_loco()}),
    "servers": Way("server", {"codec": "3lc"}, servers=1),
    "servers-server": Way("server", {"codec": "3lc"}, servers=1),  # whose server has the fault
    "fsdp": Way("fsdp"),
    "fsdp-weights": Way("fsdp", {"weights": "bf16"}),
    "hsdp": Way("fsdp", replicas=2),
    "hsdp-rank-1": Way("fsdp", replicas=2),  # the rank beside the store's host has the fault
    "backend": Way("plain"),  # over a default group that compresses
    "local-steps-go-on": Way("local", {"every": 4, "on_lost": "continue"}),
    "servers-go-on": Way("server", {"codec": "3lc", "on_lost": "continue"}, servers=1),
}


def _build(job: Job) -> Training:
    way = WAYS[job.way]
    options: dict[str, Any] = {} if way.kind == "plain" else {"timeout": job.timeout}
    if way.kind == "local" and way.is_elastic:
        store = TCPStore(job.address, job.port, is_master=False)
        lost_after = job.lost_after or job.timeout
        options |= {"store": store, "ranks": job.world_size, "lost_after": lost_after}
    elif job.way == "backend":
        register_backend(min_numel=256)
        _join_group(job, "cpu:gradwire")
    else:
        _join_group(job, "gloo")
    return build(way, make_model(), _sgd, **options)


def train(job: Job) -> None:
    """Trains for `job.steps` steps, and leaves a file with the digest of the model."""
    _settle_in(job)
    progress = os.open(Path(job.folder) / f"progress-{job.rank}", os.O_WRONLY | os.O_CREAT)
    training = _build(job)
    number = training.rank
    (Path(job.folder) / f"number-{job.rank}").write_text(str(number))
    if job.ends_early:
        os.kill(os.getpid(), signal.SIGKILL)
    step = 0
    if job.resume_from is not None:
        saved = torch.load(_checkpoint_of(job, number), weights_only=True)
        step = saved["step"]
        training.load(saved, step)

    def on_step(step: int) -> None:
        os.pwrite(progress, b"%8d" % step, 0)
        if step == job.raise_at:
            raise ValueError(DATA_FAULT)
        if step % job.save_every == 0 and step != (job.resume_from or 0):
            _save(job, training, step, number)

    optimizer = training.optimizer
    if isinstance(optimizer, ServerOptimizer):
        optimizer.connect()
    step = _steps_of(optimizer, step)
    if isinstance(optimizer, ServerOptimizer) and optimizer.is_server:
        optimizer.serve(on_step)
    else:
        while step < job.last_step:
            training.steps = step
            training.step(_loss_of)
            step = _steps_of(optimizer, step + 1)
            on_step(step)
            time.sleep(job.pause)
    training.settle()
    training.close()
    result = {"digest": _digest(training.model), "step": step}
    if dist.is_initialized():
        dist.destroy_process_group()
    (Path(job.folder) / f"result-{job.rank}.json").write_text(json.dumps(result))


def _steps_of(optimizer: Any, own: int) -> int:
    """The steps of the whole training, where the optimizer counts them: a rank may join it late.
    own: the steps of this program."""
    if isinstance(optimizer, ServerOptimizer):
        return optimizer.version
    return optimizer.local_steps if isinstance(optimizer, LocalSteps) else own


def host_store(job: Job) -> None:
    """The store where ranks meet that may be lost, until the process is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    store = TCPStore(job.address, job.port, is_master=True, wait_for_workers=False)
    assert store.port == job.port
    (Path(job.folder) / "store-is-there").touch()
    while True:
        time.sleep(60.0)


def _settle_in(job: Job) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    job.checkpoints.mkdir(parents=True, exist_ok=True)
    if job.disk_kib is not None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={job.disk_kib}k", "disk", job.checkpoints],
            check=True,
        )


def _loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Labels that can be learned, so that the gradients stay as they are in a training."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return nn.functional.cross_entropy(module(inputs), inputs[:, :CLASSES].argmax(dim=1))


def _save(job: Job, training: Training, step: int, number: int) -> None:
    save({"step": step, "number": number, **training.state()}, job.checkpoints / f"{step}.pt")


def _checkpoint_of(job: Job, number: int) -> Path:
    """The file that the rank with this number has left."""
    for folder in Path(job.folder).glob("checkpoints/*"):
        saved = folder / f"{job.resume_from}.pt"
        if torch.load(saved, weights_only=True)["number"] == number:
            return saved
    raise FileNotFoundError(f"no checkpoint of rank {number} and step {job.resume_from}")


def _digest(model: nn.Module) -> str:
    """The digest of the whole model, also if it is sharded."""
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return digest(model)
    whole = make_model()
    for own, sharded in zip(whole.parameters(), model.parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        own.data = sharded.full_tensor().detach()
    return digest(whole)
