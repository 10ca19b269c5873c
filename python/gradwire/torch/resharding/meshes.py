"""What is owed to each parameter over all ranks, and states of a FullyShardComm for another mesh.

FSDP2 cuts a parameter along one of its dimensions into equal chunks. Along the first dimension the
last chunks may be padded or empty; along others there is no padding. What lies in the exchange's
bucket is chunk after chunk, in FSDP of the whole parameter without padding, and with replicas
(HSDP) the rank's own chunk with padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch

from gradwire.torch.checkpoint import Residual, StateDict, ranks_per_machine_of, residuals_of
from gradwire.torch.exchange_settings import check_machines

Sums = dict[str, torch.Tensor]  # f64, by parameter: a value for each element, flat


def sum_residuals(residuals: Iterable[Residual], weights: dict[str, float]) -> Sums:
    """Sums of the residuals for each element, each times the weight of its kind (none: left out).
    A parameter's sum ends with the last element that has a residual."""
    sums: Sums = {}
    for residual in residuals:
        if residual.kind not in weights:
            continue
        values = torch.from_numpy(residual.values).double() * weights[residual.kind]
        end = residual.offset + values.numel()
        total = sums.setdefault(residual.name, values.new_zeros(0))
        if total.numel() < end:
            missing = values.new_zeros(end - total.numel())
            total = sums[residual.name] = torch.cat([total, missing])
        total[residual.offset : end] += values
    return sums


def weigh(ranks: int, pulls: bool) -> dict[str, float]:
    """The weights with which residuals are owed to the average over so many ranks. pulls: whether
    the residuals of pulls are of averages, too."""
    share = 1.0 / ranks
    return {"push": share, "owed": share} | ({"pull": 1.0} if pulls else {})


def entries_of(sums: Sums, kind: str) -> list[StateDict]:
    """The entries of a state's `residuals`."""
    return [
        {"kind": kind, "name": name, "offset": 0, "values": values.float()}
        for name, values in sums.items()
    ]


def all_residuals(states: Sequence[StateDict]) -> list[Residual]:
    return [residual for state in states for residual in residuals_of(state)]


class _Cut:
    """How a parameter of this shape is cut among `shards` ranks, along dimension `dim`."""

    def __init__(self, shape: Sequence[int], dim: int, shards: int) -> None:
        self._shape, self._dim, self._shards = list(shape), dim, shards
        self._chunk = [*shape[:dim], -(-shape[dim] // shards), *shape[dim + 1 :]]
        self.numel = prod(self._chunk)  # of a chunk

    def unite(self, chunks: torch.Tensor) -> torch.Tensor:
        """The parameter from the values of its chunks. What is missing at the end is 0."""
        values = chunks.new_zeros(self._shards, *self._chunk)
        values.view(-1)[: chunks.numel()] = chunks
        whole = torch.cat(values.unbind(), self._dim)
        return whole.narrow(self._dim, 0, self._shape[self._dim])

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """[shards, values of a chunk], with padding of zeros."""
        padded = list(self._chunk)
        padded[self._dim] *= self._shards
        whole = values.new_zeros(padded)
        whole.narrow(self._dim, 0, self._shape[self._dim]).copy_(values)
        return torch.stack(whole.chunk(self._shards, self._dim)).view(self._shards, -1)


def reshard_mesh(
    states: Sequence[StateDict], world_size: int, shards: int | None, ranks_per_machine: int
) -> list[StateDict]:
    """See reshard. The states are complete, those of a replica after those of another."""
    first = states[0]
    replicas_before = first["replicas"]  # None: the mesh has one dimension
    shards_before = len(states) // (replicas_before or 1)
    if shards is None:
        shards = shards_before if replicas_before else world_size
    if shards < 1 or world_size % shards:
        raise ValueError(f"shards is {shards}, which does not divide the {world_size} ranks")
    replicas = None if shards == world_size else world_size // shards
    if replicas is not None:
        check_machines(ranks_per_machine, replicas, "ranks_per_machine")
    is_same = (replicas, shards) == (replicas_before, shards_before)
    if is_same and ranks_per_machine_of(first) == ranks_per_machine:
        return list(states)
    dims: dict[str, int] = first["dims"]
    shapes = {name: shape for name, shape in first["tensors"] if name in dims}
    before = {name: _Cut(shapes[name], dim, shards_before) for name, dim in dims.items()}
    after = {name: _Cut(shapes[name], dim, shards) for name, dim in dims.items()}
    owed = {
        name: after[name].cut(before[name].unite(chunks))
        for name, chunks in _sum_chunks(states, replicas_before, shards_before, before).items()
    }
    moved = []
    for rank in range(world_size):
        replica, shard = divmod(rank, shards)
        if replicas is None:
            own = {n: chunks.view(-1)[: prod(shapes[n])] for n, chunks in owed.items()}
            place = {"rank": rank, "world_size": world_size, "ranks_per_machine": 1}
        else:
            own = {n: chunks[shard] for n, chunks in owed.items()}
            place = {"rank": replica, "world_size": replicas}
            place["ranks_per_machine"] = ranks_per_machine
            if replica % ranks_per_machine:
                own = {}
        state = {**first, **place, "replicas": replicas, "shard": f"{shard} of {shards}"}
        if (replicas is None) != (replicas_before is None):
            state["exchange"] = "reduce_scatter" if replicas is None else "sharded"
        moved.append({**state, "residuals": entries_of(own, "owed")})
    return moved


def _sum_chunks(
    states: Sequence[StateDict], replicas: int | None, shards: int, cuts: Mapping[str, _Cut]
) -> Sums:
    """What is owed to each parameter, chunk after chunk."""
    if replicas is None:
        return sum_residuals(all_residuals(states), weigh(shards, pulls=False))
    weights = weigh(replicas // ranks_per_machine_of(states[0]), pulls=True)
    found: Sums = {}
    for shard in range(shards):
        owed = sum_residuals(all_residuals(states[shard::shards]), weights)
        for name, values in owed.items():
            empty = values.new_zeros(shards * cuts[name].numel)
            chunk = found.setdefault(name, empty).view(shards, -1)[shard]
            chunk[: values.numel()] = values
    return found
