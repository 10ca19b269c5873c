"""Parameters on another device than the CPU.

The device is PyTorch's PrivateUse1, see array_device.py. A process must know it before its first
backward pass, so these tests have processes of their own.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_map_only

import array_device
from array_device import DEVICE, counts
from cluster import Cluster
from delayed_device import DelayedStage, Streams
from frozen import INPUTS, Distances, Layer
from gradwire.torch import (
    loopback,
    pulse_loco,
)
from gradwire.torch.checkpoint import from_bytes, to_bytes
from gradwire.torch.staging import stage as staging
from gradwire.torch.staging.moves import pack, unpack
from ways import WAYS, Way, build, integers

THREE_LC = "3lc:s=1.00,coder=rice"
IN_STEP = [  # these exchange in a rank's own thread, and can be ranks of one process
    name for name, way in WAYS.items() if way.kind in ("sharded", "local", "server")
]
STEPS = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(3)


def make_model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Distances().to(dtype)
    return model if device == "cpu" else array_device.to_device(model)


def train(way: str, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """This rank's parameters as float32, what it sent, and what its statistics remark."""

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs = integers(INPUTS, seed=1000 * step + rank).to(dtype)
        total: torch.Tensor = module(inputs.to(device))
        return total

    warnings.simplefilter("ignore")
    training = build(way, make_model(device, dtype), **options)
    training.run(STEPS, loss)
    training.settle()
    if training.way.servers:
        training.close()
    values = [v.cpu().float().tolist() for v in training.values().values()]
    stats = training.source.stats()
    remarks = getattr(getattr(stats, "exchanges", stats), "remarks", ())
    found = values, training.sent_bytes(), remarks
    training.close()
    return found


def train_over_loopback(way: str, world_size: int, *arguments: Any) -> list[Any]:
    return loopback.run(world_size, lambda rank: train(way, *arguments))


@pytest.mark.parametrize("way", IN_STEP)
def test_every_way_ends_with_the_same_bits_on_a_device(ranks: Cluster, way: str) -> None:
    if WAYS[way].is_elastic:
        on_host, there = ranks.run(2, train, way, "cpu"), ranks.run(2, train, way, DEVICE)
        key = lambda rank: rank[1]  # noqa: E731 - members are numbered as they come
        on_host, there = sorted(on_host, key=key), sorted(there, key=key)
    else:
        world_size = min(WAYS[way].ranks)
        on_host, there = (
            ranks.run(1, train_over_loopback, way, world_size, device)[0]
            for device in ("cpu", DEVICE)
        )
    assert [rank[:2] for rank in on_host] == [rank[:2] for rank in there]


def train_gated(device: str, dtype: torch.dtype, stops: list[int]) -> Any:
    """With two optimizers of small steps, saved and loaded at these steps. Returns of each rank the
    parameters, and what its gates keep."""

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        total: torch.Tensor = module(integers(INPUTS, seed=step).to(dtype).to(device))
        return total

    def both(parameters: list[nn.Parameter]) -> Any:
        return [SGD(parameters[::2], lr=1e-4), AdamW(parameters[1::2], lr=1e-4, eps=1e-3)]

    def job(rank: int) -> tuple[list[Any], list[Any]]:
        way = Way("local", {"every": 2, "fragments": 2, **pulse_loco()})
        model, begin, state = make_model(device, dtype), 0, None
        for end in stops:
            training = build(way, model, both)
            if state is not None:
                training.load(state, begin)
            training.run(end - begin, loss)
            parts = {name: part.state_dict() for name, part in training.parts().items()}
            state = tree_map_only(torch.Tensor, lambda saved: saved.cpu().clone(), parts)
            values = [v.cpu().float().tolist() for v in training.values().values()]
            training.close()
            model, begin = make_model(device, dtype), end
        assert state is not None
        fragments = state["optimizer"]["fragments"]
        kept = [v.cpu().flatten() for f in fragments for v in f["gate"]["kept"]]
        return values, torch.cat(kept).tolist()

    warnings.simplefilter("ignore")
    return loopback.run(2, job)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_on_a_device_keeps_what_it_keeps_on_the_host(
    ranks: Cluster, dtype: torch.dtype
) -> None:
    """And in a checkpoint."""
    (on_host,) = ranks.run(1, train_gated, "cpu", dtype, [7])
    for stops in ([7], [3, 7]):
        assert ranks.run(1, train_gated, DEVICE, dtype, stops) == [on_host]
    for _, kept in on_host:
        held_back = sum(value != 0 for value in kept) / len(kept)
        assert 0 < held_back < 1 if dtype == torch.float32 else held_back < 0.1


@pytest.mark.parametrize("way", ["LocalSteps", "ShardedOptimizer"])
def test_stats_say_what_the_copies_cost(ranks: Cluster, way: str) -> None:
    (on_host,) = ranks.run(1, train_over_loopback, way, 2, "cpu")
    (there,) = ranks.run(1, train_over_loopback, way, 2, DEVICE)
    assert not any("copied" in remark for _, _, remarks in on_host for remark in remarks)
    for _, _, remarks in there:
        (said,) = (remark for remark in remarks if "copied" in remark)
        assert "values on arraydevice:0 are copied to the host and encoded there" in said


def count_copies_beside_steps(way: str, further: int) -> tuple[Counter[str], Counter[str]]:
    """Copies of all ranks together while the models are made equal, and while a state is saved and
    loaded."""
    models = []
    for _ in range(min(WAYS[way].ranks)):
        model = Distances()
        for place in range(further):
            model.add_module(f"further{place}", Layer(4, 4))
        models.append(array_device.to_device(model))
    counts.clear()

    def job(rank: int) -> Counter[str]:
        training = build(way, models[rank])
        training.run(0, lambda *_: torch.zeros(()))
        dist.barrier()
        begun = counts.copy()
        optimizer = training.source
        saved = to_bytes(optimizer.state_dict())
        optimizer.load_state_dict(from_bytes(saved))
        dist.barrier()
        training.close()
        return begun

    warnings.simplefilter("ignore")
    begun = loopback.run(len(models), job)[0]
    return begun, counts - begun


@pytest.mark.parametrize("way", ["LocalSteps, AdamW", "ShardedOptimizer"])
def test_models_and_states_are_copied_as_a_whole(ranks: Cluster, way: str) -> None:
    (few,) = ranks.run(1, count_copies_beside_steps, way, 0)
    (many,) = ranks.run(1, count_copies_beside_steps, way, 12)
    for less, more in zip(few, many, strict=True):
        del less["bytes"], more["bytes"]
        assert less == more
        assert less["waits"] <= less["to_host"] + less["to_device"]
    begun, _ = few
    assert begun["to_host"] + begun["to_device"] > 0


def test_many_tensors_move_in_few_copies(ranks: Cluster) -> None:
    (found,) = ranks.run(1, move_many)
    assert found == {"to_host": 2, "to_device": 2}


def move_many() -> dict[str, int]:
    """Tensors of many dtypes, in an order that suits none, and more bytes than one copy takes."""
    array_device.install()
    values = [
        torch.arange(n, dtype=dtype).reshape(shape)
        for n, dtype, shape in [
            (3, torch.bfloat16, (3,)),
            (6, torch.float32, (2, 3)),
            (1, torch.int64, ()),
            (0, torch.float32, (0,)),
            (5, torch.uint8, (5,)),
            (4, torch.float16, (2, 2)),
        ]
    ]
    there = [v.to(DEVICE) for v in values] + [torch.zeros(1 << 23).to(DEVICE)]
    counts.clear()
    message = pack(there)
    assert message.tobytes()[: -4 << 23] == b"".join(
        v.view(-1).view(torch.uint8).numpy().tobytes() for v in values
    )
    for each in there:
        each.zero_()
    unpack(message, there)
    found = {name: counts[name] for name in ("to_host", "to_device")}
    for value, each in zip(values, there, strict=False):
        assert torch.equal(each.cpu(), value)
    return found


# Streams ----------------------------------------------------------------------------------------


SECONDS = 0.05  # of a copy


def test_a_copy_begins_after_the_work_that_makes_the_values() -> None:
    values = torch.zeros(1000)
    stage = DelayedStage(lambda _: SECONDS)

    def fill() -> None:
        time.sleep(SECONDS)
        values.fill_(3.0)

    stage.streams.main.enqueue(fill)
    fetched = stage.fetch(values)
    with stage.in_pieces(values, fetched) as arriving:
        arriving.wait()
        host = arriving.values
        assert host.eq(3.0).all()
        host.mul_(2)
    stage.stream.synchronize()
    assert values.eq(6.0).all()
    # Work that waits for the stream finds the new values.
    with stage.after(None):
        mark = stage.mark()
    mark.synchronize()


def test_copies_of_one_bucket_and_work_on_another_overlap() -> None:
    """Three buckets are fetched at once; the engine works on one while others are copied."""
    buckets = [torch.full((1000,), float(i)) for i in range(3)]
    stage = DelayedStage(lambda _: SECONDS)
    fetched = [stage.fetch(bucket) for bucket in buckets]
    order = []
    for bucket, copy in zip(buckets, fetched, strict=True):
        with stage.in_pieces(bucket, copy) as arriving:
            arriving.wait()
            host = arriving.values
            order.append(float(host[0]))
            time.sleep(SECONDS)  # the engine
            host.add_(10)
    assert stage.stream.waits == len(buckets)
    began = time.perf_counter()
    stage.stream.synchronize()
    waited = time.perf_counter() - began
    assert order == [0.0, 1.0, 2.0]
    assert [float(bucket[0]) for bucket in buckets] == [10.0, 11.0, 12.0]
    # Nothing waited for a copy back but this: at most three are left, of which two have begun.
    assert waited < 3 * SECONDS + 1.0
    assert "1,000" not in stage.remarks()[0]
    assert "24,000 bytes in 3 buckets" in stage.remarks()[0]


@pytest.mark.parametrize("module", [Streams(), SimpleNamespace()])
def test_only_where_streams_order_them_copies_are_queued(module: Any) -> None:
    """mps has no further stream, and would queue copies whose end nothing could await."""
    queued, copy = [], torch.Tensor.copy_

    def watch(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        queued.append(non_blocking)
        return copy(target, source)

    with (
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch.object(torch.Tensor, "copy_", watch),
        staging.CopyStage(torch.device("mps")).on_host(torch.zeros(8)),
    ):
        pass
    assert queued == 2 * [hasattr(module, "stream")]


def test_host_memory_is_used_again() -> None:
    values = torch.zeros(1000)
    stage = DelayedStage(lambda _: SECONDS)
    places = set()
    for i in range(4):
        with stage.on_host(values) as host:
            places.add(host.data_ptr())
            assert float(host[0]) == i  # what was copied back before
            host.add_(1)
    stage.stream.synchronize()
    assert len(places) == 1
    assert float(values[0]) == 4
