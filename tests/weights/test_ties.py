"""Names for the same memory, at the publisher, in a version and at the receiver; and whether a
dictionary is of a model's tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from gradwire.weights import Publisher, Shard, Subscriber, WeightsError, changes, diff, patch
from states import assert_same

State = dict[str, Any]


def values(number: float) -> torch.Tensor:
    return torch.full((4,), float(number))


def tied(number: float, *names: str) -> State:
    return dict.fromkeys(names, values(number))


UNTIED: dict[str, list[State]] = {
    "both change": [tied(1, "a", "b"), {"a": values(2), "b": values(3)}],
    "one changes": [tied(1, "a", "b"), {"a": values(1), "b": values(3)}],
    "and tied again": [
        tied(1, "a", "b"),
        {"a": values(2), "b": values(3)},
        tied(4, "a", "b"),
        {"a": values(4), "b": values(5)},
    ],
    "one of three": [tied(1, "a", "b", "c"), {**tied(2, "a", "c"), "b": values(3)}],
    "the first of three": [tied(1, "a", "b", "c"), {"a": values(2), **tied(3, "b", "c")}],
    "and equal": [tied(1, "a", "b"), {"a": values(2), "b": values(2)}],
}
FIRST_GONE: dict[str, list[State]] = {
    "the first vanishes": [tied(1, "a", "b", "c"), {"b": values(2), "c": values(1)}],
    "the first has another shape": [
        tied(1, "a", "b", "c"),
        {"a": torch.ones(5), "b": values(2), "c": values(3)},
    ],
}


@pytest.mark.parametrize("kind", UNTIED | FIRST_GONE)
@pytest.mark.parametrize("use", ["torch", "numpy"])
@pytest.mark.parametrize("folded", [False, True])
def test_a_dictionary_is_untied(tmp_path: Path, kind: str, use: str, folded: bool) -> None:
    """A subscriber that has tied tensors, as a version said, unties them when another one does."""
    states = (UNTIED | FIRST_GONE)[kind]
    target: State = {} if use == "torch" else {"x": np.zeros(1)}
    local = tmp_path / "local.safetensors"
    publisher = Publisher(tmp_path / "store")
    subscriber = Subscriber(tmp_path / "store")
    follower = Subscriber(tmp_path / "store", local=local)
    for number, state in enumerate(states):
        publisher.publish(state)
        if folded and 0 < number < len(states) - 1:
            continue
        for one, what in ((subscriber, target), (follower, None)):
            one.fetch()
            one.apply_(what)
        wanted = {name: one if use == "torch" else one.numpy() for name, one in state.items()}
        assert_same(target, wanted)
        assert_same(safetensors.torch.load_file(local), state)


def test_tensors_that_are_equal_may_be_one_memory(tmp_path: Path) -> None:
    """A trainer's state of gathered copies has the tied tensors apart."""
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    model = nn.Sequential(first, last)
    publisher, subscriber = Publisher(tmp_path), Subscriber(tmp_path)
    for number in range(1, 4):
        weight = torch.randn(3, 3)
        weight[0] = number
        publisher.publish({"0.weight": weight, "1.weight": weight.clone()})
        subscriber.fetch()
        subscriber.apply_(model)
        assert torch.equal(first.weight, weight)
        assert last.weight is first.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = self.a
        self.c = nn.Parameter(torch.zeros(4))


ODD: dict[str, State] = {
    "apart": {"a": values(1), "b": values(2), "c": values(1)},
    "tied to another one": {"a": values(1), **tied(2, "b", "c")},
    "in parts": {
        "a": Shard(values(1), (0,), (4,)),
        "b": Shard(values(2), (0,), (4,)),
        "c": values(1),
    },
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("target", ["model", "its state", "its parameters"])
def test_a_tied_model_is_not_untied(tmp_path: Path, kind: str, target: str) -> None:
    """Its dictionary would have a tensor that the model does not use."""
    model = Tied()
    given: Any = {
        "model": model,
        "its state": model.state_dict(),
        "its parameters": dict(model.named_parameters(remove_duplicate=False)),
    }[target]
    Publisher(tmp_path).publish(ODD[kind])
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="'b' and 'a' are one memory here, and differ"):
        subscriber.apply_(given)
    assert not any(values.any() for values in model.parameters())


@pytest.mark.parametrize("tied_apart", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize("names", ["".join(p) for p in itertools.permutations("abc")])
def test_ties_may_come_in_another_order(
    tmp_path: Path, names: str, of_model: bool, tied_apart: bool
) -> None:
    """The name that the receiver has first was tied to one that was not written."""
    model = Tied()
    target: State = model.state_dict() if of_model else tied(0, "a", "b") | {"c": values(0)}
    publisher, subscriber = Publisher(tmp_path), Subscriber(tmp_path)
    for number in range(1, 4):
        state = tied(number, "a", "b") | {"c": values(number)}
        if tied_apart:
            state = tied(number, "b", "c") | {"a": values(number)}
        publisher.publish({name: state[name] for name in names})
        subscriber.fetch()
        subscriber.apply_(model if of_model else target)
        assert_same(target, state)


def test_shards_of_one_memory_that_differ_are_refused() -> None:
    one = tied(1, "a", "b")["a"]
    old = {name: Shard(one, (0,), (8,)) for name in "ab"}
    new = {name: Shard(values(n), (0,), (8,)) for n, name in enumerate("ab")}
    with pytest.raises(WeightsError, match="'b@0' and 'a@0' are one memory here, and differ"):
        patch(old, diff(old, new))
    assert_same({"a": one}, {"a": values(1)})


def test_a_patch_unties(tmp_path: Path) -> None:
    """One memory in `old` as in the dictionary that the delta was made of."""
    old = tied(1, "a", "b")
    apart = {name: one.clone() for name, one in old.items()}
    delta = diff(apart, {"a": values(2), "b": values(1)})
    patch(old, delta)
    assert_same(old, {"a": values(2), "b": values(1)})


OTHER: dict[str, State] = {
    "another dtype": {"a": values(1).bfloat16(), "c": values(1)},
    "another shape": {"a": values(1)[:3], "c": values(1)},
    "a new tensor": {"a": values(1), "c": values(1), "d": values(1)},
}


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("target", ["its state", "its parameters"])
def test_the_dictionary_of_a_model_gets_no_other_tensors(
    tmp_path: Path, kind: str, target: str
) -> None:
    """They would be no tensors of the model, which would keep its old values without a word."""
    model = Tied()
    given: Any = model.state_dict() if target == "its state" else dict(model.named_parameters())
    Publisher(tmp_path).publish(OTHER[kind])
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="make the model that version 1 is of"):
        subscriber.apply_(given)
    assert not any(values.any() for values in model.parameters())


def test_the_dictionary_of_a_model_may_have_others(tmp_path: Path) -> None:
    model = Tied()
    Publisher(tmp_path).publish({"a": values(1)})
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(model.state_dict())
    assert (model.b.tolist(), model.c.tolist()) == ([1.0] * 4, [0.0] * 4)


def write_changes(target: State, found: Iterable[tuple[str, Any, Any]]) -> None:
    for name, indices, new in found:
        numel = len(indices) if name not in target else target[name].numel()
        target.setdefault(name, torch.zeros(numel)).view(-1)[indices] = new


@pytest.mark.parametrize("kind", UNTIED)
@pytest.mark.parametrize("apart", [False, True])
def test_changes_have_each_name(kind: str, apart: bool) -> None:
    """Also where they are written into the tensors themselves, as they come."""
    first, *later = UNTIED[kind]
    target = {name: one.clone() for name, one in first.items()} if apart else first
    states = [first, *later, first, first] if apart else [first, tied(5, *first)]
    for old, new in itertools.pairwise(states):
        write_changes(target, changes(target, diff(old, new)))
        assert_same(target, new)


def test_changes_of_a_tensor_that_is_tied_later(tmp_path: Path) -> None:
    publisher, subscriber = Publisher(tmp_path), Subscriber(tmp_path)
    target: State = {}
    for state in ({"a": values(1), "b": values(2)}, tied(1, "a", "b"), tied(3, "a", "b")):
        publisher.publish(state)
        subscriber.fetch()
        found = {name: one.clone() for name, one in target.items()}
        write_changes(found, subscriber.changes(target))
        subscriber.apply_(target)
        assert_same(found, state)


def test_changes_have_nothing_of_parts_that_are_elsewhere(tmp_path: Path) -> None:
    publisher = [Publisher(tmp_path, rank=r, ranks=2, run="a", patience=60.0) for r in range(2)]
    subscriber = Subscriber(tmp_path)
    mine: State = {name: Shard(torch.zeros(2), (2,), (4,)) for name in ("a", "b")}
    for number in (1, 2):
        part = torch.tensor([1.0, number])
        shards = [dict.fromkeys(("a", "b"), Shard(part, (2 * r,), (4,))) for r in range(2)]
        other = threading.Thread(target=publisher[1].publish, args=(shards[1],))
        other.start()
        publisher[0].publish(shards[0])
        other.join()
        subscriber.fetch()
        found = [(name, at.tolist(), new.tolist()) for name, at, new in subscriber.changes(mine)]
        wanted = ([2, 3], [1.0, 1.0]) if number == 1 else ([3], [2.0])
        assert sorted(found) == [("a", *wanted), ("b", *wanted)]
        subscriber.apply_(mine)


def test_a_part_that_is_tied_to_one_elsewhere_is_refused(tmp_path: Path) -> None:
    part = torch.ones(2)
    Publisher(tmp_path).publish({name: Shard(part, (0,), (4,)) for name in ("a", "b")})
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    mine = {"a": Shard(torch.zeros(0), (4,), (4,)), "b": Shard(torch.zeros(2), (0,), (4,))}
    with pytest.raises(WeightsError, match="'b@0' is tied to 'a@0', which is not here"):
        list(subscriber.changes(mine))
    with pytest.raises(WeightsError, match="'b@0' is tied to 'a@0', which is not here"):
        subscriber.apply_(mine)


NUMBERS = torch.tensor([1 + 2j, 3 - 4j])
NO_TIES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "conjugate": (NUMBERS, NUMBERS.conj()),
    "imaginary part": (NUMBERS.imag, NUMBERS.conj().imag),
    "negative": (NUMBERS.real, torch._neg_view(NUMBERS.real)),
}


@pytest.mark.parametrize("kind", NO_TIES)
def test_other_values_of_one_memory_are_no_tie(tmp_path: Path, kind: str) -> None:
    one, other = NO_TIES[kind]
    state: State = {"a": one, "b": other}
    target: State = {}
    patched: State = {}
    Publisher(tmp_path).publish(state)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(target)
    patch(patched, diff({}, state))
    wanted = {"a": one.clone(), "b": other.resolve_conj().resolve_neg().clone()}
    assert_same(target, wanted)
    assert_same(patched, wanted)
    assert {name: new.tolist() for name, _, new in changes({}, diff({}, state))} == {
        name: values.tolist() for name, values in wanted.items()
    }


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_other_values_of_one_memory_are_received(view: Callable[[Any], torch.Tensor]) -> None:
    """If they fit together; otherwise both would be wrong without a word."""
    memory = torch.zeros(2, dtype=torch.complex64)
    target = {"a": memory, "b": view(memory)}
    patch(target, diff({}, {"a": NUMBERS, "b": view(NUMBERS)}))
    assert torch.equal(target["a"], NUMBERS)
    assert torch.equal(target["b"], view(NUMBERS))
    with pytest.raises(WeightsError, match=r"'[ab]' shares a part of its memory"):
        patch(target, diff({}, {"a": NUMBERS, "b": NUMBERS}))


def fused(number: float) -> State:
    """As a model has them: a tensor, names for it, parts of it, and windows that overlap."""
    whole = torch.arange(8.0)
    whole[1::4] = number
    return {"q": whole[:4], "all": whole, "same": whole, "k": whole[2:6], "neg": neg(whole)}


def neg(values: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(values)


@pytest.mark.parametrize("order", [1, -1])
def test_tensors_with_memory_in_common_follow(tmp_path: Path, order: int) -> None:
    """A delta's base is what the tensor was before any of them was written."""
    publisher, subscriber, target = Publisher(tmp_path), Subscriber(tmp_path), fused(0)
    for number in (1, 2, 3):
        state = fused(number)
        publisher.publish({name: state[name] for name in list(state)[::order]})
        subscriber.fetch()
        subscriber.apply_(target)
        assert_same(target, {name: one.resolve_neg() for name, one in state.items()})
        assert target["all"].data_ptr() == target["q"].data_ptr()
    parts = {name: Shard(one, (0,), one.shape) for name, one in fused(4).items()}
    before = {name: Shard(one, (0,), one.shape) for name, one in target.items()}
    patch(target, diff(before, parts))
    assert_same(target, {name: one.resolve_neg() for name, one in fused(4).items()})
