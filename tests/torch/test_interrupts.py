"""Interrupts, exits and calls in the middle of a step: nothing goes on from half of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD

from cluster import Cluster
from gradwire.torch import ShardedOptimizer
from gradwire.torch.errors import CommunicationError
from gradwire.torch.network.connection import CommunicationThread
from training import loss_of, make_model


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
