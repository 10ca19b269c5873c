"""Processes of a ServerOptimizer whose workers come and go."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it

from gradwire.torch import ServerOptimizer
from gradwire.torch.errors import CommunicationError
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from gradwire.torch.server.server_link import Message
from runs import sgd
from training import TwoPaths, batch, digest, make_model
from ways import Inner, Way, build


@dataclass(frozen=True)
class Course:
    """What a process does.

    number   decides its data
    until    it leaves when the model has this version
    options  of ServerOptimizer
    deed     what a worker does when it has version `at`: "kill", "stop"; a process that joins:
             "kill in JOIN", "kill in CATCH_UP" or "kill in pull" (before it asks for the model,
             after that, before it says for which version it pushes), "close" (it does not connect)
    folder   a file NUMBER-VERSION appears there for every version that a worker has, rankRANK with
             the number of the process that has the place, askedNUMBER when it has asked, and then
             SERVER-knows-RANK when this server knows that the process wants the model
    hold     a worker that has one of these versions, or a later one, waits until the file goVERSION
             is in the folder
    """

    role: str = "worker"
    number: int = 0
    until: int = 20
    ranks: int = 3
    servers: int = 1
    inner: Inner = sgd
    options: dict[str, Any] = field(default_factory=dict)
    decay: float = 1.0
    dtype: torch.dtype = torch.float32
    deed: str = ""
    at: int = -1
    folder: str = ""
    hold: tuple[int, ...] = ()
    has_buffers: bool = False
    classes: int = 5
    pause: float = 0.0  # seconds in each step

    def become(self, **changes: Any) -> Course:
        return replace(self, **changes)


@dataclass
class Ended:
    """How a process ended. `error`: the exception's type and text, if it raised one."""

    error: str = ""
    rank: int = -1
    began: int = 0  # version that it had after connect
    owed: int = 0  # values of residuals that were not 0 then
    lr: float = 0.0  # at the end
    digests: dict[int, str] = field(default_factory=dict)  # of a worker's model, by version
    final: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    report: str = ""
    warnings: list[str] = field(default_factory=list)
    buffers: list[float] = field(default_factory=list)


def take_part(port: int, number: int, course: Course) -> Ended:
    ended = Ended()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _run(TCPStore("127.0.0.1", port, is_master=False), course, ended)
        except Exception as error:
            ended.error = f"{type(error).__name__}: {error}"
    ended.warnings = [str(w.message) for w in caught if "gradwire" in w.category.__module__]
    return ended


def _run(store: TCPStore, course: Course, ended: Ended) -> None:
    model = make_model(course.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * course.number)
    if course.classes != 5:
        model.last = nn.Linear(12 * 14, course.classes)
    if course.has_buffers:
        model.register_buffer("seen", torch.zeros(1))
    limits = {"on_lost": "continue", "lost_after": 12.0, "timeout": 60.0}
    way = Way("server", {**limits, **course.options}, servers=course.servers)
    training = build(way, model, course.inner, store=store, ranks=course.ranks, role=course.role)
    optimizer: ServerOptimizer = training.optimizer
    ended.rank = optimizer.rank
    if course.folder:
        (Path(course.folder) / f"rank{optimizer.rank}").write_text(str(course.number))
    try:
        if optimizer.is_server:
            _tell_of_joins(optimizer, course)
            optimizer.serve()
        else:
            _train(optimizer, model, course, ended)
    finally:
        ended.stats, ended.report = optimizer.stats().as_dict(), optimizer.stats().report()
        ended.final = digest(model)
        ended.lr = float(optimizer.param_groups[0]["lr"])
        ended.buffers = [float(b) for b in model.buffers()]


def _train(optimizer: ServerOptimizer, model: TwoPaths, course: Course, ended: Ended) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, course.decay)
    if course.deed == "close":
        optimizer.close()
        assert isinstance(optimizer.error, CommunicationError)
        _meet(Path(course.folder), course, 0)
    if optimizer.joined:
        _watch_joining(optimizer.rank, course)
    optimizer.connect()
    ended.began = optimizer.version
    if optimizer.joined:
        scheduler.last_epoch = optimizer.version - 1
        scheduler.step()
    ended.owed = sum(int((r.values != 0).sum()) for r in optimizer._side.residuals())
    while optimizer.version < course.until:
        version = optimizer.version
        optimizer.synchronize()
        ended.digests[version] = digest(model)
        if course.folder:
            _meet(Path(course.folder), course, version)
        if version >= course.at >= 0 and course.deed in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if course.deed == "kill" else signal.SIGSTOP)
            course = replace(course, at=-1)
        for buffer in model.buffers():
            buffer.fill_(version + 1)
        inputs, labels = batch(course.number, version % 3)
        optimizer.zero_grad()
        output = model(inputs.to(course.dtype)).float()
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(course.pause)
    optimizer.synchronize()
    ended.digests[optimizer.version] = digest(model)
    optimizer.close()


def _meet(folder: Path, course: Course, version: int) -> None:
    (folder / f"{course.number}-{version}").touch()
    for hold in course.hold:
        if version >= hold:
            (folder / f"{course.number}-{hold}").touch()
            while not (folder / f"go{hold}").exists():
                time.sleep(0.05)


def _tell_of_joins(optimizer: ServerOptimizer, course: Course) -> None:
    side: Any = optimizer._side
    take_join = side._take_join

    def take_and_tell(message: Message) -> None:
        take_join(message)
        (Path(course.folder) / f"{optimizer.rank}-knows-{message.peer}").touch()

    side._take_join = take_and_tell


def _watch_joining(rank: int, course: Course) -> None:
    """Notes when this process has asked for the model, and kills it at the moment of its deed."""
    moment = course.deed.removeprefix("kill in ") if course.deed.startswith("kill in ") else ""
    send, joins = Wire.send, 0

    def die() -> None:
        time.sleep(1.0)  # what is under way arrives
        os.kill(os.getpid(), signal.SIGKILL)

    def send_and_note(wire: Wire, peer: int, kind: Kind, *args: Any) -> None:
        nonlocal joins
        joins += kind is Kind.JOIN
        if kind is Kind.JOIN and joins == 1:  # of the one before
            for known in Path(course.folder).glob(f"*-knows-{rank}"):
                known.unlink()
        if kind is Kind.JOIN and joins > course.servers and moment == "pull":
            die()
        send(wire, peer, kind, *args)
        if kind is Kind.JOIN and joins == course.servers:
            wire.flush()
            (Path(course.folder) / f"asked{course.number}").touch()
            if moment == "CATCH_UP":
                die()

    if moment == "JOIN":
        die()
    Wire.send = send_and_note  # type: ignore


def wait_file(path: Path) -> None:
    end = time.monotonic() + 240
    while not path.exists():
        there = " ".join(sorted(each.name for each in path.parent.iterdir()))
        assert time.monotonic() < end, f"no {path.name}: {there}"
        time.sleep(0.05)


def wait_asked(folder: Path, number: int, course: Course) -> None:
    """Until this process has a place, and all servers know that it wants the model."""
    wait_file(folder / f"asked{number}")
    (rank,) = (p.name[4:] for p in folder.glob("rank*") if p.read_text() == str(number))
    for server in range(course.ranks - course.servers, course.ranks):
        wait_file(folder / f"{server}-knows-{rank}")
