"""Functions that a test cluster runs over the backend "gradwire". Each makes its own group."""

from __future__ import annotations

import contextlib
import io
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.torch_version import TorchVersion

from cluster import free_port
from gradwire.torch import register_backend
from gradwire.torch.backend import process_group
from gradwire.torch.backend.collective import Rules
from gradwire.torch.backend.process_group import GradwireGroup
from gradwire.torch.checkpoint import residuals_in
from gradwire.torch.exchange_settings import ExchangeSettings
from runs import said_by
from training import loss_of, make_model
from ways import Way, build

NUMEL = 4096


def over_backend(job: str, options: dict[str, Any]) -> Any:
    """Runs the job, over groups of the backend, in the place of the cluster's own group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = torch.tensor(free_port())
    dist.broadcast(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    register_backend(**options)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        dist.init_process_group(
            "cpu:gradwire,cuda:gradwire",
            init_method=f"tcp://127.0.0.1:{port.item()}",
            rank=rank,
            world_size=size,
        )
        try:
            return _JOBS[job](), said.getvalue()
        finally:
            dist.destroy_process_group()


def _values(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator).to(dtype)


def _collectives() -> dict[str, Any]:
    """Each collective's result, and the exact one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [_values(r).double() for r in range(size)]
    total, own = torch.stack(given).sum(0), slice(rank * NUMEL // size, (rank + 1) * NUMEL // size)
    found: dict[str, tuple[torch.Tensor, Any]] = {}

    summed = _values(rank)
    dist.all_reduce(summed)
    found["sum"] = summed, total
    averaged = _values(rank).view(64, -1)
    dist.all_reduce(averaged, dist.ReduceOp.AVG, async_op=True).wait()
    found["average"] = averaged.view(-1), total / size
    narrow = _values(rank, torch.bfloat16)
    dist.all_reduce(narrow)
    found["bfloat16"] = narrow, total
    largest = _values(rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found["max"] = largest, torch.stack(given).amax(0)
    few = _values(rank)[:100]
    dist.all_reduce(few)
    found["few"] = few, total[:100]
    whole = torch.arange(NUMEL) + rank
    dist.all_reduce(whole)
    found["integers"] = whole, sum(torch.arange(NUMEL) + r for r in range(size))
    strided = _values(rank).view(64, 64).t()
    dist.all_reduce(strided.contiguous(), group=dist.new_group(backend="gloo"))
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
        shard, before = torch.empty(NUMEL // size), _values(rank)
        dist.reduce_scatter_tensor(shard, before, op)
        found[f"reduce_scatter {op}"] = shard, expected[own]
        assert torch.equal(before, _values(rank)), "the input must stay as it is"
    gathered = torch.empty(size * NUMEL)
    dist.all_gather_into_tensor(gathered, _values(rank))
    found["all_gather"] = gathered, torch.cat(given)
    group = dist.group.WORLD
    assert group is not None
    found["functional sum"] = functional.all_reduce(_values(rank), "sum", group), total
    scattered = functional.reduce_scatter_tensor(_values(rank), "sum", 0, group)
    found["functional reduce_scatter"] = scattered, total[own]
    mesh = init_device_mesh("cpu", (size,))
    partial = DTensor.from_local(_values(rank), mesh, [Partial()])
    found["DTensor"] = partial.redistribute(mesh, [Replicate()]).to_local(), total
    dist.broadcast(few, 0)
    dist.barrier()
    answer = {
        name: (torch.as_tensor(ours).double().numpy(), torch.as_tensor(exact).double().numpy())
        for name, (ours, exact) in found.items()
    }
    return {"found": answer, "stats": group.stats()}  # type: ignore[attr-defined]


class _Extreme(NamedTuple):
    """A value at a place of the tensor of one rank, or of all."""

    place: int
    value: float
    of_all: bool = False


def _non_finite() -> dict[str, Any]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        extremes = [
            _Extreme(1, math.inf),
            _Extreme(NUMEL // 2, -math.inf),
            _Extreme(NUMEL - 1, math.nan),
            _Extreme(7, torch.finfo(dtype).max, of_all=True),  # the sum is infinite
        ]
        found.update(_beside_gloo(dtype, extremes))
    if TorchVersion(torch.__version__) >= "2.13":  # PyTorch 2.9 ends the process
        size = dist.get_world_size()
        with pytest.raises(RuntimeError):  # of Gloo; the group goes on
            dist.reduce_scatter_tensor(torch.empty(NUMEL // size), torch.ones(NUMEL + size))
    dist.monitored_barrier(wait_all_ranks=True)
    return found


def _too_large_for(half: torch.dtype) -> dict[str, Any]:
    """Finite values that are infinite in this dtype, in which a codec sends them."""
    largest = torch.finfo(half).max
    extremes = [_Extreme(1, 1.003 * largest), _Extreme(NUMEL - 1, -1.003 * largest)]
    return _beside_gloo(torch.float32, extremes)


def _beside_gloo(dtype: torch.dtype, extremes: list[_Extreme]) -> dict[str, tuple[Any, Any]]:
    """Sums and gathers with each of these values, from each rank, and what Gloo makes of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    found: dict[str, tuple[Any, Any]] = {}

    def both(run: Callable[[dist.ProcessGroup | None], torch.Tensor]) -> tuple[Any, Any]:
        return run(None).double().numpy(), run(gloo).double().numpy()

    for giver in range(size):
        for place, value, of_all in extremes:
            values = _values(rank, dtype)
            if rank == giver or of_all:
                values[place] = value

            def reduce(group: Any, given: torch.Tensor = values) -> torch.Tensor:
                whole = given.clone()
                dist.all_reduce(whole, group=group)
                return whole

            def scatter(group: Any, given: torch.Tensor = values) -> torch.Tensor:
                shard = torch.empty(NUMEL // size, dtype=given.dtype)
                dist.reduce_scatter_tensor(shard, given, group=group)
                return shard

            def gather(group: Any, given: torch.Tensor = values) -> torch.Tensor:
                whole = torch.empty(size * NUMEL, dtype=given.dtype)
                dist.all_gather_into_tensor(whole, given, group=group)
                return whole

            for run in (reduce,) if of_all else (reduce, scatter, gather):
                name = f"{run.__name__} {dtype} {value} at {place} of {giver}"
                found[name] = both(run)
    dist.monitored_barrier(gloo)
    return found


def train(way: str) -> tuple[list[float], bytes, dict[str, Any]]:
    """Losses, parameters and statistics of a training, over whatever group is the default one."""
    training = build(Way(way), make_model())
    losses = []

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        value = loss_of(module, rank, step)
        losses.append(value.item())
        return value

    training.run(8, loss)
    parameters = list(training.model.parameters())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    values = b"".join(p.detach().numpy().tobytes() for p in whole)
    group: Any = dist.group.WORLD
    return losses, values, group.stats() if hasattr(group, "stats") else {}


def _lose_a_rank() -> str:
    values = _values(0)
    dist.all_reduce(values)
    if dist.get_rank() == 2:
        os._exit(3)
    return said_by(lambda: [dist.all_reduce(values) for _ in range(2)])


def _send_before_waiting() -> float:
    """The first sum of rank 1 begins when it has what rank 0 sends after the beginning of its
    own."""
    values, sent = torch.ones(NUMEL), torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        work = dist.all_reduce(values, async_op=True)
        dist.send(sent, 1)
        work.wait()
    else:
        dist.recv(sent, 0)
        dist.all_reduce(values)
    return float(values.sum() * sent.mean())


def _many_sizes() -> list[tuple[int, list[torch.Tensor]]]:
    """How many exchanges a group keeps, and the sums: where at most two are kept, and where all
    are. No sum is awaited before all have begun."""
    found = []
    for most in (2, 100):
        group: Any = dist.new_group()
        sums = [torch.cat([_values(dist.get_rank()), torch.ones(i % 5)]) for i in range(15)]
        with mock.patch.object(process_group, "_MOST_EXCHANGES", most):
            works = [dist.all_reduce(values, group=group, async_op=True) for values in sums]
            for work in works:
                work.wait()
        found.append((len(group._buckets), sums))
    return found


def _unlike_sizes() -> tuple[bool, str, str]:
    """Whether the group had an error before, the error of the call, and the group's after it."""
    group: Any = dist.group.WORLD
    before = group.error is not None
    said = said_by(lambda: dist.all_reduce(torch.ones(NUMEL + 64 * dist.get_rank())))
    return before, said, str(group.error)


def _reduce_a_negative() -> bool:
    """A tensor whose values are the negatives of those in its memory: whether its sum is right."""
    values = torch._neg_view(_values(dist.get_rank()))
    dist.all_reduce(values)
    exact = -torch.stack([_values(rank) for rank in range(dist.get_world_size())]).sum(0)
    return bool(torch.allclose(values, exact, atol=1e-5))


def _restore_states() -> list[bool]:
    """Whether a full state of rank 0, and a checkpoint that was saved meanwhile, are loaded."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, moments = get_state_dict(model, optimizer, options=gathered)
    before = [p.full_tensor() for p in model.parameters()]
    number = torch.tensor(secrets.randbits(40))
    dist.broadcast(number, 0)
    folder = Path(tempfile.gettempdir(), f"gradwire-states-{number.item()}")
    saved = {"model": model.state_dict()}
    dcp.async_save(saved, checkpoint_id=folder).result()

    def is_restored() -> bool:
        now = [p.full_tensor() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.detach().zero_()
        return all(map(torch.equal, before, now))

    found = [is_restored(), is_restored()]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    found.append(is_restored())
    dcp.load(saved, checkpoint_id=folder)
    found.append(is_restored())
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return found


def _reduce_parameters() -> bool:
    """Whether sums of parameters are right, where the program records gradients and where not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = torch.stack([_values(r) for r in range(size)]).sum(0)
    found = []
    for records in (True, False):
        whole, given = (nn.Parameter(_values(rank)) for _ in range(2))
        shard = nn.Parameter(torch.empty(NUMEL // size))
        with torch.set_grad_enabled(records):
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(shard, given)
        expected = exact, exact.view(size, -1)[rank]
        for tensor, sums in zip((whole, shard), expected, strict=True):
            found.append(tensor.is_leaf and torch.allclose(tensor, sums, atol=1e-5))
    return all(found)


def reduce_without_a_world(port: int, steps: int, spoiled: int) -> dict[str, Any]:
    """The sums of two tensors over several steps, and what the ranks owe at the end. In the step
    `spoiled` the last rank has an infinite value, so the values go raw, and count in neither."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = TCPStore("127.0.0.1", port, is_master=False)
    codecs = {"all_reduce": "3lc:s=1.5", "reduce_scatter": None, "all_gather": None}
    rules = Rules(codecs, 1000, [torch.float32], ExchangeSettings(), keeps_residuals=True)
    group = GradwireGroup(store, rank, size, rules, timedelta(seconds=60))
    tensors = [torch.empty(NUMEL), torch.empty(NUMEL)]
    given, summed = torch.zeros(2, 2, NUMEL, dtype=torch.float64)
    for step in range(steps):
        for place, values in enumerate(tensors):
            values.copy_((place + 1) * _values(2 * step + rank))
            if step != spoiled:
                given[place] += values
            elif rank == size - 1:
                values[5] = math.inf
            group.allreduce([values], dist.AllreduceOptions()).wait()
            if step != spoiled:
                summed[place] += values
            else:
                assert values.isinf().nonzero().tolist() == [[5]]
                assert not values.isnan().any()
    owed = torch.zeros(2, NUMEL, dtype=torch.float64)
    buckets = list(group._buckets.values())
    for place, bucket in enumerate(buckets):
        for residual in residuals_in(bucket.exchange):
            part = owed[place, residual.offset : residual.offset + residual.values.size]
            part += torch.from_numpy(residual.values) * (size if residual.kind == "pull" else 1)
    group.abort()
    return {"given": given.numpy(), "summed": summed.numpy(), "owed": owed.numpy()}


def _draw_side_by_side() -> torch.Tensor:
    """The average of equal inputs in this rank's half of the world."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    halves = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    values = _values(rank % half)
    dist.all_reduce(values, dist.ReduceOp.AVG, group=halves[rank // half])
    return values


_JOBS: dict[str, Callable[[], Any]] = {
    "collectives": _collectives,
    "draw side by side": _draw_side_by_side,
    "non-finite": _non_finite,
    "too large for fp16": partial(_too_large_for, torch.float16),
    "too large for bf16": partial(_too_large_for, torch.bfloat16),
    "plain": partial(train, "plain"),
    "plain fsdp": partial(train, "plain fsdp"),
    "lose a rank": _lose_a_rank,
    "many sizes": _many_sizes,
    "reduce a negative": _reduce_a_negative,
    "reduce parameters": _reduce_parameters,
    "send before waiting": _send_before_waiting,
    "states": _restore_states,
    "unlike sizes": _unlike_sizes,
}
