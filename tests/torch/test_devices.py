"""Parameters that are not float32 on the CPU: on another device, and of 16 bits.

The device is PyTorch's PrivateUse1, see array_device.py. A process must know it before its first
backward pass, so these tests have processes of their own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_map_only

import array_device
from array_device import DEVICE, counts
from cluster import Cluster
from delayed_device import DelayedStage, Streams
from frozen import INPUTS, Distances, Layer
from gradwire.torch import (
    GradwireState,
    LocalSteps,
    ShardedOptimizer,
    gradwire_hook,
    loopback,
    outer_nesterov,
    pulse_loco,
    register_backend,
    staging,
)
from ways import WAYS, Way, build, fresh_number, integers

THREE_LC = "3lc:s=1.00,coder=rice"
IN_STEP = [  # these exchange in a rank's own thread, and can be ranks of one process
    name for name, way in WAYS.items() if way.kind in ("sharded", "local", "server")
]
STEPS = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    cluster = Cluster(3)
    cluster.run(3, array_device.install)
    yield cluster
    cluster.close()


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
        assert "values on array_device:0 are copied to the host and encoded there" in said


def train_hooked(device: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    group = None if device == "cpu" else array_device.new_group()
    model = make_model(device, dtype)
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    state = GradwireState(process_group=group, **options)
    module.register_comm_hook(state, gradwire_hook)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = integers(INPUTS, seed=1000 * step + dist.get_rank()).to(dtype)
        module(inputs.to(device)).backward()
        optimizer.step()
    stats = state.stats()
    state.close()
    values = [p.detach().cpu().float().tolist() for p in model.parameters()]
    return values, stats.as_dict()["push_bytes"], stats.remarks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"codec": THREE_LC}, {"codec": "int8", "start_iter": 0}, {"exchange": "terngrad"}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_hook_goes_over_a_group_without_tensors_of_the_cpu(
    ranks: Cluster, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """As NCCL is one."""
    on_host = ranks.run(2, train_hooked, "cpu", dtype, options)
    there = ranks.run(2, train_hooked, DEVICE, dtype, options)
    assert [rank[:2] for rank in on_host] == [rank[:2] for rank in there]
    assert all("copied" in rank[2][-1] for rank in there)


def reduce_over_backend(device: str) -> list[list[float]]:
    """All operations that the backend compresses."""
    array_device.install()
    name = f"gradwire{fresh_number()}"
    register_backend(all_gather="bf16", min_numel=64, name=name)
    group: Any = dist.new_group(backend=name)
    rank, size = group.rank(), group.size()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = integers(1024 * size, seed=rank).to(dtype).to(device)
        shard = integers(1024, seed=rank).to(dtype).to(device)
        dist.reduce_scatter_tensor(shard, whole, group=group)
        gathered = torch.zeros_like(whole)
        dist.all_gather_into_tensor(gathered, shard, group=group)
        dist.all_reduce(whole, group=group)
        found += [values.cpu().float().tolist() for values in (shard, gathered, whole)]
    compressed = {op: counts["compressed"] for op, counts in group.stats().items()}
    assert set(compressed.values()) == {2}, compressed
    dist.destroy_process_group(group)
    return found


def test_the_backend_compresses_on_any_device(ranks: Cluster) -> None:
    on_host = ranks.run(2, reduce_over_backend, "cpu")
    assert ranks.run(2, reduce_over_backend, DEVICE) == on_host


def count_waits(options: dict[str, Any]) -> list[dict[str, float]]:
    """For each of two ranks: copies and waits of a later step, of so many buckets."""

    def job(rank: int) -> dict[str, float]:
        model = make_model(DEVICE)
        optimizer = LocalSteps(torch.optim.AdamW(model.parameters()), model, "int8", **options)
        steps = 12
        for step in range(2 * steps):
            if step == steps:
                dist.barrier()
                counts.clear()
            optimizer.zero_grad()
            model(integers(INPUTS, seed=step).to(DEVICE)).backward()
            optimizer.step()
        dist.barrier()
        # (Of both ranks, which begin and end to count at slightly different places.)
        counted = {name: round(2 * count / steps / 2) / 2 for name, count in counts.items()}
        optimizer.close()
        return counted

    return loopback.run(2, job)


def test_the_host_waits_once_a_bucket(ranks: Cluster) -> None:
    """Beside the copy of the values themselves, and of the inputs in this test."""
    ((found, _),) = ranks.run(1, count_waits, {})
    assert found.get("waits", 0) == 0
    assert found["to_host"] == 2  # the bucket, and in one copy what the host decides by
    assert found["to_device"] == 2  # the bucket and the inputs
    ((found, _),) = ranks.run(1, count_waits, {"every": 4})
    assert found["to_host"] == 2 / 4


def count_copies(way: str, further: int) -> dict[str, float]:
    """For a step of all ranks together, beside the inputs."""
    steps = 6

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        total: torch.Tensor = module(integers(INPUTS, seed=step).to(DEVICE))
        return total

    def job(rank: int, steps: int) -> None:
        model = Distances()
        for place in range(further):
            model.add_module(f"further{place}", Layer(4, 4))
        training = build(way, array_device.to_device(model))
        training.run(steps, loss)
        training.close()

    warnings.simplefilter("ignore")
    found = []
    for count in (steps, 2 * steps):
        counts.clear()
        loopback.run(min(WAYS[way].ranks), partial(job, steps=count))
        found.append(counts.copy())
    first, second = found
    return {name: (second[name] - first[name]) / steps for name in second if name != "bytes"}


@pytest.mark.parametrize("way", [way for way in IN_STEP if not WAYS[way].is_elastic])
def test_no_way_copies_or_waits_for_each_parameter(ranks: Cluster, way: str) -> None:
    (few,) = ranks.run(1, count_copies, way, 0)
    (many,) = ranks.run(1, count_copies, way, 12)
    assert few == many
    assert not few.get("waits")


# 16 bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outer", [None, outer_nesterov()])
def test_local_steps_keep_what_16_bits_cannot_hold(dtype: torch.dtype, outer: Any) -> None:
    """The parameters are the roundings of float32 values, which take the average changes."""
    every, steps = 4, 200
    targets = [integers(300, seed=rank).div(100) for rank in range(2)]

    def step_alone(parameter: nn.Parameter, optimizer: Any, rank: int) -> None:
        optimizer.zero_grad()
        ((parameter - targets[rank].to(dtype)) ** 2).sum().backward()
        optimizer.step()

    def job(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.ParameterList([torch.zeros(300, dtype=dtype)])
        inner = SGD(model.parameters(), lr=2e-3, momentum=0.5)
        optimizer = LocalSteps(inner, model, "raw", every=every, outer=outer)
        for _ in range(steps):
            step_alone(model[0], optimizer, rank)
        (anchor,) = optimizer.anchors().values()
        found = model[0].detach().clone(), anchor.clone()
        optimizer.close()
        return found

    exact = nn.Parameter(torch.zeros(300))
    outside = None if outer is None else outer([exact])
    parameters = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(2)]
    optimizers = [SGD([p], lr=2e-3, momentum=0.5) for p in parameters]
    for _ in range(steps // every):
        for rank, parameter in enumerate(parameters):
            parameter.data.copy_(exact.detach())
            for _ in range(every):
                step_alone(parameter, optimizers[rank], rank)
        rounded = exact.detach().to(dtype).float()
        changes = [rounded - parameter.detach().float() for parameter in parameters]
        average = (changes[0] + changes[1]) / 2
        if outside is None:
            exact.data -= average
        else:
            exact.grad = average
            outside.step()
    for values, anchor in loopback.run(2, job):
        assert torch.equal(anchor, exact.detach())
        assert torch.equal(values, exact.detach().to(dtype))


def wrap(owner: type[LocalSteps | ShardedOptimizer], model: nn.Module, every: int = 1) -> Any:
    """With momentum, so that LocalSteps applies it late."""
    adam = AdamW(model.parameters(), lr=1e-3)
    if owner is LocalSteps:
        return LocalSteps(adam, model, "raw", every=every)
    return ShardedOptimizer(adam, model, "raw")


@pytest.mark.parametrize("owner", [LocalSteps, ShardedOptimizer])
def test_16_bits_that_are_put_back_were_not_changed(owner: Any) -> None:
    """As they are to evaluate an average of the weights."""

    def job(rank: int, looks_away: bool) -> list[torch.Tensor]:
        model = make_model("cpu", torch.bfloat16)
        optimizer = wrap(owner, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(integers(INPUTS, seed=10 * step + rank).bfloat16()).backward()
            optimizer.step()
            if looks_away:
                kept = {name: values.clone() for name, values in model.state_dict().items()}
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                    for name, parameter in model.named_parameters():
                        parameter.copy_(kept[name])
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    for usual, back in zip(
        loopback.run(2, lambda rank: job(rank, False)),
        loopback.run(2, lambda rank: job(rank, True)),
        strict=True,
    ):
        assert all(map(torch.equal, usual, back))


@pytest.mark.parametrize("owner", [LocalSteps, ShardedOptimizer])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_state_of_another_dtype_is_refused(owner: Any, saved: torch.dtype) -> None:
    other = torch.bfloat16 if saved == torch.float32 else torch.float32

    def job(rank: int) -> None:
        optimizer = wrap(owner, make_model("cpu", saved), every=2)
        state = optimizer.state_dict()
        optimizer.close()
        with pytest.raises(ValueError, match="parameters of 16 bits"):
            wrap(owner, make_model("cpu", other), every=2).load_state_dict(state)

    loopback.run(2, job)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_late_momentum_begins_where_16_bits_begin(dtype: torch.dtype) -> None:
    """On each rank at rank 0's values, and not at those that memory happens to hold."""

    def spoilt(values: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.full_like(values, torch.nan, **options)

    def job(rank: int) -> list[float]:
        model = nn.ParameterList([torch.full((64,), 3.0 + rank, dtype=dtype)])
        adam = AdamW(model.parameters(), lr=0.25, weight_decay=0, eps=1e-4)
        optimizer = LocalSteps(adam, model, "raw", every=4)
        seen = []
        for _ in range(3):  # before the first exchange
            model[0].grad = torch.ones(64, dtype=dtype)
            optimizer.step()
            seen.append(model[0][0].item())
        optimizer.close()
        return seen

    with mock.patch.object(torch, "empty_like", spoilt):
        found = loopback.run(2, job)
    assert found[0] == found[1] == pytest.approx([2.75, 2.5, 2.25], abs=0.02)


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_an_eps_that_is_0_in_float16_is_named(eps: float) -> None:
    def job(rank: int) -> bool:
        model = nn.ParameterList([torch.ones(64, dtype=torch.float16)])
        optimizer = LocalSteps(AdamW(model.parameters(), lr=0.1, eps=eps), model, "raw")
        model[0].grad = torch.full((64,), 1e-5, dtype=torch.float16)  # its square is 0
        optimizer.step()
        optimizer.close()
        return torch.equal(model[0].detach(), torch.ones(64, dtype=torch.float16))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stays = loopback.run(2, job)
    told = ["eps=1e-08 of AdamW is 0 in float16" in str(one.message) for one in said]
    assert (any(told), stays) == ((True, [True, True]) if eps == 1e-8 else (False, [False, False]))


def test_changes_below_a_step_of_bfloat16_add_up() -> None:
    """One of four ranks moves a value by one step of bfloat16: a quarter of that on average."""
    start, step = 1.0, 2.0**-7

    def job(rank: int) -> list[float]:
        model = nn.ParameterList([torch.full((64,), start, dtype=torch.bfloat16)])
        optimizer = LocalSteps(SGD(model.parameters(), lr=1.0), model, "raw")
        seen = []
        for _ in range(8):
            model[0].grad = torch.full((64,), -step if rank == 0 else 0.0, dtype=torch.bfloat16)
            optimizer.step()
            seen.append(float(model[0][0]))
        optimizer.close()
        return seen

    (seen, *others) = loopback.run(4, job)
    assert all(other == seen for other in others)
    assert seen[-1] == start + 2 * step


@pytest.mark.parametrize("codec", ["raw", "int8", THREE_LC])
def test_a_sharded_optimizer_steps_float32_values_of_16_bit_parameters(codec: str) -> None:
    """As if the model were float32 and rounded its parameters before each use."""

    class Rounding(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rounded = {n: p.to(torch.bfloat16) for n, p in self.model.named_parameters()}
            result: torch.Tensor = torch.func.functional_call(self.model, rounded, (x,))
            return result

    def job(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
        model = Distances().to(torch.bfloat16).to(dtype)
        called = model if dtype == torch.bfloat16 else Rounding(model)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = ShardedOptimizer(inner, model, codec)
        for step in range(12):
            optimizer.zero_grad()
            called(integers(INPUTS, seed=10 * step + rank).to(torch.bfloat16)).backward()
            optimizer.step()
            if step == 6:  # and goes on from a state
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        return [p.detach().to(torch.bfloat16) for p in model.parameters()]

    half = loopback.run(2, lambda rank: job(rank, torch.bfloat16))
    whole = loopback.run(2, lambda rank: job(rank, torch.float32))
    for ours, theirs in zip(half, whole, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("way", ["LocalSteps, AdamW", "LocalSteps, streaming", "ShardedOptimizer"])
def test_dtypes_may_be_mixed(way: str) -> None:
    def job(rank: int) -> list[torch.Tensor]:
        model = Distances()
        for parameter in model.parameters():
            parameter.data /= 64
        # (Adam's eps is 0 in float16.)
        least = torch.bfloat16 if WAYS[way].adam else torch.float16
        for layer, dtype in ((model.second, torch.bfloat16), (model.last, least)):
            layer.to(dtype)
        training = build(way, model)

        def loss(module: Any, rank: int, step: int) -> torch.Tensor:
            x = integers(INPUTS, seed=1000 * step + rank) / 64  # float16 ends at 65504
            layers = (layer(x.to(layer.weight.dtype)).float() for layer in module.children())
            return torch.stack(list(layers)).sum()

        training.run(STEPS, loss)
        training.settle()
        values = [v.clone() for v in training.values().values()]
        training.close()
        return values

    first, second = loopback.run(2, job)
    assert all(map(torch.equal, first, second))
    assert {torch.float32, torch.bfloat16} < {v.dtype for v in first} or WAYS[way].adam


# Bad input --------------------------------------------------------------------------------------


def wrap_half(kind: str) -> str:
    array_device.install()

    def job(rank: int) -> str:
        model = Distances()
        if kind == "two devices":
            array_device.to_device(model.last)
        elif kind == "float64":
            model.last.double()
        elif kind == "complex":
            model.last.weight = nn.Parameter(torch.zeros(12, 64, dtype=torch.complex64))
        elif kind == "meta":
            model = model.to("meta")
        try:
            LocalSteps(SGD(model.parameters(), lr=1), model)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    return loopback.run(1, job)[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("two devices", "first.weight is on cpu and last.weight on array_device:0"),
        ("float64", "last.weight is torch.float64"),
        ("complex", "last.weight is torch.complex64.*view_as_real"),
        ("meta", "first.weight is on the device meta"),
    ],
)
def test_what_cannot_be_exchanged_is_named(ranks: Cluster, kind: str, said: str) -> None:
    (found,) = ranks.run(1, wrap_half, kind)
    with pytest.raises(ValueError, match=said):
        raise ValueError(found)


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
    with stage.on_host(values, fetched) as host:
        assert host.eq(3.0).all()
        host.mul_(2)
    stage.settle()
    assert values.eq(6.0).all()
    # Work that waits for the stream finds the new values.
    with stage.after(None):
        mark = stage.mark(values)
    mark.synchronize()


def test_copies_of_one_bucket_and_work_on_another_overlap() -> None:
    """Three buckets are fetched at once; the engine works on one while others are copied."""
    buckets = [torch.full((1000,), float(i)) for i in range(3)]
    stage = DelayedStage(lambda _: SECONDS)
    fetched = [stage.fetch(bucket) for bucket in buckets]
    order = []
    for bucket, copy in zip(buckets, fetched, strict=True):
        with stage.on_host(bucket, copy) as host:
            order.append(float(host[0]))
            time.sleep(SECONDS)  # the engine
            host.add_(10)
    assert stage.stream.waits == len(buckets)
    began = time.perf_counter()
    stage.settle()
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
    stage.settle()
    assert len(places) == 1
    assert float(values[0]) == 4
