"""FSDP2's gradients of 16 bits: gradwire sums them in float32 and rounds once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cluster import Cluster
from gradwire.torch import FullyShardComm

POLICIES: dict[str, dict[str, Any]] = {
    "parameters": {"param_dtype": torch.bfloat16},
    "reduction": {"reduce_dtype": torch.bfloat16},
    "float16": {"reduce_dtype": torch.float16},
    "reduction in float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def _layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(24, 40).to(dtype)


def _backward(layer: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    x = torch.randn(8, 24, generator=generator)
    layer(x.to(dtype)).float().square().mean().backward()


def gradients(policy: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the weight: the mean of all ranks' own, rounded once; FSDP2's; FSDP2's with gradwire."""
    computed = policy.get("param_dtype", torch.float32)
    reduced = policy.get("reduce_dtype", computed)
    alone = _layer(computed)
    _backward(alone, computed)
    assert alone.weight.grad is not None
    own = [torch.empty(alone.weight.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(own, alone.weight.grad.to(reduced).float())
    found = [torch.stack(own).double().mean(0).to(reduced).float()]
    for with_gradwire in (False, True):
        layer: Any = _layer()
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
        comm = FullyShardComm(layer, "raw", start_iter=0) if with_gradwire else None
        _backward(layer, torch.float32)
        found.append(layer.weight.grad.full_tensor())
        if comm is not None:
            comm.close()
    mean, theirs, ours = (each.numpy() for each in found)
    return mean, theirs, ours


@pytest.mark.parametrize("name", POLICIES)
def test_16_bit_gradients_are_rounded_once(cluster: Cluster, name: str) -> None:
    for world in (2, 4):
        for mean, theirs, ours in cluster.run(world, gradients, POLICIES[name]):
            np.testing.assert_array_equal(ours, mean)
            # Gloo rounds each sum of two to 16 bits.
            rounds_once = world == 2 or "float32" in name
            assert np.array_equal(theirs, mean) == rounds_once
