"""The shards of a model of FSDP2 are published as they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cluster import Cluster
from gradwire.weights import Publisher, Subscriber
from states import assert_same


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 17), nn.GELU(), nn.Linear(17, 1))  # uneven and empty shards


def publish_shards(store: str) -> dict[str, Any]:
    """Three steps of a model that is sharded; the last version as a receiver has it."""
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rank = dist.get_rank()
    publisher = Publisher(store, dtype="bfloat16", rank=rank, ranks=2, run="one")
    target: dict[str, Any] = {}
    subscriber = Subscriber(store)
    for version in range(1, 4):
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        published = publisher.publish(model)
        assert (published.share_changed == 1) == (version == 1)
        subscriber.fetch()
        assert subscriber.apply_(target).version == version
        wanted = {n: t.full_tensor().bfloat16() for n, t in model.state_dict().items()}
        assert_same(target, wanted)
        dist.barrier()
    return {name: values.float().tolist() for name, values in target.items()}


def test_shards_are_published_without_a_gather(tmp_path: Path) -> None:
    cluster = Cluster(2)
    one, other = cluster.run(2, publish_shards, str(tmp_path))
    assert one == other
    assert len(list(tmp_path.glob("v000003.*of2.safetensors"))) == 2
    cluster.close()
