"""Checkpoints of model and optimizer as versions: what comes back is what went in."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.weights import (
    Publisher,
    StaleBaseError,
    Subscriber,
    WeightsError,
    flatten,
    unflatten,
)
from gradwire.weights.folder import MemoryFolder
from states import bits

State = dict[str, Any]
PLAIN = {
    "none": None,
    "bools": [True, False],
    "numbers": [0, -1, 2**63 - 1, 2**64 - 1, -(10**30), 0.1, 5e-324, -0.0],
    "not finite": (math.inf, -math.inf),
    "text": 'ä"/\u2028',
    "empty": [{}, [], (), ""],
    "betas": (0.9, (0.999,)),
    "keys": {0: "int", "0": "text", True: "bool", None: "none", 2**64: "large", "a/b": "slash"},
}


def test_plain_values_come_back_with_their_types() -> None:
    back = unflatten(flatten(PLAIN))
    assert repr(back) == repr(PLAIN)
    assert math.isnan(unflatten(flatten({"x": math.nan}))["x"])


SCALARS = [
    np.float32(0.1),
    np.float64(math.pi),
    np.float16(-0.0),
    np.uint32(0x7FC00001).view(np.float32),  # a NaN with a payload
    np.int64(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.datetime64("2026-01-02", "ns"),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_numpy_scalars_come_back_as_what_they_are(tmp_path: Path, scalar: Any) -> None:
    """They came back as tensors, which optimizers refuse as a learning rate."""
    Publisher(tmp_path).publish(flatten({"lr": scalar, "x": torch.ones(1)}))
    (back, *_), plain = restore(tmp_path, 1).values(), unflatten(flatten({"lr": scalar}))["lr"]
    for found in (back, plain):
        assert type(found) is type(scalar)
        assert found.tobytes() == scalar.tobytes()


def test_tensors_are_named_by_their_paths_and_come_back() -> None:
    state: State = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"m": torch.zeros(3)}}},
    }
    flat = flatten(state)
    assert list(flat)[1:] == ["model/w", "optimizer/state/0/m"]
    back = unflatten(flat)
    assert back["optimizer"]["state"][0]["m"] is state["optimizer"]["state"][0]["m"]
    arrays = unflatten(flatten({"x": [np.arange(3), 1]}))
    assert arrays["x"][0].tolist() == [0, 1, 2]


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(40):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, "'a/b' is of type object"),
        ({"a": np.str_("text")}, "'a' is of type str_"),
        ({"a": {1.5: 1}}, "the key 1.5 of 'a' is of type float"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors have the path 'a/b'"),
        ({"structure.json": torch.ones(1)}, "a name that flatten"),
        ({"deep": _deep()}, "stands more than 30 deep"),
    ],
)
def test_what_cannot_come_back_is_refused(state: State, words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        flatten(state)


def test_the_deepest_state_comes_back() -> None:
    state: State = {"x": 1}
    for _ in range(29):
        state = {"x": state}
    assert unflatten(flatten(state)) == state


@pytest.mark.parametrize(
    "text",
    [
        *[b"", b"{", b"{}", b'{"dict": 3}', b'{"dict": [[[], 1]]}', b'{"other": 1}', b'{"int":{}}'],
        *[b'{"numpy": ["float32", "%s"]}' % digits for digits in (b"00", b"", b"00" * 8)],
        *[b'{"numpy": 3}', b'{"numpy": ["O", "00"]}', b'{"numpy": [{}, ""]}'],
    ],
)
def test_a_structure_of_somebody_else_is_refused(text: bytes) -> None:
    with pytest.raises(WeightsError, match="not from flatten"):
        unflatten({"structure.json": np.frombuffer(text, np.uint8)})


def test_a_lacking_tensor_is_named() -> None:
    flat = flatten({"x": torch.ones(1), "y": torch.ones(1)})
    with pytest.raises(WeightsError, match="tensor 'y' is missing"):
        unflatten({name: values for name, values in flat.items() if name != "y"})
    with pytest.raises(WeightsError, match=r"no tensor 'structure\.json'"):
        unflatten({"x": torch.ones(1)})


class Training:
    """A model with dropout and buffers, AdamW with two groups, a schedule, and a generator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 1),
        )
        first, *rest = self.model.parameters()
        groups: list[State] = [{"params": [first], "weight_decay": 0.0}, {"params": rest}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(32, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])


def restore(store: Path, version: int) -> State:
    tensors: State = {}
    subscriber = Subscriber(store)
    subscriber.fetch(version)
    assert subscriber.apply_(tensors).version == version
    state: State = unflatten(tensors)
    return state


@pytest.mark.parametrize("anchor_every", [0, 2])
def test_every_version_resumes_bit_for_bit(tmp_path: Path, anchor_every: int) -> None:
    training, publisher = Training(), Publisher(tmp_path, anchor_every=anchor_every)
    for _ in range(5):
        training.train(4)
        publisher.publish(flatten(training.state()))
    for version in (3, 1, 5, 2, 4):
        other = Training()
        other.load(restore(tmp_path, version))
        other.train(4 * (5 - version))
        _assert_alike(other.state(), training.state())


def _assert_alike(one: State, other: State) -> None:
    """As far as flatten() sees; its own test says how far that is."""
    first, second = flatten(one), flatten(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert bits(values) == bits(second[name]), name


def test_a_resumed_training_goes_on_with_the_chain(tmp_path: Path) -> None:
    training = Training()
    for _ in range(2):  # the program is started again
        publisher = Publisher(tmp_path)
        training.train(3)
        published = publisher.publish(flatten(training.state()))
        training = Training()
        training.load(restore(tmp_path, published.version))
    assert published.version == 2


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publisher = Publisher(tmp_path, anchor_every=3)
    for version in range(1, 6):
        publisher.publish({"x": torch.full((100,), version)})
    return tmp_path


def test_any_version_can_be_fetched_from_any_other(store: Path) -> None:
    subscriber, target = Subscriber(store), State()
    for version in (2, 5, 1, 4, 3):
        fetched = subscriber.fetch(version)
        assert fetched is not None
        assert fetched.version == version
        assert subscriber.apply_(target).version == version
        assert target["x"].tolist() == [version] * 100


def test_the_last_call_of_fetch_decides(store: Path) -> None:
    subscriber, target = Subscriber(store), State()
    subscriber.fetch(2)
    subscriber.apply_(target)
    calls: list[tuple[Callable[[], Any], int]] = [
        (lambda: (subscriber.fetch(), subscriber.fetch(2)), 2),
        (lambda: (subscriber.fetch(5), subscriber.fetch(4)), 4),
        (lambda: (subscriber.fetch(1), subscriber.fetch()), 5),
    ]
    for call, version in calls:
        call()
        assert subscriber.apply_(target).version == version
        assert target["x"].tolist() == [version] * 100


def test_a_version_between_that_in_use_and_the_fetched_one_is_fetched() -> None:
    """No full version is needed for it."""
    store, target = MemoryFolder(), {"x": torch.zeros(100)}
    publisher = Publisher(store, base=target)
    for version in range(1, 4):
        publisher.publish({"x": torch.full((100,), float(version))})
    subscriber = Subscriber(store, version=0)
    for version in (3, 2):
        subscriber.fetch(version)
    assert subscriber.apply_(target).version == 2
    assert target["x"].tolist() == [2.0] * 100


@pytest.mark.parametrize("version", [0, -1, 6])
def test_a_version_that_does_not_exist(store: Path, version: int) -> None:
    with pytest.raises(WeightsError, match=rf"no version {version}; the newest is 5"):
        Subscriber(store).fetch(version)


def test_a_version_that_no_full_one_leads_to(tmp_path: Path) -> None:
    base = {"x": torch.zeros(100)}
    publisher = Publisher(tmp_path, base=base, anchor_every=3)
    for version in range(1, 5):
        publisher.publish({"x": torch.full((100,), float(version))})
    with pytest.raises(StaleBaseError, match="from nothing to version 2"):
        Subscriber(tmp_path).fetch(2)
    assert Subscriber(tmp_path).fetch(4) is not None
