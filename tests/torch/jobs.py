"""The functions that the ranks of a test cluster run."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.choice import Chooser
from gradwire.torch import (
    GradwireState,
    Overlap,
    gradwire_hook,
)
from gradwire.torch.errors import (
    NonFiniteStepWarning,
)
from gradwire.torch.network.transport import Kind, Limits, Received
from gradwire.torch.network.wire import Wire
from gradwire.torch.options import grouped
from owed import gradients
from training import (
    Options,
    Trained,
    batch,
    load,
    make_model,
    make_optimizer,
    save,
    train,
)
from ways import build


def train_each(all_options: list[Options]) -> list[Trained]:
    return [train(options) for options in all_options]


def train_and_signal(options: Options, victim: int, at_step: int, number: int) -> None:
    """The victim sends itself a signal (SIGKILL, SIGSTOP) before a step."""

    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            os.kill(os.getpid(), number)

    train(options, on_step)


def train_unlike(options_by_rank: list[Options]) -> Trained:
    return train(options_by_rank[dist.get_rank()])


def _sum_of_outputs(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    outputs: torch.Tensor = module(torch.randn(4, 8))
    return outputs.sum()


def train_with_buffers_and_lose_a_rank(victim: int, at_step: int) -> str:
    """DDP broadcasts buffers before each forward, so it may notice the lost rank first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    training = build("hook", model)

    def on_step(steps: int) -> None:
        time.sleep(0.05)
        if dist.get_rank() == victim and steps == at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        training.run(100, _sum_of_outputs, on_step)
    except RuntimeError as error:
        raise training.source.explain(error) from error
    return "nobody was lost"


def see_pytorchs_error_before_a_rank_is_gone(victim: int) -> str:
    """PyTorch's own connection to a process that ends may close long before gradwire's."""
    training = build("hook", nn.Linear(8, 2))
    training.step(_sum_of_outputs)
    dist.barrier()
    if dist.get_rank() == victim:
        time.sleep(0.3)
        os._exit(3)
    with mock.patch("gradwire.torch.buckets.session.GRACE_SECONDS", 30.0):  # the victim may be late
        return str(training.source.explain(RuntimeError("Connection closed by peer")))


def wait_elsewhere_for_a_stopped_rank(victim: int, seconds: float) -> str:
    """The ranks sum over a group of the program, whose timeout is shorter than gradwire's."""
    training = build("hook", nn.Linear(8, 2))
    training.step(_sum_of_outputs)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        raise training.source.explain(error) from error
    return "nobody waited in vain"


@dataclass
class Placed:
    """Residuals after a step with zero gradients, and what that step applied."""

    state: dict[str, Any]
    applied: dict[str, np.ndarray]


def place_residuals(options: Options) -> Placed:
    """Loads saved residuals into a fresh hook and lets it take one step that adds nothing."""
    assert options.residuals is not None
    assert options.state is not None
    model = make_model()
    ddp = DistributedDataParallel(model, **options.ddp)
    state = GradwireState(**grouped(options.state))
    state.load_state_dict(load(options.residuals[dist.get_rank()]))
    ddp.register_comm_hook(state, gradwire_hook)
    (0.0 * ddp(batch(0, 0)[0]).sum()).backward()
    return Placed(load(save(state.state_dict())), gradients(model))


@dataclass
class Counted:
    """A training, and the messages on this rank's wire during it."""

    trained: Trained
    sent: dict[str, int]  # bytes of pushes, pulls and hellos
    messages: int
    received: int  # bytes of packets


def train_and_count(all_options: list[Options]) -> list[Counted]:
    return [_count(options) for options in all_options]


def _count(options: Options) -> Counted:
    counted = Counted(None, {"push": 0, "pull": 0, "hello": 0}, 0, 0)  # type: ignore[arg-type]
    send, receive = Wire.send, Wire.receive

    def counting_send(wire: Wire, peer: int, kind: Kind, payload: np.ndarray, *turn: Any) -> None:
        what = "hello" if kind is Kind.HELLO else gradwire.inspect(payload)["direction"]
        counted.sent[what] += payload.size
        counted.messages += 1
        send(wire, peer, kind, payload, *turn)

    def counting_receive(wire: Wire, peer: int, limits: Limits) -> Received:
        received = receive(wire, peer, limits)
        counted.received += received.payload.size if received.kind is Kind.PACKET else 0
        return received

    with mock.patch.multiple(Wire, send=counting_send, receive=counting_receive):
        counted.trained = train(options)
    return counted


@dataclass
class Timed:
    """Seconds from the beginning of the step, for each bucket and for the end of backward."""

    hook_called: list[float]
    hook_returned: list[float]
    done: list[float]
    backward_ended: float


def time_buckets(
    overlap: Overlap, late_rank: int, late_seconds: float, slow_seconds: float
) -> Timed:
    """One step in which a rank is late, and backward sleeps before its last bucket is full."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.07)
    state = GradwireState(start_iter=0, overlap=overlap)
    called: list[float] = []
    returned: list[float] = []

    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        called.append(time.perf_counter())
        future = gradwire_hook(state, bucket)
        returned.append(time.perf_counter())
        return future

    ddp.register_comm_hook(state, timed_hook)
    for step in range(3):
        output = ddp(torch.ones(4, 128))
        if step == 2:
            dist.barrier()
            model.get_parameter("1.weight").register_hook(lambda _: time.sleep(slow_seconds))
            if dist.get_rank() == late_rank:
                time.sleep(late_seconds)
            called.clear()
            returned.clear()
        begin = time.perf_counter()
        output.sum().backward()
        end = time.perf_counter()
    done = [bucket.finished - begin for bucket in state.last_step()["buckets"]]
    return Timed([at - begin for at in called], [at - begin for at in returned], done, end - begin)


def lose_a_rank_of_a_part(members: list[int], victim: int, how: str) -> list[str]:
    """how: "killed" is the victim, or it has another "codec" than the others, or in the fifth step
    "nan" in its data. Returns the warnings of that."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    is_victim = dist.get_rank() == victim
    codec = "int8" if is_victim and how == "codec" else "3lc"
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(GradwireState(codec, process_group=group), gradwire_hook)
    optimizer = make_optimizer(model)
    with warnings.catch_warnings(record=True) as caught:
        for step in range(5 if how == "nan" else 1000):
            if step == 4 and is_victim and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            inputs, labels = batch(dist.get_rank(), step)
            if step == 4 and is_victim and how == "nan":
                inputs[0, 0] = math.nan
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    return [str(w.message) for w in caught if w.category is NonFiniteStepWarning]


def train_and_note_decisions(options: Options) -> list[list[str]]:
    """The names of the tensors in each decision about `auto` codecs."""
    names: list[list[str]] = []
    decide = Chooser.decide

    def note(chooser: Chooser, rows: dict[str, Any], steps: int) -> bool:
        names.append(sorted(rows))
        return decide(chooser, rows, steps)

    with mock.patch.object(Chooser, "decide", note):
        train(options)
    return names
