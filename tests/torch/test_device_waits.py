"""How often a step copies and waits for a device, with every way to train: never for each
parameter, and a thread waits at most once for each bucket that is copied (array_device.py)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import array_device
from array_device import DEVICE, counts
from cluster import Cluster
from frozen import INPUTS, Distances, Layer
from gradwire.torch import GradwireState, gradwire_hook, register_backend
from gradwire.torch.staging import stage as staging
from gradwire.torch.staging.copier import Copier
from ways import WAYS, build, fresh_number, integers

STEPS = 6
FURTHER = 12  # layers
Inputs = list[torch.Tensor]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(4)


class Counting(Copier):
    """Counts the copies of the staging component."""

    def to_host(self, values: torch.Tensor, host: torch.Tensor) -> None:
        counts["buckets"] += 1
        super().to_host(values, host)

    def to_device(self, host: torch.Tensor, values: torch.Tensor) -> None:
        counts["buckets back"] += 1
        super().to_device(host, values)


def run_ddp(model: nn.Module, inputs: Inputs, group: Any, state: Any = None) -> None:
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    if state is not None:
        module.register_comm_hook(state, gradwire_hook)
    optimizer = SGD(model.parameters(), lr=0.05, foreach=False)
    for given in inputs:
        optimizer.zero_grad()
        module(given).backward()
        optimizer.step()


def run_hook(model: nn.Module, inputs: Inputs) -> None:
    group = array_device.new_group()
    state = GradwireState("int8", process_group=group)
    run_ddp(model, inputs, group, state)
    state.close()


def run_backend(model: nn.Module, inputs: Inputs) -> None:
    name = f"gradwire{fresh_number()}"
    register_backend(min_numel=1, name=name)
    group = dist.new_group(backend=name)
    run_ddp(model, inputs, group)
    dist.destroy_process_group(group)


def loss_of(inputs: Inputs, module: nn.Module, rank: int, step: int) -> torch.Tensor:
    total: torch.Tensor = module(inputs[step])
    return total


OF_DDP: dict[str, Callable[[nn.Module, Inputs], None]] = {
    "hook": run_hook,
    "backend": run_backend,
}


def count_waits(way: str, further: int) -> Counter[str]:
    """In so many steps of this rank, beside what begins and ends a training."""
    warnings.simplefilter("ignore")
    found = []
    for steps in (STEPS, 2 * STEPS):
        model = Distances()
        for place in range(further):
            model.add_module(f"further{place}", Layer(4, 4))
        array_device.to_device(model)
        inputs = [integers(INPUTS, seed=step).to(DEVICE) for step in range(steps)]
        dist.barrier()
        counts.clear()
        with mock.patch.object(staging, "Copier", Counting):
            if way in OF_DDP:
                OF_DDP[way](model, inputs)
            else:
                training = build(way, model)
                training.run(steps, partial(loss_of, inputs))
                training.close()
        found.append(counts.copy())
    first, second = found
    second.subtract(first)
    return second


def total_of(ranks: list[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counted in ranks:
        total.update(counted)
    return total


COUNTED = [name for name, way in WAYS.items() if way.kind in ("sharded", "local", "server", "fsdp")]


@pytest.mark.parametrize("way", [*COUNTED, *OF_DDP])
def test_no_thread_waits_more_than_once_for_a_bucket(ranks: Cluster, way: str) -> None:
    world = 2 if way in OF_DDP else min(WAYS[way].ranks)
    kind = way if way in OF_DDP else WAYS[way].kind
    few = ranks.run(world, count_waits, way, 0)
    many = ranks.run(world, count_waits, way, FURTHER)
    if kind in ("local", "server") and WAYS[way].is_elastic:
        few, many = [total_of(few)], [total_of(many)]  # one rank takes over another's model
    for rank, (one, other) in enumerate(zip(few, many, strict=True)):
        for counted in (one, other):
            # gradwire's thread waits for the bucket, the program for numbers by which it decides.
            most = {"local": counted["buckets"], "sharded": counted["buckets"]}.get(kind, 0)
            if kind == "server":  # they have one thread, and copy gradients and changes
                most = counted["buckets"] + counted["buckets back"]
            if way == "LocalSteps, clipped":  # by a norm that each step needs
                most += STEPS
            assert counted["waits"] <= most, (rank, counted)
            assert counted["waits beside"] <= counted["buckets"], (rank, counted)
            assert counted["buckets"] > 0 or WAYS[way].options.get("pulls") == "gradients"
        # Each layer is a unit of FSDP2's, and may fill a bucket of DDP's.
        if kind not in ("fsdp", *OF_DDP) and not WAYS[way].is_elastic:
            assert one["to_host"] == other["to_host"], rank
            # The last exchange may not come back. Servers' workers wait for what does.
            back = [n["buckets back"] if kind == "server" else 0 for n in (one, other)]
            assert one["waits"] - back[0] == other["waits"] - back[1], rank
