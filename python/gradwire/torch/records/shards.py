"""The parameters that FSDP2 has sharded, as this rank holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch.records.parameters import NamedTensor


def group_of_shards(named: Iterable[NamedTensor]) -> dist.ProcessGroup | None:
    """The ranks among which all the tensors are sharded; None if they are plain tensors.

    Raises ValueError for a mix of both, for different meshes, and for a mesh that is not of one
    dimension.
    """
    tensors = list(named)
    sharded = [(name, tensor) for name, tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return None
    if len(sharded) < len(tensors):
        plain = next(name for name, tensor in tensors if not is_sharded(tensor))
        raise ValueError(f"{sharded[0][0]} is sharded and {plain} is not: call fully_shard for all")
    meshes: list[tuple[str, Any]] = [(n, getattr(t, "device_mesh")) for n, t in sharded]  # noqa: B009
    first_name, first = meshes[0]
    for name, mesh in meshes:
        if mesh.ndim != 1:
            raise ValueError(
                f"{name} is sharded on a mesh of {mesh.ndim} dimensions, whose replicas average "
                "gradients already: call fully_shard(..., mesh=mesh['shard']), and give the group "
                "of the other dimension as process_group"
            )
        if mesh != first:
            raise ValueError(f"{first_name} and {name} are sharded on different meshes")
    group: dist.ProcessGroup = first.get_group()
    return group


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 has sharded it."""
    return hasattr(tensor, "_local_tensor")  # a DTensor, whose module takes long to import
