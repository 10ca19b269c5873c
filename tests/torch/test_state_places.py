"""Anchors and residuals on the host, in page-locked memory or on the device: the same bits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import array_device
from array_device import DEVICE, counts
from cluster import Cluster
from frozen import INPUTS, Distances
from gradwire.torch import Execution, GradwireState, ServerOptimizer, gradwire_hook, loopback
from gradwire.torch.staging import moves, stage
from ways import WAYS, build, integers

STEPS = 6
MEMORIES = ["", "device", "host", "pinned"]
LOCAL = [
    "LocalSteps, AdamW",
    "LocalSteps, back to back",
    "LocalSteps, streaming",
    "LocalSteps, outer AdamW",
    "LocalSteps, PULSELoCo",
    "ShardedOptimizer",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(2)


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    total: torch.Tensor = module(integers(INPUTS, seed=1000 * step + rank).to(DEVICE))
    return total


def in_ordinary_memory(n: int, dtype: torch.dtype) -> torch.Tensor:
    """The device of the tests has no page-locked memory."""
    return torch.empty(n, dtype=dtype, device="cpu")


def with_page_locked() -> ExitStack:
    stack = ExitStack()
    for module in (moves, stage):
        stack.enter_context(mock.patch.object(module, "new_page_locked", in_ordinary_memory))
    return stack


def train(way: str, memory: str) -> tuple[Any, int, str, int]:
    """This rank's parameters and residuals, what it sent, what it says, and the bytes copied."""
    warnings.simplefilter("ignore")
    training = build(way, array_device.to_device(Distances()), memory=memory)
    training.run(STEPS, loss)
    state = training.source.state_dict()
    training.source.load_state_dict(state)
    counts.clear()
    training.run(STEPS, loss)
    training.settle()
    copied = counts["bytes"]
    values = [v.cpu().tolist() for v in training.values().values()]
    kept = [r["values"].tolist() for r in training.source.state_dict()["residuals"]]
    stats = training.source.stats()
    said = " ".join(getattr(stats, "exchanges", stats).remarks)
    sent = training.sent_bytes()
    training.close()
    return (values, kept), sent, said, copied


def train_all(way: str, memory: str) -> list[Any]:
    with with_page_locked():
        return loopback.run(2, lambda rank: train(way, memory))


@pytest.mark.parametrize("way", LOCAL)
def test_bits_are_the_same_wherever_anchors_and_residuals_lie(ranks: Cluster, way: str) -> None:
    found = {memory: ranks.run(1, train_all, way, memory)[0] for memory in MEMORIES}
    usual = [rank[:2] for rank in found[""]]
    said = {memory: of_ranks[0][2] for memory, of_ranks in found.items()}
    for memory in MEMORIES[1:]:
        assert [rank[:2] for rank in found[memory]] == usual, memory
    keeps = bool(found[""][0][0][1])
    assert ("Residuals are on the device" in said["device"]) == keeps
    assert "Residuals are" not in said[""] + said["host"] + said["pinned"]
    for memory in ("host", "pinned"):
        assert ("anchors are on the host" in said[memory]) == (WAYS[way].kind == "local")


def train_hooked(memory: str) -> tuple[Any, int, str]:
    warnings.simplefilter("ignore")
    group = array_device.new_group()
    model = array_device.to_device(Distances())
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    state = GradwireState("3lc", process_group=group, execution=Execution(memory=memory))
    module.register_comm_hook(state, gradwire_hook)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with with_page_locked():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(module, torch.distributed.get_rank(), step).backward()
            optimizer.step()
    stats = state.stats()
    values = [p.detach().cpu().tolist() for p in model.parameters()]
    state.close()
    return values, stats.as_dict()["push_bytes"], " ".join(stats.remarks)


def test_the_hook_says_what_residuals_on_the_device_cost(ranks: Cluster) -> None:
    found = {memory: ranks.run(2, train_hooked, memory) for memory in MEMORIES}
    for memory in MEMORIES[1:]:
        assert [rank[:2] for rank in found[memory]] == [rank[:2] for rank in found[""]], memory
    said = found["device"][0][2]
    copied = re.search(r"Residuals are on the device, and ([0-9,]+) bytes", said)
    assert copied is not None
    assert int(copied[1].replace(",", "")) > 0


def shelve() -> tuple[list[Any], list[Any]]:
    """A parameter in channels_last after a use, and what it should be."""
    before = integers(2 * 3 * 4 * 5, seed=1).view(2, 3, 4, 5)
    weight = nn.Parameter(before.to(memory_format=torch.channels_last).to(DEVICE))
    with moves.Shelf([weight], page_locked=False).at_hand(), torch.no_grad():
        weight.add_(1)
    return weight.detach().cpu().tolist(), (before + 1).tolist()


def test_anchors_on_the_host_may_have_any_order_in_memory(ranks: Cluster) -> None:
    found, expected = ranks.run(1, shelve)[0]
    assert found == expected


def test_what_has_no_such_memory_says_so() -> None:
    with pytest.raises(ValueError, match="memory is 'gpu'; valid are"):
        Execution(memory="gpu")
    with pytest.raises(ValueError, match="offload_residuals=True and memory='host' are given"):
        Execution(memory="host", offload_residuals=True)
    on_cpu = {memory: stage.stage_for(torch.device("cpu"), memory).remarks() for memory in MEMORIES}
    assert "memory='pinned' is for a model on a device" in on_cpu.pop("pinned")[0]
    assert not any(on_cpu.values())
    anchors = [nn.Parameter(torch.zeros(4))]
    with (
        mock.patch.object(torch, "empty", side_effect=RuntimeError("no accelerator")),
        pytest.raises(RuntimeError, match="memory='pinned': no page-locked memory for 16 bytes"),
    ):
        moves.Shelf(anchors, page_locked=True)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"memory='device'.* a ServerOptimizer keeps"):
        ServerOptimizer(
            SGD(model.parameters(), lr=0.1),
            codec="int8",
            named_parameters=model.named_parameters(),
            execution=Execution(memory="device"),
        )
