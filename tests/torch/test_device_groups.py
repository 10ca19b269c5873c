"""Ways that DDP, FSDP2 and process groups drive, on a device that is not the CPU (array_device.py):
the same bits as there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import array_device
from array_device import DEVICE
from cluster import Cluster
from frozen import INPUTS, Distances
from gradwire.torch import GradwireState, gradwire_hook, register_backend
from gradwire.torch.backend import process_group
from gradwire.torch.optimizers.gradient_noise import GradientNoise, average_norm
from test_devices import STEPS, THREE_LC, make_model, train
from ways import fresh_number, integers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL = 1 << 40  # values: nothing is compressed


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(4)


# FSDP2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "world", "dtype"),
    [
        ("FSDP2", 2, torch.float32),
        ("FSDP2", 4, torch.bfloat16),
        ("FSDP2, weights", 4, torch.float32),
        ("HSDP", 4, torch.float32),
        ("HSDP", 4, torch.float16),
    ],
)
def test_a_sharded_model_ends_with_the_same_bits(
    ranks: Cluster, way: str, world: int, dtype: torch.dtype
) -> None:
    on_host = ranks.run(world, train, way, "cpu", dtype)
    there = ranks.run(world, train, way, DEVICE, dtype)
    assert [rank[:2] for rank in on_host] == [rank[:2] for rank in there]
    assert on_host[0][0] != on_host[1][0], "each rank has a shard"
    for _, _, remarks in there:
        assert f"values on {DEVICE} are copied to the host and encoded there" in remarks[-1]


def norm_among_shards(device: str) -> float:
    group = dist.group.WORLD if device == "cpu" else array_device.new_group()
    gradients = [torch.full((5,), 1.0 + dist.get_rank()).to(device)]
    return average_norm([GradientNoise([5], 1, device)], gradients, group)


def test_a_norm_among_shards_is_summed_where_the_gradients_are(ranks: Cluster) -> None:
    """NCCL sends no tensor of the host."""
    assert ranks.run(2, norm_among_shards, DEVICE) == ranks.run(2, norm_among_shards, "cpu")


# The hook ---------------------------------------------------------------------------------------


def train_hooked(device: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    group = None if device == "cpu" else array_device.new_group()
    model = make_model(device, dtype)
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    state = GradwireState(process_group=group, **options)
    module.register_comm_hook(state, gradwire_hook)
    step_all(module, device, dtype)
    stats = state.stats()
    state.close()
    values = [p.detach().cpu().float().tolist() for p in model.parameters()]
    return values, stats.as_dict()["push_bytes"], stats.remarks


def step_all(module: nn.Module, device: str, dtype: torch.dtype = torch.float32) -> None:
    optimizer = SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = integers(INPUTS, seed=1000 * step + dist.get_rank()).to(dtype)
        module(inputs.to(device)).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
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


# The backend ------------------------------------------------------------------------------------


def over_backend(job: Callable[[Any, str], Any], device: str, **options: Any) -> Any:
    """What the job returns, called with a new group of the backend, over all ranks."""
    warnings.simplefilter("ignore")
    array_device.install()
    name = f"gradwire{fresh_number()}"
    register_backend(name=name, **options)
    group = dist.new_group(backend=name)
    found = job(group, device)
    dist.destroy_process_group(group)
    return found


def reduce(group: Any, device: str) -> list[list[float]]:
    """All operations that the backend compresses."""
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
    return found


def reduce_over_backend(device: str) -> Any:
    return over_backend(reduce, device, all_gather="bf16", min_numel=64)


def test_the_backend_compresses_on_any_device(ranks: Cluster) -> None:
    on_host = ranks.run(2, reduce_over_backend, "cpu")
    assert ranks.run(2, reduce_over_backend, DEVICE) == on_host


def reduce_in_turn() -> Any:
    """A tensor on the device, one on the CPU, and another one there."""
    found = []

    def reduce_each(group: Any, device: str) -> list[list[float]]:
        for place in (device, "cpu", device):
            values = integers(1024, seed=group.rank()).to(place)
            dist.all_reduce(values, group=group)
            found.append(values.cpu().tolist())
        assert group.stats()["all_reduce"]["compressed"] == len(found)
        return found

    return over_backend(reduce_each, DEVICE, min_numel=64)


def test_one_group_takes_tensors_of_several_devices(ranks: Cluster) -> None:
    for first, second, third in ranks.run(2, reduce_in_turn):
        assert first == second == third


def reduce_sizes() -> tuple[int, int]:
    """How many exchanges are kept after sums of five sizes, and for how many of them the stage has
    memory of the host."""

    def reduce_each(group: Any, device: str) -> tuple[int, int]:
        for numel in range(1024, 1029):
            dist.all_reduce(torch.ones(numel).to(device), group=group)
        (stage,) = [s.stage for at, s in group._sessions.items() if at.type != "cpu"]
        return len(group._buckets), sum(map(bool, stage._free.values()))

    with mock.patch.object(process_group, "_MOST_EXCHANGES", 2):
        found: tuple[int, int] = over_backend(reduce_each, DEVICE, min_numel=64)
    return found


def test_memory_of_earlier_sizes_is_released(ranks: Cluster) -> None:
    assert ranks.run(2, reduce_sizes) == [(2, 2)] * 2


def call_each(group: Any, device: str) -> dict[str, Any]:
    """The results of what is never compressed."""
    rank, size = group.rank(), group.size()
    before, after = (rank - 1) % size, (rank + 1) % size

    def make(count: int = 6, seed: int = 0) -> torch.Tensor:
        return integers(count, seed=10 * seed + rank).to(device)

    def make_all(seed: int = 0, is_here: bool = True) -> Any:
        return [make(seed=seed + i) for i in range(size)] if is_here else None

    def to_all(call: Callable[..., Any], seed: int, *place: Any, **options: Any) -> Any:
        own, every = make(seed=seed), make_all(seed, rank == 0 or "group_dst" not in options)
        call(*((every, own) if call is dist.all_gather else (own, every)), *place, **options)
        return [own, *(every or [])]

    def single(call: Callable[..., Any], out: int, given: int) -> Any:
        tensors = make(out), make(given, seed=4)
        call(*tensors, group=group)
        return tensors

    def exchange() -> Any:
        own, other = make(), make(seed=5)
        works = [dist.isend(own, after, group=group), dist.irecv(other, before, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        return own, other

    def broadcast(values: torch.Tensor) -> Any:
        dist.broadcast(values, 1, group=group)
        return (values.detach(),)

    def broadcast_later(wait: Callable[[Any], Any]) -> Any:
        values = make()
        wait(dist.broadcast(values, 1, group=group, async_op=True))
        return (values,)

    def poll(work: Any) -> None:
        while not work.is_completed():
            pass

    def reduce_integers() -> Any:
        values = make().long()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        dist.reduce(values, 0, group=group)
        return (values,)

    def made_in_inference() -> Any:
        with torch.inference_mode():
            values = make()
        return broadcast(values)

    def objects() -> Any:
        gathered, sent = [None] * size, [rank]
        dist.all_gather_object(gathered, {"rank": rank}, group=group)  # pickle: what is tested
        dist.broadcast_object_list(sent, 1, group=group)  # pickle: what is tested
        dist.barrier(group=group)
        dist.monitored_barrier(group=group)
        return (torch.tensor([*(one["rank"] for one in gathered), *sent]),)  # type: ignore[index]

    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: broadcast(make()),
        "a parameter": lambda: broadcast(nn.Parameter(make())),
        "in another order": lambda: broadcast(make(12).view(3, 4).t()),
        "made in inference mode": made_in_inference,
        "integers": reduce_integers,
        "all_gather": lambda: to_all(dist.all_gather, 1, group=group),
        "gather": lambda: to_all(dist.gather, 2, group=group, group_dst=0),
        "reduce_scatter": lambda: to_all(dist.reduce_scatter, 3, group=group),
        "all_gather_single": lambda: single(dist.all_gather_into_tensor, 6 * size, 6),
        "reduce_scatter_single": lambda: single(dist.reduce_scatter_tensor, 6, 6 * size),
        "all_to_all_single": lambda: single(dist.all_to_all_single, 2 * size, 2 * size),
        "send and receive": exchange,
        "a future": lambda: broadcast_later(lambda work: work.get_future().wait()),
        "polled": lambda: broadcast_later(poll),
        "objects and barriers": objects,
    }
    return {name: [t.cpu().tolist() for t in call()] for name, call in calls.items()}


def call_each_over_backend(device: str) -> Any:
    return over_backend(call_each, device, min_numel=ALL)


def test_what_is_not_compressed_goes_through_the_host(ranks: Cluster) -> None:
    on_host = ranks.run(3, call_each_over_backend, "cpu")
    there = ranks.run(3, call_each_over_backend, DEVICE)
    for name in on_host[0]:
        assert [rank[name] for rank in on_host] == [rank[name] for rank in there], name
    first, second, _ = there
    assert first["broadcast"] == second["broadcast"]


def train_over(group: Any, device: str) -> Any:
    """Parameters and a buffer differ between ranks, until DDP broadcasts those of rank 0."""
    model = Distances()
    model.register_buffer("seen", torch.full((3,), float(group.rank())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(group.rank())
    if device != "cpu":
        array_device.to_device(model)
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    step_all(module, device)
    values = {name: t.cpu().tolist() for name, t in model.state_dict().items()}
    return values, group.stats()["all_reduce"]


def train_ddp_over_backend(device: str, min_numel: int) -> Any:
    return over_backend(train_over, device, min_numel=min_numel)


@pytest.mark.parametrize(("world", "min_numel"), [(2, 256), (4, 256), (2, ALL)])
def test_ddp_trains_over_the_backend(ranks: Cluster, world: int, min_numel: int) -> None:
    on_host = ranks.run(world, train_ddp_over_backend, "cpu", min_numel)
    there = ranks.run(world, train_ddp_over_backend, DEVICE, min_numel)
    assert there == on_host
    for values, counts in there:
        assert values == there[0][0]
        assert not any(values["seen"]), "the buffer is rank 0's"
        assert (counts["compressed"] >= STEPS) == (min_numel != ALL)
        assert (counts["passed_on"] >= STEPS) == (min_numel == ALL)
