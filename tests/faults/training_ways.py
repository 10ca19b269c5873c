"""The ways to train, as short programs: what a user would write, without any care for faults.

A process runs `train(Job)` and then ends. An exception ends it as it would end the user's program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import (
    Execution,
    FullyShardComm,
    GradwireState,
    LocalSteps,
    Members,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    register_backend,
    save,
    sparse_loco,
)
from gradwire.torch.records.options import grouped
from gradwire_lab.train import network
from training import BATCH, CLASSES, INPUTS, digest, make_model

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


@dataclass
class Training:
    """module: what is called with a batch. states: saved and loaded in a checkpoint."""

    module: nn.Module
    optimizer: Any
    states: dict[str, Any]
    model: nn.Module
    close: Callable[[], None] = lambda: None
    counters: dict[str, Any] = field(default_factory=dict)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def _join_group(job: Job, backend: str = "gloo") -> None:
    dist.init_process_group(
        backend,
        init_method=f"tcp://{job.address}:{job.port}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


def _with_hook(**settings: Any) -> Callable[[Job], Training]:
    def make(job: Job) -> Training:
        _join_group(job)
        model = make_model()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        state = GradwireState(**grouped({"timeout": job.timeout, **settings}))
        ddp.register_comm_hook(state, gradwire_hook)
        optimizer = _sgd(model)
        states = {"model": model, "optimizer": optimizer, "gradwire": state}
        return Training(ddp, optimizer, states, model)

    return make


def _sharded_optimizer(job: Job) -> Training:
    _join_group(job)
    model = make_model()
    optimizer = ShardedOptimizer(_sgd(model), model, execution=Execution(timeout=job.timeout))
    states = {"model": model, "optimizer": optimizer}
    return Training(model, optimizer, states, model, optimizer.close)


def _local_steps(**settings: Any) -> Callable[[Job], Training]:
    def make(job: Job) -> Training:
        _join_group(job)
        model = make_model()
        optimizer = LocalSteps(
            _sgd(model), model, **grouped({"every": 4, "timeout": job.timeout, **settings})
        )
        states = {"model": model, "optimizer": optimizer}
        return Training(model, optimizer, states, model, optimizer.close)

    return make


def _local_steps_go_on(job: Job) -> Training:
    model = make_model()
    store = TCPStore(job.address, job.port, is_master=False)
    optimizer = LocalSteps(
        _sgd(model),
        model,
        every=4,
        execution=Execution(timeout=job.timeout),
        members=Members(
            on_lost="continue",
            store=store,
            ranks=job.world_size,
            lost_after=job.lost_after or job.timeout,
        ),
    )
    states = {"model": model, "optimizer": optimizer}
    return Training(model, optimizer, states, model, optimizer.close)


def _with_server(**settings: Any) -> Callable[[Job], Training]:
    def make(job: Job) -> Training:
        _join_group(job)
        model = make_model()
        named = model.named_parameters()
        optimizer = ServerOptimizer(
            _sgd(model), named_parameters=named, **grouped({"timeout": job.timeout, **settings})
        )
        return Training(model, optimizer, {"optimizer": optimizer}, model, optimizer.close)

    return make


def _fsdp(replicas: int = 1, **settings: Any) -> Callable[[Job], Training]:
    def make(job: Job) -> Training:
        _join_group(job)
        model = make_model()
        mesh = _mesh(job, replicas)
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        comm = FullyShardComm(model, **grouped({"timeout": job.timeout, **settings}))
        optimizer = _sgd(model)
        states = {"model": model, "optimizer": optimizer, "gradwire": comm}
        return Training(model, optimizer, states, model, comm.close)

    return make


def _mesh(job: Job, replicas: int) -> DeviceMesh:
    """The groups of two dimensions are made by PyTorch, with a timeout of 30 minutes, unless it is
    told otherwise."""
    if replicas == 1:
        return init_device_mesh("cpu", (job.world_size,))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # PyTorch hides it
    options._timeout = timedelta(seconds=job.timeout)
    names = ("replicas", "shards")
    override: dict[int | str, Any] = dict.fromkeys(names, ("gloo", options))
    shape = (replicas, job.world_size // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)


def _backend(job: Job) -> Training:
    register_backend(min_numel=256)
    _join_group(job, "cpu:gradwire")
    model = make_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = _sgd(model)
    return Training(ddp, optimizer, {"model": model, "optimizer": optimizer}, model)


WAYS: dict[str, Callable[[Job], Training]] = {
    "hook-sharded": _with_hook(codec="3lc"),
    "hook-ring": _with_hook(codec="int8", exchange="ring"),
    "hook-terngrad": _with_hook(codec="terngrad", exchange="terngrad"),
    "hook-hierarchical": _with_hook(codec="3lc", exchange="hierarchical", ranks_per_machine=2),
    "hook-broadcast": _with_hook(codec="3lc", exchange="broadcast"),
    "sharded-optimizer": _sharded_optimizer,
    "local-steps": _local_steps(),
    "local-steps-fragments": _local_steps(fragments=2, delay=1),
    "sparse-loco": _local_steps(**sparse_loco(density=0.02)),
    "servers": _with_server(codec="3lc"),
    "servers-server": _with_server(codec="3lc"),  # the fault happens to the server
    "fsdp": _fsdp(),
    "fsdp-weights": _fsdp(weights="bf16"),
    "hsdp": _fsdp(replicas=2),
    "hsdp-rank-1": _fsdp(replicas=2),  # the fault happens to the rank beside the store's host
    "backend": _backend,
    "local-steps-go-on": _local_steps_go_on,
    "servers-go-on": _with_server(codec="3lc", on_lost="continue"),
}


def train(job: Job) -> None:
    """Trains for `job.steps` steps, and leaves a file with the digest of the model."""
    _settle_in(job)
    progress = os.open(Path(job.folder) / f"progress-{job.rank}", os.O_WRONLY | os.O_CREAT)
    training = WAYS[job.way](job)
    number = getattr(training.optimizer, "rank", job.rank)
    (Path(job.folder) / f"number-{job.rank}").write_text(str(number))
    if job.ends_early:
        os.kill(os.getpid(), signal.SIGKILL)
    step = 0
    if job.resume_from is not None:
        saved = torch.load(_checkpoint_of(job, number), weights_only=True)
        for name, state in training.states.items():
            state.load_state_dict(saved[name])
        step = saved["step"]

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
            inputs, labels = _batch(number, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(training.module(inputs), labels).backward()
            optimizer.step()
            step = _steps_of(optimizer, step + 1)
            on_step(step)
            time.sleep(job.pause)
    if isinstance(optimizer, LocalSteps):
        optimizer.synchronize()
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


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels that can be learned, so that the gradients stay as they are in a training."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def _save(job: Job, training: Training, step: int, number: int) -> None:
    states = {name: state.state_dict() for name, state in training.states.items()}
    save({"step": step, "number": number, **states}, job.checkpoints / f"{step}.pt")


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
