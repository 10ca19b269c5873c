"""The shards of a model of FSDP2 are published and received as they lie."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cluster import Cluster
from gradwire.weights import Publisher, StaleBaseError, Subscriber, WeightsError, diff, patch
from states import assert_same


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 17), nn.GELU(), nn.Linear(17, 1))  # uneven, empty shards
    model.register_buffer("scale", torch.arange(5.0))  # whole on all ranks
    return model


def shard(model: nn.Sequential, *mesh: int) -> nn.Sequential:
    """mesh: (2,) or (replicas, shards)."""
    names = ("replicas", "shards")[-len(mesh) :]
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    return model


def publish_shards(store: str) -> dict[str, Any]:
    """Three steps of a model that is sharded; the last version as a receiver has it."""
    model = shard(make_model(), 2)
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
        assert_same(target, {name: t.bfloat16() for name, t in whole_of(model).items()})
        dist.barrier()
    return {name: values.float().tolist() for name, values in target.items()}


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = model.state_dict().items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found}


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def receive_shards(store: str, *mesh: int) -> None:
    """The receivers' models are sharded, too; the trainers' replicas publish once."""
    model, served = shard(make_model(), *mesh), shard(make_model(), *mesh)
    rank = dist.get_rank()
    publisher = Publisher(store, rank=rank, ranks=2, run="one", patience=20.0)
    subscriber = Subscriber(store)
    for version in range(1, 4):
        with torch.no_grad():
            for values in model.parameters():
                values.mul_(1 + version / 100)
            model.get_buffer("scale").add_(1)
        publisher.publish(model)
        subscriber.fetch()
        assert subscriber.apply_(served).version == version
        assert_same(whole_of(served), whole_of(model))
        dist.barrier()
    local = [values.to_local() for values in served.parameters() if isinstance(values, DTensor)]
    with torch.no_grad():
        max(local, key=torch.numel)[0] += 1
    publisher.publish(model)
    subscriber.fetch()
    with pytest.raises(StaleBaseError):
        subscriber.apply_(served)
    dist.barrier()


@pytest.mark.parametrize("mesh", [(2,), (2, 1), (1, 2)])
def test_shards_are_received_as_they_lie(tmp_path: Path, mesh: tuple[int, ...]) -> None:
    """Those of replicas, too, and a rank may hold nothing of a tensor."""
    cluster = Cluster(2)
    cluster.run(2, receive_shards, str(tmp_path), *mesh)
    cluster.close()


def receive_other_shards(store: str, kind: str) -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    whole = torch.arange(24.0).reshape(6, 4)
    given: dict[str, torch.Tensor] = {"w": distribute_tensor(whole, mesh, [Shard(1)])}
    if kind == "whole":
        given = {"w": whole}
    Publisher(store, rank=rank, ranks=2, run="one", patience=20.0).publish(given)
    subscriber = Subscriber(store)
    subscriber.fetch()
    model = nn.Module()
    zeros = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
    model.register_parameter("w", nn.Parameter(zeros))
    for target in (model, {"w": zeros}):
        with pytest.raises(WeightsError, match=r"'w'.* part of .*shape \[3, 4\] at \[\d, 0\]"):
            subscriber.apply_(target)
        subscriber.fetch()
    assert not zeros.to_local().any()
    assert not whole_of(model)["w"].any()


@pytest.mark.parametrize("kind", ["whole", "cut otherwise"])
def test_shards_that_are_cut_otherwise_are_refused(tmp_path: Path, kind: str) -> None:
    cluster = Cluster(2)
    cluster.run(2, receive_other_shards, str(tmp_path), kind)
    cluster.close()


def use_a_replica(store: str, kind: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    zeros, ones = (
        {"w": distribute_tensor(torch.full((4,), value), mesh, [Replicate()]), "b": torch.ones(2)}
        for value in (0.0, 1.0)
    )
    if kind == "patch":
        patch(zeros, diff(zeros, ones))
        assert local_values(zeros["w"]).all()
    elif kind == "base":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Publisher(f"{store}/{rank}", base=zeros).publish(ones)
    else:
        Publisher(f"{store}/{rank}").publish(ones)
        target: dict[str, torch.Tensor] = {}
        subscriber = Subscriber(f"{store}/{rank}")
        subscriber.fetch()
        subscriber.apply_(target)
        assert target.keys() == ones.keys()
        assert target["w"].all()
    dist.barrier()


@pytest.mark.parametrize("kind", ["patch", "base", "publish"])
def test_a_rank_alone_has_its_replicas(tmp_path: Path, kind: str) -> None:
    """They were left out, as those that another rank publishes."""
    cluster = Cluster(2)
    cluster.run(2, use_a_replica, str(tmp_path), kind)
    cluster.close()


def publish_two_scales(store: str) -> None:
    rank = dist.get_rank()
    publisher = Publisher(store, rank=rank, ranks=2, run="one", patience=20.0)
    with pytest.raises(WeightsError, match="'scale' is whole for several ranks, and its values"):
        publisher.publish({"scale": torch.full((2,), float(rank))})
    dist.barrier()


def test_ranks_with_other_values_of_a_whole_tensor_are_refused(tmp_path: Path) -> None:
    cluster = Cluster(2)
    cluster.run(2, publish_two_scales, str(tmp_path))
    cluster.close()
    assert Subscriber(tmp_path).fetch() is None


def test_shards_are_published_without_a_gather(tmp_path: Path) -> None:
    cluster = Cluster(2)
    one, other = cluster.run(2, publish_shards, str(tmp_path))
    assert one == other
    assert len(list(tmp_path.glob("v000003.*of2.safetensors"))) == 2
    cluster.close()
