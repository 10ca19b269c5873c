"""Interrupts, exits and calls in the middle of a step: nothing goes on from half of one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.optim import SGD, Optimizer

from cluster import Cluster
from gradwire.torch import DiLoCo, LocalSteps, ServerOptimizer, ShardedOptimizer, loopback
from gradwire.torch.errors import CommunicationError, PeerMismatchError
from gradwire.torch.network.connection import CommunicationThread
from runs import said_by
from training import loss_of, make_model
from ways import build


def interrupted(method: str, *objects: Any) -> contextlib.ExitStack:
    """Inside, each call of this method of the objects is an interrupt."""
    stack = contextlib.ExitStack()
    stack.enter_context(pytest.raises(KeyboardInterrupt))
    for each in objects:
        stack.enter_context(mock.patch.object(each, method, side_effect=KeyboardInterrupt))
    return stack


def go_on(name: str, settles: bool) -> str:
    """What a rank is told in the step after one in which it was interrupted, when the result of the
    exchange was there."""
    training = build(name, make_model())
    if training.way.servers:
        training.optimizer.connect()
        if training.source.is_server:
            return said_by(training.optimizer.serve)

    def step() -> None:
        training.step(loss_of)

    for _ in range(3):
        step()
    if training.way.servers:
        middle = interrupted("step", training.inner)
    elif training.way.kind == "sharded":
        middle = interrupted("_add_changes", training.source)
    else:
        middle = interrupted("apply", *training.source._averaging.fragments)
    with middle:
        for _ in range(4):
            training.settle() if settles else step()
    return said_by(step)


@pytest.mark.parametrize(
    ("name", "settles"),
    [
        ("LocalSteps", False),
        ("LocalSteps", True),
        ("LocalSteps, DiLoCo", False),
        ("LocalSteps, streaming", False),
        ("LocalSteps, back to back", False),
        ("servers, gradients", False),
        ("ShardedOptimizer", False),
    ],
)
def test_no_step_goes_on_from_half_of_one(name: str, settles: bool) -> None:
    """A rank went on from other anchors than the others, or from another replica, for good."""
    ranks = 3 if "servers" in name else 2
    assert "of rank 0 broke off" in loopback.run(ranks, lambda rank: go_on(name, settles))[0]


def test_no_step_inside_diloco_goes_on_from_half_of_one() -> None:
    def train(rank: int) -> None:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, SGD(model.parameters(), lr=0.7), sync_every=1) as diloco:
            (fragment,) = diloco.optimizer._averaging.fragments
            broken = mock.patch.object(fragment, "apply", side_effect=KeyboardInterrupt)
            with broken, pytest.raises(KeyboardInterrupt):
                inner.step()
            inner.step()

    with pytest.raises(CommunicationError, match="step 0 of rank 0 broke off"):
        loopback.run(2, train)


def test_a_hook_of_the_wrapped_optimizer_saves_no_state_without_momentum() -> None:
    """A training that went on from it had none any more."""

    def step(rank: int) -> None:
        training = build("LocalSteps, AdamW", make_model())
        training.inner.register_step_post_hook(lambda *_: training.source.state_dict())
        with pytest.raises(RuntimeError, match=r"call state_dict\(\) between two steps"):
            training.step(loss_of)

    loopback.run(2, step)


def connect_again(rank: int) -> str:
    training = build("servers", make_model())
    if training.source.is_server:
        return said_by(lambda: training.run(1, loss_of))
    with interrupted("load_model", *training.source._side.parts.values()):
        training.optimizer.connect()
    return said_by(lambda: training.run(1, loss_of))


def test_a_worker_that_has_half_of_the_model_takes_no_step() -> None:
    """It took itself for connected, and trained what it had before."""
    answers = loopback.run(2, connect_again)
    assert "CommunicationError: connect() of rank 0 broke off" in answers[0]


MAKERS: dict[str, Callable[[nn.Module, Optimizer, str], object]] = {
    "LocalSteps": lambda model, inner, codec: LocalSteps(inner, model, codec),
    "DiLoCo": lambda model, inner, codec: DiLoCo(
        model, inner, SGD(model.parameters(), lr=0.7), 1, codec=codec
    ),
    "ShardedOptimizer": lambda model, inner, codec: ShardedOptimizer(inner, model, codec),
    "ServerOptimizer": lambda model, inner, codec: ServerOptimizer(inner, codec, servers=2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_could_not_be_wrapped_steps_alone(name: str) -> None:
    """As long as the error was kept, such as in a notebook, it was refused."""

    def step(rank: int) -> None:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        with pytest.raises((PeerMismatchError, ValueError)) as kept:
            MAKERS[name](model, inner, ("raw", "int8")[rank])
        inner.step()
        assert kept.value

    loopback.run(2, step)


# In another thread than the program's --------------------------------------------------------


def ask_for_state(optimizer: ShardedOptimizer) -> None:
    optimizer.state_dict()


def leave(optimizer: ShardedOptimizer) -> None:
    raise SystemExit("enough")


def step_with(deed: Callable[[ShardedOptimizer], None]) -> list[str]:
    """What ends a step, of which the thread that communicates does the deed in the middle."""
    model, said = make_model(), list[str]()
    sgd = SGD(model.parameters(), lr=0.1)
    optimizer = ShardedOptimizer(sgd, model)
    sgd.register_step_post_hook(lambda *_: deed(optimizer))
    loss_of(model, 0, 0).backward()

    def step() -> None:
        try:
            optimizer.step()
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(20)
    return said


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (ask_for_state, "RuntimeError: a step is under way"),
        (leave, "SystemExit: enough"),
    ],
)
def test_a_hook_of_the_wrapped_optimizer_ends_the_step(
    cluster: Cluster, deed: Callable[[Any], None], said: str
) -> None:
    """The step waited for its own thread, or for one that had ended."""
    for (answer,) in cluster.run(2, step_with, deed):
        assert said in answer


def test_a_job_after_the_last_is_refused() -> None:
    """A step that began while another thread called close() waited for ever."""
    thread, ran = CommunicationThread(), []
    thread.submit(lambda: ran.append("before"))
    assert thread.stop(20)
    with pytest.raises(CommunicationError, match="it was closed"):
        thread.submit(lambda: ran.append("after"))
    assert ran == ["before"]
