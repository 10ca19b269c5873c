"""Tensors on a device that is not the CPU are published, and are changed in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import array_device
from array_device import DEVICE
from cluster import Cluster
from gradwire.weights import Publisher, StaleBaseError, Subscriber, diff, patch
from states import assert_same, state_of


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    """A process of its own, in which PyTorch knows the device."""
    cluster = Cluster(1)
    yield cluster
    assert cluster.close() == [0]


def make_model(time: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The values of a time; the last layer is tied to the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24, bias=False))
    with torch.no_grad():
        for values in model.parameters():
            values[..., ::5] += 0.01 * time
            values[..., 1::5] += 1e-6 * time  # below bfloat16's rounding
    model[2].weight = model[0].weight
    return model.to(dtype)


def follow_a_model(folder: str) -> None:
    array_device.install()
    stores = Path(folder) / "device", Path(folder) / "cpu"
    on_device, on_cpu = (Publisher(store, dtype="bfloat16") for store in stores)
    served = array_device.to_device(make_model(0, torch.bfloat16))
    addresses = [values.data_ptr() for values in served.parameters()]
    subscriber = Subscriber(stores[0])
    for time in range(1, 4):
        model = make_model(time)
        published = on_device.publish(array_device.to_device(make_model(time)))
        assert (published.share_changed < 0.5) == (time > 1)
        assert published.bytes == on_cpu.publish(model).bytes
        subscriber.fetch()
        assert subscriber.apply_(served).version == time
        wanted = make_model(time, torch.bfloat16).state_dict()
        assert_same({name: t.cpu() for name, t in served.state_dict().items()}, wanted)
    assert [values.data_ptr() for values in served.parameters()] == addresses
    parts = [sorted(file.read_bytes() for file in s.glob("*.safetensors")) for s in stores]
    assert parts[0] == parts[1]
    with torch.no_grad():
        served.get_parameter("1.bias").add_(1)
    on_device.publish(array_device.to_device(make_model(4)))
    subscriber.fetch()
    with pytest.raises(StaleBaseError, match=r"'1\.bias'"):
        subscriber.apply_(served)


def patch_tensors() -> None:
    """In a dictionary, also one that is not contiguous; and the sparse changes."""
    array_device.install()
    old = {name: values.to(DEVICE) for name, values in state_of(1).items()}
    old["weight"] = state_of(1)["weight"].T.contiguous().to(DEVICE).T
    assert not old["weight"].is_contiguous()
    new = {name: values.to(DEVICE) for name, values in state_of(2).items()}
    delta = diff(old, new)
    assert delta == diff(state_of(1), state_of(2))
    patch(old, delta)
    assert_same({name: values.cpu() for name, values in old.items()}, state_of(2))
    other = {**state_of(2), "bias": torch.ones(9), "new": torch.ones(3)}
    patch(old, diff(state_of(2), other))
    assert {str(values.device) for values in old.values()} == {DEVICE}  # of all the others
    assert_same({name: values.cpu() for name, values in old.items()}, other)


def publish_without_addresses(folder: str) -> None:
    """Tensors of the same shape on a device whose tensors have no address are not one tensor."""
    array_device.install()
    with mock.patch.object(array_device.ArrayTensor, "data_ptr", return_value=0):
        Publisher(folder).publish({"a": torch.ones(5).to(DEVICE), "b": torch.zeros(5).to(DEVICE)})
    target = {"a": torch.zeros(5), "b": torch.ones(5)}
    subscriber = Subscriber(folder)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, {"a": torch.ones(5), "b": torch.zeros(5)})


def test_a_model_on_a_device_follows_a_master_on_a_device(ranks: Cluster, tmp_path: Path) -> None:
    ranks.run(1, follow_a_model, str(tmp_path))


def test_tensors_on_a_device_are_patched(ranks: Cluster) -> None:
    ranks.run(1, patch_tensors)


def test_a_device_without_addresses(ranks: Cluster, tmp_path: Path) -> None:
    ranks.run(1, publish_without_addresses, str(tmp_path))
