"""Models compiled by `torch.compile`: the same training, exchanged as without it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import (
    FullyShardComm,
    GradwireState,
    LocalSteps,
    ShardedOptimizer,
    gradwire_hook,
)
from training import batch, digest, make_model, make_optimizer

STEPS = 6


def train_compiled(way: str, compiled: bool) -> tuple[str, list[float], dict[str, Any]]:
    """Digest of the model, losses, counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rank = dist.get_rank()
    model: nn.Module = make_model()
    optimizer: Any = make_optimizer(model)
    gradwire: Any
    trained = model
    if way == "hook":
        gradwire = GradwireState(codec="int8", start_iter=0)
        trained = DistributedDataParallel(model)
        trained.register_comm_hook(gradwire, gradwire_hook)
    elif way == "LocalSteps":
        gradwire = optimizer = LocalSteps(optimizer, model, every=2, codec="int8")
    elif way == "ShardedOptimizer":
        gradwire = optimizer = ShardedOptimizer(optimizer, model, codec="int8")
    else:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        optimizer = make_optimizer(model)
        gradwire = FullyShardComm(model, codec="int8", start_iter=0)
    # aot_eager traces forward and backward as inductor does, and needs no compiler.
    step_model = torch.compile(trained, backend="aot_eager") if compiled else trained
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(step_model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == compiled
    if way == "FullyShardComm":
        gathered = [cast(Any, p).full_tensor() for p in model.parameters()]
        return (
            str(sum(float(p.double().sum()) for p in gathered)),
            losses,
            gradwire.stats().as_dict(),
        )
    return digest(model), losses, gradwire.stats().as_dict()


@pytest.mark.parametrize("way", ["hook", "LocalSteps", "ShardedOptimizer", "FullyShardComm"])
def test_a_compiled_model_trains_as_it_does_without(cluster: Cluster, way: str) -> None:
    plain = cluster.run(2, train_compiled, way, False)
    compiled = cluster.run(2, train_compiled, way, True)
    assert compiled[0][0] == compiled[1][0], "the replicas differ"
    for (_, before, counted), (_, losses, also) in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(losses, before, rtol=1e-3)
        assert also["values"] == counted["values"] > 0
        assert also["push_bytes"] + also["pull_bytes"] == pytest.approx(
            counted["push_bytes"] + counted["pull_bytes"], rel=0.01
        )
