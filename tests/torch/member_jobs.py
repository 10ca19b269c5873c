"""Processes that train with LocalSteps(on_lost="continue"), and come and go."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it

import gradwire.torch
from cluster import PRELOADED
from gradwire.torch import LocalSteps
from gradwire.torch.buckets.session import Session
from gradwire.torch.checkpoint import Residual
from gradwire.torch.errors import RankLostWarning
from gradwire.torch.members.generations import Generations
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from gradwire.torch.optimizers.averaging import Averaging
from gradwire.torch.optimizers.elastic_peers import ElasticPeers
from gradwire.torch.optimizers.fragment import Fragment
from runs import said_by, sgd
from training import digest, loss_of, make_model
from ways import Inner, Loss, Training, Way, build

LOST_AFTER = 12.0  # a loaded machine keeps processes from their heartbeats for seconds
SETTINGS = {"on_lost": "continue", "lost_after": LOST_AFTER, "timeout": 120.0}
PLAIN = {"codec": "3lc:s=1.5", "every": 2, "correct_noise": False, "late_momentum": False}
GATED = PLAIN | {"codec": None, "gate": "bfloat16"}


@dataclass(frozen=True)
class Plan:
    """What a process does.

    until    it stops when generation until[0] has finished until[1] exchanges
    deed     what happens to it in exchange `at` (counted from 0): "kill", "kill in push", "kill in
             pull" (when the second of two other ranks lacks its packet), "stop", "bloat" (from then
             on it gives newcomers more than its state); None: nothing
    synchronize_at   this exchange is that of `synchronize`
    folder   gets a file for each exchange, if the exchange is kept account of
    """

    until: tuple[int, int]
    inner: Inner = sgd
    options: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    ranks: int = 3
    min_ranks: int = 1
    at: int = -1
    synchronize_at: int = -1
    deed: str | None = None
    folder: str | None = None
    pause: float = 0.0  # seconds in each step


@dataclass
class Ended:
    """How a process ended. `error`: the exception's type and text, if it raised one."""

    digest: str = ""
    error: str = ""
    members: tuple[int, ...] = ()
    generation: int = 0
    lost: tuple[int, ...] = ()
    exchanges: int = 0
    steps: int = 0  # that this process took
    warnings: list[str] = field(default_factory=list)
    report: str = ""
    caught_up: int = 0  # how often it took over the result of an exchange from another rank
    sessions: int = 0  # in memory, though Python's collector of cycles did not run


class Account:
    """What each exchange of an optimizer took and gave, in a file of `folder`.

    given      the changes of this rank since its last exchange, in the order of the parameters
    applied    by how much the anchors changed
    push, pull   this rank's residuals after the exchange; the former with what a gate keeps
    """

    given: list[torch.Tensor]
    caught_up = 0

    def __init__(self, optimizer: LocalSteps, folder: str | None) -> None:
        self.optimizer, self.folder = optimizer, folder
        self._parameters = optimizer._replica.parameters
        self._begin_account()
        inner, averaging = optimizer._optimizer, optimizer._averaging
        step, apply, catch_up = inner.step, averaging.apply, averaging.catch_up

        def step_and_note(*args: Any) -> Any:
            before = [p.detach().clone() for p in self._parameters]
            result = step(*args)
            for total, old, new in zip(self.given, before, self._parameters, strict=True):
                total += old - new.detach()
            return result

        def apply_and_note(fragment: Fragment, mix: float) -> None:
            before = [anchor.detach().clone() for anchor in fragment.anchors]
            had_begun = fragment.flight is not None
            apply(fragment, mix)
            if had_begun:
                self._write(before, optimizer._peers.session.runner.residuals())

        def catch_up_and_note(state: dict[str, Any], unfinished: int) -> bool:
            before = [anchor.detach().clone() for anchor in averaging.fragments[unfinished].anchors]
            skipped = catch_up(state, unfinished)
            self.caught_up += 1
            self._write(before, optimizer._peers._settled.after)  # type: ignore
            return skipped

        inner.step = step_and_note  # type: ignore
        averaging.apply, averaging.catch_up = apply_and_note, catch_up_and_note  # type: ignore

    def _begin_account(self) -> None:
        self.given = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]

    def _write(self, before: list[torch.Tensor], residuals: list[Residual]) -> None:
        if self.folder is None:
            return
        names = dict(self.optimizer._replica.named)
        owed = {
            kind: {n: np.zeros(p.numel()) for n, p in names.items()} for kind in ("push", "pull")
        }
        for r in residuals:
            if r.name in names:
                owed[r.kind][r.name][r.offset : r.offset + r.values.size] += r.values
        fragment = self.optimizer._averaging.fragments[0]
        if fragment.gate is not None:
            for owed_values, kept in zip(owed["push"].values(), fragment.gate.kept, strict=True):
                owed_values += kept.flatten().numpy()
        anchors = fragment.anchors
        entry: dict[str, Any] = {
            "applied": _flat([b - a.detach() for b, a in zip(before, anchors, strict=True)]),
            "given": _flat(self.given),
            **{kind: np.concatenate(list(values.values())) for kind, values in owed.items()},
        }
        name = f"{self.optimizer._averaging.exchanges - 1}-{member_of(self.optimizer).id}.npz"
        path = Path(self.folder) / name
        np.savez(path.with_suffix(".part.npz"), **entry)
        path.with_suffix(".part.npz").rename(path)
        self._begin_account()


def member_of(optimizer: LocalSteps) -> Generations:
    assert isinstance(optimizer._peers, ElasticPeers)
    return optimizer._peers.membership


def _flat(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors]).numpy()


def make(port: int, number: int, plan: Plan) -> Training:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * number)
    store = TCPStore("127.0.0.1", port, is_master=False)
    way = Way("local", {**SETTINGS, "min_ranks": plan.min_ranks, **plan.options})
    return build(way, model, plan.inner, store=store, ranks=plan.ranks)


def train(port: int, number: int, plan: Plan) -> Ended:
    """`number`: of the process, which decides its data; its number as a member may differ."""
    gc.disable()
    ended = Ended()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = None
        try:
            training = make(port, number, plan)
            optimizer = training.optimizer
            account = Account(optimizer, plan.folder)
            _train(training, number, plan)
            ended.digest = digest(training.model)
        except Exception as error:
            ended.error = f"{type(error).__name__}: {error}"
    ended.warnings = [str(w.message) for w in caught if w.category is RankLostWarning]
    if optimizer is not None:
        stats = optimizer.stats()
        ended.members, ended.lost = stats.members, stats.lost_members
        ended.generation, ended.exchanges = stats.generation, optimizer._averaging.exchanges
        ended.report = stats.report()
        ended.caught_up = account.caught_up
        ended.sessions = sum(type(found) is Session for found in gc.get_objects())
        optimizer.close()
    return ended


def ask_and_leave(port: int, number: int, plan: Plan) -> Ended:
    """Asks to join, and leaves in the moment in which it is let in."""

    def leave(members: Generations) -> None:
        while members.decision(plan.until[0]) is None:
            time.sleep(0.02)
        members.leave()
        raise InterruptedError

    with mock.patch.object(Generations, "join", leave), contextlib.suppress(InterruptedError):
        make(port, number, plan)
    return Ended()


def _train(training: Training, number: int, plan: Plan) -> None:
    generation, exchanges = plan.until
    optimizer = training.optimizer
    while True:
        roster, exchanges_here = member_of(optimizer).roster, optimizer._averaging.exchanges
        if roster.generation >= generation and exchanges_here >= roster.done + exchanges:
            break
        if plan.deed is not None and exchanges_here == plan.at:
            _do(plan.deed)
            plan = Plan(plan.until, synchronize_at=plan.synchronize_at)
        if exchanges_here == plan.synchronize_at:
            plan = replace(plan, synchronize_at=-1)
            optimizer.synchronize()
            continue
        training.step(_loss_on(number))
        time.sleep(plan.pause)
    optimizer.synchronize()


def _loss_on(number: int) -> Loss:
    """On the data of a process, whichever member it is."""
    return lambda module, rank, step: loss_of(module, number, step)


def _do(deed: str) -> None:
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if deed == "bloat":
        state_of = Averaging.shared_state
        more = {"more": torch.zeros(1 << 18)}
        Averaging.shared_state = lambda self: state_of(self) | more  # type: ignore
        return
    packets = {"kill in push": 1, "kill in pull": 3}[deed]
    send, sent = Wire.send, 0

    def send_and_die(self: Wire, peer: int, kind: Kind, *args: Any) -> None:
        nonlocal sent
        if kind is Kind.PACKET and sent == packets:
            self.flush()
            time.sleep(2.0)  # the other rank finishes its exchange, if it can
            os.kill(os.getpid(), signal.SIGKILL)
        sent += kind is Kind.PACKET
        send(self, peer, kind, *args)

    Wire.send = send_and_die  # type: ignore


def save_or_resume(port: int, number: int, plan: Plan) -> Ended:
    """Takes 9 steps, and saves its state after 5 of them; or takes the last 4 from that state."""
    assert plan.folder is not None
    training = make(port, number, plan)
    path = Path(plan.folder) / f"rank{training.rank}.pt"
    began = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        began, number = 5, saved["number"]
        training.load(saved, began)

    def note(steps: int) -> None:
        if steps == 5:
            torch.save({**training.state(), "number": number}, path)

    training.run(9 - began, _loss_on(number), note)
    exchanges = training.optimizer._averaging.exchanges
    assert training.optimizer.local_steps == 9
    ended = Ended(digest=digest(training.model), exchanges=exchanges, steps=9 - began)
    training.close()
    return ended


def train_unevenly(port: int, number: int, plan: Plan) -> Ended:
    """Process 1 takes a step fewer before the exchange."""
    training = make(port, number, plan)

    def train() -> None:
        training.run(2 - number, _loss_on(number))
        if number == 1:
            training.settle()

    ended = Ended(error=said_by(train))
    training.close()
    return ended


def host_store(port: int, number: int, plan: Plan) -> Ended:
    """Until the process is killed."""
    store = gradwire.torch.host_store("127.0.0.1", number)
    while True:
        time.sleep(1.0)
        assert store.port == number


class Fleet:
    """Processes that meet in a store of this process, or at `port`."""

    def __init__(self, port: int | None = None) -> None:
        if port is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._port = self._store.port if port is None else port
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._started: dict[int, tuple[Any, Connection]] = {}

    def start(self, number: int, plan: Any, job: Callable[..., Any] = train) -> None:
        """Runs job(port of the store, number, plan)."""
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(there, job, self._port, number, plan), daemon=True
        )
        process.start()
        there.close()
        self._started[number] = process, here

    def pid(self, number: int) -> int:
        return int(self._started[number][0].pid)

    def collect(self, *numbers: int, seconds: float = 240.0) -> list[Any]:
        """What the jobs returned."""
        return [self._wait(number, seconds) for number in numbers]

    def wait_killed(self, number: int, seconds: float = 240.0) -> None:
        process, _ = self._started[number]
        process.join(seconds)
        assert process.exitcode == -signal.SIGKILL, process.exitcode

    def close(self) -> None:
        for process, _ in self._started.values():
            if process.is_alive():
                process.kill()
                process.join()

    def _wait(self, number: int, seconds: float) -> Any:
        process, connection = self._started[number]
        assert connection.poll(seconds), f"process {number} gave no answer"
        answer = connection.recv()
        process.join(60)
        assert process.exitcode == 0, f"process {number} exits with {process.exitcode}"
        return answer


def _serve(
    connection: Connection, job: Callable[..., Any], port: int, number: int, plan: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    connection.send(job(port, number, plan))
