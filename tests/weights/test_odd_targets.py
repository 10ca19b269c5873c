"""What cannot become a version is refused, and never left with other values."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor

import gradwire
from gradwire.weights import Publisher, Shard, Subscriber, WeightsError, diff, patch
from states import assert_same


class Cloning(nn.Module):
    """Its state_dict() is of copies, as that of wrappers that gather shards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {
            name: values.clone() for name, values in super().state_dict(*args, **kwargs).items()
        }


def read_only() -> np.ndarray:
    values = np.zeros(4, np.float32)
    values.flags.writeable = False
    return values


def with_memory_in_common() -> dict[str, torch.Tensor]:
    whole = torch.zeros(6)
    return {"a": whole[:4], "b": whole[2:]}


ODD: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "copies": (Cloning, "'a' is a copy", True),
    "a read-only array": (
        lambda: {"a": np.zeros(4, np.float32), "b": read_only()},
        "'b' cannot be written: it is read-only",
        True,
    ),
    "memory in common": (with_memory_in_common, "'a' shares a part of its memory", False),
}


def values_of(owner: Any) -> list[list[float]]:
    found = owner if isinstance(owner, dict) else owner.state_dict()
    return [found[name].tolist() for name in ("a", "b")]


def test_pytorch_sees_what_is_written(tmp_path: Path) -> None:
    """So it refuses a backward pass whose forward pass had other weights."""
    publisher, subscriber = Publisher(tmp_path), Subscriber(tmp_path)
    values, target = torch.zeros(4), torch.zeros(4, requires_grad=True)
    unlike = diff({"w": torch.full((4,), 2.0)}, {"w": torch.ones(4)})
    frame = gradwire.encode(np.ones(4, np.float32), "raw")

    def apply_version(step: float = 0.0) -> None:
        publisher.publish({"w": values.add_(step)})
        subscriber.fetch()
        subscriber.apply_({"w": target})

    writes: tuple[Callable[[], object], ...] = (
        apply_version,  # the first in full, the second as a delta
        lambda: apply_version(2.0),
        lambda: patch({"w": target}, unlike),
        lambda: gradwire.decode_into(frame, target.detach()),
    )
    for write in writes:
        loss = target.square().sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", ODD)
def test_odd_targets_are_refused(kind: str, tmp_path: Path) -> None:
    make, said, is_unchanged = ODD[kind]
    first = {"a": torch.arange(4.0), "b": 10 + torch.arange(4.0)}
    Publisher(tmp_path).publish(first)
    subscriber, target = Subscriber(tmp_path), make()
    subscriber.fetch()
    with pytest.raises(WeightsError, match=said):
        subscriber.apply_(target)
    assert subscriber.version is None
    assert not is_unchanged or values_of(target) == [[0.0] * 4] * 2
    zeros = {name: np.zeros(4, np.float32) for name in first}
    with pytest.raises(WeightsError, match=said):
        patch(make(), diff(zeros, {name: values.numpy() for name, values in first.items()}))


class Extra(nn.Module):
    """A model of which a part is no tensor of plain values, as of quantized layers."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize("use", ["apply_", "changes"])
@pytest.mark.parametrize("kind", ["a model", "its state_dict()"])
def test_what_no_version_has_may_be_anything(tmp_path: Path, kind: str, use: str) -> None:
    """It was refused, though a model may have more than the versions."""
    model, wanted = Extra(), {"adapter.weight": torch.ones(2, 2), "adapter.bias": torch.ones(2)}
    Publisher(tmp_path).publish(wanted)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    target = model if kind == "a model" else model.state_dict()
    if use == "changes":
        assert sorted(name for name, *_ in subscriber.changes(target)) == sorted(wanted)
    else:
        subscriber.apply_(target)
        assert_same(model.adapter.state_dict(), {k[8:]: values for k, values in wanted.items()})
    Publisher(tmp_path).publish(wanted | {"frozen.bias": torch.ones(2)})
    subscriber.fetch()
    with pytest.raises(WeightsError, match=r"'frozen.bias' has no plain values: .*load its"):
        subscriber.apply_(target)
    with pytest.raises(WeightsError, match="'_extra_state' is of type dict"):
        Publisher(tmp_path / "other").publish(model)  # nothing is left out without a word


SHARED: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.zeros(1).expand(4),
    "expanded rows": lambda: torch.zeros(2, 1).expand(2, 1000),
    "windows": lambda: torch.zeros(9).unfold(0, 3, 1),
    "windows with gaps": lambda: torch.zeros(99).as_strided((2, 2, 2), (4, 4, 60)),
    "an expanded array": lambda: np.broadcast_to(np.zeros(1, np.float32), 4),
    "a writable one": lambda: as_strided(np.zeros(1, np.float32), (4,), (0,)),
    "windows of an array": lambda: as_strided(np.zeros(99, "f4")[50:], (2, 2, 2), (-16, 16, 80)),
    "parts of elements": lambda: as_strided(np.zeros(4, np.float32), (4,), (3,)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_elements_that_share_memory_are_not_written(kind: str, tmp_path: Path) -> None:
    values = SHARED[kind]()
    target = {"a": torch.zeros(4), "b": values}
    ones = {"a": torch.ones(4), "b": torch.ones(values.shape)}
    Publisher(tmp_path).publish(ones)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    said = "'b' cannot be written: it is read-only, or elements of it share memory"
    with pytest.raises(WeightsError, match=said):
        subscriber.apply_(target)
    with pytest.raises(WeightsError, match=said):
        patch(target, diff({name: 0 * one for name, one in ones.items()}, ones))
    assert not any(one.any() for one in target.values())


@pytest.mark.parametrize("shape", [(3, 0), (1, 1), (2, 3), (6,), ()])
def test_elements_that_lie_anywhere_are_written(shape: tuple[int, ...]) -> None:
    """Also between each other, where no stride is above the reach of the smaller ones."""
    target = {"x": torch.zeros(20).as_strided(shape, (3, 2)[: len(shape)])}
    wanted = torch.arange(1.0, 1 + target["x"].numel()).reshape(shape)
    patch(target, diff({"x": torch.zeros(shape)}, {"x": wanted}))
    assert torch.equal(target["x"], wanted)


def test_tied_tensors_that_overlap_here_in_part_are_checked(tmp_path: Path) -> None:
    """The later one has overwritten the other; both are tied to a third."""
    Publisher(tmp_path).publish(dict.fromkeys("abc", torch.arange(4.0)))
    whole = torch.zeros(6)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="'b' shares a part of its memory"):
        subscriber.apply_({"a": torch.zeros(4), "b": whole[:4], "c": whole[2:]})


def test_tensors_that_overlap_here_and_come_in_parts_are_checked(tmp_path: Path) -> None:
    Publisher(tmp_path).publish({n: Shard(torch.arange(4.0), (0,), (4,)) for n in "ab"})
    whole = torch.zeros(6)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="'a@0' shares a part of its memory"):
        subscriber.apply_({"a": whole[:4], "b": whole[2:]})


def test_a_tensor_and_an_array_of_one_memory_are_tied(tmp_path: Path) -> None:
    values = torch.zeros(1)
    with pytest.raises(WeightsError, match="'b' and 'a' are one memory here, and differ"):
        patch({"a": values, "b": values.numpy()}, diff({}, {"a": ones(), "b": 1 + ones()}))


def test_numbers_are_no_arrays(tmp_path: Path) -> None:
    Publisher(tmp_path).publish({"step": np.float32(3)})
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="'step' is a copy"):
        subscriber.apply_({"step": np.float32(0)})
    tensors: dict[str, Any] = {}
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(tensors)
    assert float(tensors["step"]) == 3


def test_interleaved_tensors_share_no_element(tmp_path: Path) -> None:
    Publisher(tmp_path).publish({"a": torch.arange(4.0), "b": 10 + torch.arange(4.0)})
    whole = torch.zeros(4, 2)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_({"a": whole[:, 0], "b": whole[:, 1]})
    assert whole.tolist() == [[n, 10 + n] for n in range(4)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            (Shard(torch.ones(3), (0,), (6,)), Shard(torch.ones(3), (3,), (8,))),
            r"'w' is F32 \[6\] for a rank, and F32 \[8\] for another",
        ),
        (
            ({"w": Shard(torch.ones(3), (0,), (6,))}, {"w@0": torch.ones(3)}),
            "two tensors have the name 'w@0'.* no name of another tensor",
        ),
        (
            (Shard(torch.ones(3), (0,), (6,)), Shard(torch.ones(3).half(), (3,), (6,))),
            r"'w' is F32 \[6\] for a rank, and F16 \[6\]",
        ),
        (
            (Shard(torch.ones(2, 2), (0, 1), (3, 3)), Shard(torch.ones(2, 2), (1, 0), (3, 3))),
            r"at \[0, 1\] and at \[1, 0\] have elements in common",
        ),
        ((torch.ones(6), Shard(torch.ones(3), (3,), (6,))), r"F32 \[6\] and whole for a rank"),
    ],
)
def test_parts_that_do_not_fit_are_not_published(
    parts: tuple[Any, Any], said: str, tmp_path: Path
) -> None:
    publishers = [
        Publisher(tmp_path, rank=rank, ranks=2, run="a", patience=60.0) for rank in range(2)
    ]
    states = [one if isinstance(one, dict) else {"w": one} for one in parts]
    errors: list[WeightsError] = []

    def publish() -> None:
        try:
            publishers[1].publish(states[1])
        except WeightsError as error:
            errors.append(error)

    other = threading.Thread(target=publish)
    other.start()
    with pytest.raises(WeightsError, match=said):
        publishers[0].publish(states[0])
    other.join()
    assert re.search(said, str(errors[0]))
    assert Subscriber(tmp_path).fetch() is None


def test_a_part_alone_makes_no_whole_tensor(tmp_path: Path) -> None:
    Publisher(tmp_path).publish({"w": Shard(torch.ones(2), (0,), (4,))})
    for target in ({}, {"w": torch.zeros(4)}):
        subscriber = Subscriber(tmp_path)
        subscriber.fetch()
        with pytest.raises(WeightsError, match="has 2 of its 4 elements"):
            subscriber.apply_(target)
    mine = {"w": Shard(torch.zeros(2), (0,), (4,))}
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(mine)
    assert mine["w"].values.tolist() == [1.0, 1.0]


def freed() -> torch.Tensor:
    values = torch.eye(4)
    values.untyped_storage().resize_(0)
    return values


RAGGED = [torch.ones(2), torch.ones(3)]
NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "torch.sparse_coo, .* take its to_dense"),
    "CSR": (lambda: torch.eye(4).to_sparse_csr(), "torch.sparse_csr, .* take its to_dense"),
    "BSC": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "torch.sparse_bsc, .* take its to_dense"),
    "opaque": (lambda: torch.eye(4).to_mkldnn(), "torch._mkldnn, .* take its to_dense"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
        "torch.qint8, .* take its dequantize",
    ),
    "nested": (lambda: torch.nested.nested_tensor(RAGGED), r"nested: take its values\(\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
        r"nested: take its values\(\)",
    ),
    "lazy": (UninitializedParameter, "is lazy, and has no shape yet"),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.eye(4)), "on cpu; load its values"),
    "meta": (lambda: torch.eye(4, device="meta"), "on meta; load its values"),
    "freed": (freed, "on cpu; load its values"),
    "zero": (lambda: torch._efficientzerotensor(4, 4), r"take its clone\(\)"),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_tensors_without_plain_values_are_refused(kind: str, tmp_path: Path) -> None:
    make, said = NOT_PLAIN[kind]
    publisher = Publisher(tmp_path)
    for values in (make(), Shard(make(), (0, 0), (8, 4))):
        for do in (publisher.publish, lambda state: diff({}, state), lambda state: diff(state, {})):
            with pytest.raises(WeightsError, match=f"tensor 'x' .*{said}"):
                do({"x": values})
    publisher.publish({"x": torch.ones(4, 4)})
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match=f"tensor 'x' .*{said}"):
        list(subscriber.changes({"x": make()}))
    with pytest.raises(WeightsError, match=f"tensor 'x' .*{said}"):
        subscriber.apply_({"x": make()})


def test_a_model_that_has_no_shape_yet_is_refused(tmp_path: Path) -> None:
    said = "'weight' is lazy, and has no shape yet: let the model have an input"
    with pytest.raises(WeightsError, match=said):
        Publisher(tmp_path).publish(nn.LazyLinear(3))
    with pytest.raises(WeightsError, match=said):
        patch(nn.LazyLinear(3), diff({}, nn.Linear(2, 3)))


@pytest.mark.parametrize(
    ("at", "whole"),
    [((0.0,), (4,)), ((0,), (4.0,)), (0, (4,)), ("0", (4,)), ((0,), 4), ((None,), (4,))],
)
def test_places_of_parts_are_integers(at: Any, whole: Any, tmp_path: Path) -> None:
    said = "'w': a part has its place and the whole shape as lists of integers, not"
    state = {"w": Shard(torch.ones(2), at, whole)}
    with pytest.raises(WeightsError, match=said):
        Publisher(tmp_path).publish(state)
    with pytest.raises(WeightsError, match=said):
        patch(state, diff({}, {"w": torch.ones(4)}))


@pytest.mark.parametrize(("at", "whole"), [((), (4,)), ((0,), ()), ((0, 0), (4, 4)), ((3,), (4,))])
def test_parts_that_are_not_within_the_whole_are_refused(at: Any, whole: Any) -> None:
    with pytest.raises(WeightsError, match=r"'w': a part of shape \[2\] at .* is not within"):
        diff({}, {"w": Shard(torch.ones(2), at, whole)})


def test_integers_of_numpy_are_places(tmp_path: Path) -> None:
    at: Any = np.array([2])
    whole: Any = (np.uint8(4),)
    target = {"w": Shard(torch.zeros(2), at, whole)}
    Publisher(tmp_path).publish({"w": Shard(torch.ones(2), at, whole)})
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(target)
    assert target["w"].values.tolist() == [1, 1]


def test_no_part_has_the_name_of_another_tensor(tmp_path: Path) -> None:
    part, other = Shard(torch.ones(2), (0,), (4,)), torch.zeros(2)
    said = "two tensors have the name 'w@0'.* no name of another tensor"
    for state in ({"w": part, "w@0": other}, {"w@0": other, "w": part}):
        with pytest.raises(WeightsError, match=said):
            Publisher(tmp_path).publish(state)
        with pytest.raises(WeightsError, match=said):
            diff({}, state)
    with pytest.raises(WeightsError, match=said):
        Publisher(tmp_path, rename=lambda _: "w").publish({"a": part, "b": part})
    target = {"w": Shard(torch.zeros(2), (0,), (4,))}
    patch(target, diff({}, {"w@0": torch.ones(2)}))
    assert list(target) == ["w@0"]


def test_a_part_of_another_whole_is_new(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    for whole in (4, 2):
        publisher.publish({"w": Shard(torch.ones(2), (0,), (whole,))})
        subscriber, target = Subscriber(tmp_path), {"w": Shard(torch.zeros(2), (0,), (3,))}
        subscriber.fetch()
        with pytest.raises(WeightsError, match=r"'w': version \d has"):
            subscriber.apply_(target)
    tensors: dict[str, Any] = {}
    subscriber.fetch()
    subscriber.apply_(tensors)
    assert tensors["w"].tolist() == [1, 1]


def made_of_tensors() -> Any:
    return TwoTensor(torch.ones(2), torch.zeros(2))


def masked_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.ma.masked_array([1.0, 2.0], [False, True]), "is a masked array.*filled"),
        (np.ma.masked_array([1.0, 2.0]), "is a masked array"),
        (masked_tensor(), "is a MaskedTensor, which is made of other tensors"),
        (made_of_tensors(), "is a TwoTensor, which is made of other tensors"),
    ],
)
def test_arrays_that_are_more_than_their_values_are_refused(
    tmp_path: Path, values: Any, said: str
) -> None:
    """As numbers they would lose their mask without a word; at a receiver, too."""
    with pytest.raises(WeightsError, match=f"'x' {said}"):
        Publisher(tmp_path).publish({"x": values})
    with pytest.raises(WeightsError, match=f"'x' {said}"):
        diff({}, {"x": values})
    with pytest.raises(WeightsError, match=f"'x' {said}"):
        patch({"x": values}, diff({}, {"x": np.ones(2)}))
    shard = Shard(values, (0,), (4,))
    with pytest.raises(WeightsError, match=f"'x' {said}"):
        Publisher(tmp_path).publish({"x": shard})


@pytest.mark.parametrize("name", ["", "__metadata__", 1, None])
def test_names_that_no_file_can_hold_are_refused(name: Any, tmp_path: Path) -> None:
    said = f"{name!r} cannot be the name of a tensor"
    state = {name: torch.ones(1)}
    for rename in (None, lambda _: name):
        with pytest.raises(WeightsError, match=said):
            Publisher(tmp_path, rename=rename).publish(state if rename is None else {"a": ones()})
    with pytest.raises(WeightsError, match=said):
        diff({}, state)
    with pytest.raises(WeightsError, match=said):
        patch(state, diff({}, {"a": ones()}))
    assert list(state) == [name]


def ones() -> torch.Tensor:
    return torch.ones(1)
