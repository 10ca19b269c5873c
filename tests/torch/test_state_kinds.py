"""What is loaded and is no saved state is named, with what is wanted, at every way to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer

from cluster import Cluster
from gradwire.contrib.qsvrg import QSVRG
from gradwire.torch import (
    DiLoCo,
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    loopback,
    outer_nesterov,
    reshard,
)

DICT = "; the dict that state_dict() returned is needed"
NAMED = "', the name of a file" + DICT + ": torch.load('"
NONE = "ValueError: not a gradwire state: its format is None"
SAID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "None": (lambda own: None, f"TypeError: the state is None{DICT}"),
    "name": (lambda own: "a.pt", f"TypeError: the state is 'a.pt{NAMED}a.pt', weights_only=True)"),
    "path": (lambda own: Path("b.pt"), f"TypeError: the state is 'b.pt{NAMED}b.pt', "),
    "list": (lambda own: [own], f"TypeError: the state is of the type list{DICT}"),
    "tensor": (lambda own: torch.zeros(3), f"TypeError: the state is of the type Tensor{DICT}"),
    "empty": (lambda own: {}, NONE),
    "model's": (lambda own: nn.Linear(2, 2).state_dict(), NONE),
    "optimizer's": (
        lambda own: SGD(nn.Linear(8, 8).parameters(), lr=0.1).state_dict(),
        f"{NONE}. It is an optimizer's own: load what state_dict() of gradwire's object returned",
    ),
    "half": (lambda own: {"format": 2}, "ValueError: the gradwire state is not whole: it has no r"),
}


def in_process() -> Iterator[Any]:
    model = nn.Linear(8, 8)
    optimizer = SGD(model.parameters(), lr=0.1)
    weight = nn.Parameter(torch.zeros(3))
    yield GradwireState()
    yield ServerOptimizer(optimizer, named_parameters=model.named_parameters())
    yield ShardedOptimizer(SGD(model.parameters(), lr=0.1), model)
    yield LocalSteps(SGD(model.parameters(), lr=0.1), model)
    yield DiLoCo(model, SGD(model.parameters(), lr=0.1), outer_nesterov(), 2)
    yield QSVRG([weight], lambda j: weight.sum(), 4, smoothness=2.0, convexity=1.0)


def said_by(way: Any, state: Any) -> str:
    try:
        way.load_state_dict(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check(way: Any) -> None:
    own = way.state_dict()
    for kind, (make, expected) in SAID.items():
        said = said_by(way, make(own))
        assert said.startswith(expected), (type(way).__name__, kind, said)
    if not isinstance(way, ServerOptimizer):
        said = said_by(way, {"model": {}, "gradwire": own})
        assert said == f"{NONE}. Its entry 'gradwire' is one: load that"
    way.load_state_dict(own)


def test_each_way_says_what_it_was_given() -> None:
    def check_all(rank: int) -> None:
        for way in in_process():
            check(way)

    loopback.run(2, check_all)


@pytest.mark.parametrize("kind", [LocalSteps, ShardedOptimizer, ServerOptimizer])
def test_get_state_dict_says_what_to_save_instead(kind: Callable[..., Any]) -> None:
    """PyTorch's takes a step, with learning rates of 0, where there is no state yet."""

    def get(rank: int) -> float:
        model, steps = nn.Linear(8, 8), []
        optimizer = kind(SGD(model.parameters(), lr=0.1), model=model)
        optimizer.log_to(SimpleNamespace(add_scalar=lambda *scalar: steps.append(scalar)), every=1)
        said = rf"that of {type(optimizer).__name__} is .* save PerRank\(optimizer\) beside"
        with pytest.raises(TypeError, match=said):
            get_state_dict(model, optimizer)
        optimizer.close()
        assert not steps
        return float(optimizer.param_groups[0]["lr"])

    assert loopback.run(2, get) == [0.1, 0.1]


def test_hooks_of_optimizers_see_the_state_and_may_change_it() -> None:
    def check_hooks(rank: int) -> None:
        for way in in_process():
            if isinstance(way, Optimizer):
                check_hooks_of(way)

    loopback.run(2, check_hooks)


def check_hooks_of(way: Optimizer) -> None:
    called: list[Any] = []

    def add_note(_: Optimizer, state: dict[str, Any]) -> None:
        state["note"] = len(called)

    def drop_note(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        called.append(state["note"])
        return {name: entry for name, entry in state.items() if name != "note"}

    way.register_state_dict_pre_hook(lambda _: called.append("saves"))
    way.register_state_dict_post_hook(add_note)
    way.register_load_state_dict_pre_hook(drop_note)
    way.register_load_state_dict_post_hook(lambda _: called.append("has loaded"))
    state = way.state_dict()
    assert state["note"] == 1
    way.load_state_dict(state)
    assert called == ["saves", 1, "has loaded"], type(way)
    assert state["note"] == 1


def check_sharded() -> None:
    model = nn.Linear(8, 8)
    mesh: Any = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    check(FullyShardComm(model))


def test_fully_shard_comm_says_it_too(cluster: Cluster) -> None:
    cluster.run(2, check_sharded)


def test_a_server_says_that_a_state_is_another_ways() -> None:
    def load(rank: int) -> str:
        model = nn.Linear(8, 8)
        optimizer = ServerOptimizer(SGD(model.parameters(), lr=0.1), model=model)
        own = optimizer.state_dict()["gradwire"]
        halved = said_by(optimizer, {"gradwire": own})
        assert halved == "ValueError: the ServerOptimizer's state is not whole: it has no state"
        return said_by(optimizer, GradwireState().state_dict())

    said = "ValueError: the state is that of a GradwireState, this is a ServerOptimizer"
    assert loopback.run(2, load) == [said, said]


def test_an_optimizer_with_its_parameters_in_another_order_is_named() -> None:
    def make(way: str, is_reversed: bool) -> Any:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        parameters = list(model.parameters())
        optimizer = SGD(parameters[::-1] if is_reversed else parameters, lr=0.1)
        if way == "local":
            return LocalSteps(optimizer, model)
        return ServerOptimizer(optimizer, model=model)

    def load(rank: int) -> None:
        for way in ("local", "served"):
            state = make(way, is_reversed=False).state_dict()
            said = said_by(make(way, is_reversed=True), state)
            assert "its parameter 0 is 0.weight, here it is 1.weight. Give the" in said, way

    loopback.run(2, load)


def test_reshard_says_it_too() -> None:
    with pytest.raises(ValueError, match=r"not a gradwire state: .* It is an optimizer's own"):
        reshard([SAID["optimizer's"][0](None)], 2)
