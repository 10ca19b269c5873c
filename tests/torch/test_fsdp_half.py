"""FSDP2 with a MixedPrecisionPolicy: gradwire sums gradients in float32 and rounds once."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from cluster import Cluster
from gradwire.torch import FullyShardComm

STEPS = 200
POLICIES: dict[str, dict[str, Any]] = {
    # PyTorch 2.15 reduces in float32 by default here, earlier versions in bfloat16.
    "parameters": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "reduction": {"reduce_dtype": torch.bfloat16},
    "float16": {"reduce_dtype": torch.float16},
    "reduction in float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def _layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(24, 40).to(dtype)


def _backward(layer: Any, dtype: torch.dtype, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(10 * (step + 1) + dist.get_rank())
    x = torch.randn(8, 24, generator=generator)
    layer(x.to(dtype)).float().square().mean().backward()


def gradients(policy: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the weight: the mean of all ranks' own, rounded once; FSDP2's; FSDP2's with gradwire."""
    computed, reduced = policy.get("param_dtype", torch.float32), policy["reduce_dtype"]
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


def train(policy: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """After each step, the weight of a float32 reference, and that of FSDP2 with gradwire."""
    computed, reduced = policy.get("param_dtype", torch.float32), policy["reduce_dtype"]
    master, layer = _layer(), _layer()
    sharded: Any = layer
    fully_shard(sharded, mp_policy=MixedPrecisionPolicy(**policy))
    comm = FullyShardComm(sharded, "raw", start_iter=0)
    optimizers = [AdamW(model.parameters(), lr=1e-3) for model in (master, sharded)]
    found = []
    for step in range(STEPS):
        alone = copy.deepcopy(master).to(computed)
        alone.zero_grad()
        _backward(alone, computed, step)
        for whole, narrow in zip(master.parameters(), alone.parameters(), strict=True):
            assert narrow.grad is not None
            own = [torch.empty(narrow.shape) for _ in range(dist.get_world_size())]
            # FSDP2 divides by the ranks first: a subnormal float16 may lose its last bit there.
            dist.all_gather(own, (narrow.grad.to(reduced) / dist.get_world_size()).float())
            whole.grad = torch.stack(own).sum(0).to(reduced).float()
        sharded.zero_grad()
        _backward(sharded, torch.float32, step)
        for optimizer in optimizers:
            optimizer.step()
        found.append(
            (master.weight.detach().numpy().copy(), sharded.weight.full_tensor().detach().numpy())
        )
    comm.close()
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_uncompressed_it_is_a_training_with_float32_masters(cluster: Cluster, name: str) -> None:
    """Bit for bit: steps that 16 bits can't hold are not lost. (A sum of two has one order.)"""
    for found in cluster.run(2, train, POLICIES[name]):
        for (expected, ours), (before, _) in zip(found[1:], found, strict=False):
            np.testing.assert_array_equal(ours, expected)
            assert not np.array_equal(expected, before)
