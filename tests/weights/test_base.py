"""Publisher(base=...) in memory: what receivers have at the start."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gradwire.weights import Publisher, Shard, Subscriber, WeightsError
from states import assert_same

State = dict[str, Any]


@pytest.mark.parametrize("kind", ["dictionary", "model"])
def test_a_base_that_training_changes_is_still_the_base(tmp_path: Path, kind: str) -> None:
    """The first delta was empty, and receivers kept the base."""
    model = torch.nn.Linear(30, 40)
    receiver = copy.deepcopy(model)
    publisher = Publisher(tmp_path, base=model.state_dict() if kind == "dictionary" else model)
    with torch.no_grad():
        model.weight[0] += 1
    assert publisher.publish(model).share_changed == 30 / 1240
    subscriber = Subscriber(tmp_path, version=0)
    subscriber.fetch()
    subscriber.apply_(receiver)
    assert_same(receiver.state_dict(), model.state_dict())


def test_a_base_of_tied_tensors(tmp_path: Path) -> None:
    one, other = torch.arange(10.0), torch.ones(10)
    publisher = Publisher(tmp_path, base={"x": one, "y": one})
    receiver = {"x": one.clone(), "y": one.clone()}
    other[:5] = one[:5]
    state = {"x": one, "y": other}
    assert publisher.publish(state).share_changed == 5 / 20
    subscriber = Subscriber(tmp_path, version=0)
    subscriber.fetch()
    subscriber.apply_(receiver)
    assert_same(receiver, state)


@pytest.mark.parametrize("whole", [False, True])
def test_a_rank_may_have_its_shards_of_the_base(tmp_path: Path, whole: bool) -> None:
    values = torch.arange(20.0)
    base = values if whole else Shard(values[8:], (8,), (20,))
    publisher = Publisher(tmp_path, base={"x": base})
    after = values[8:].clone()
    after[0] = -1
    assert publisher.publish({"x": Shard(after, (8,), (20,))}).share_changed == 1 / 12


def test_what_is_no_base_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="int is neither a dictionary of arrays or tensors nor"):
        Publisher(tmp_path, base=3)


def test_the_store_is_no_base(tmp_path: Path) -> None:
    """A publisher took it, and was refused when it was started again."""
    safetensors.torch.save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for base in (tmp_path, link):
        with pytest.raises(WeightsError, match=f"base {base} is the store, .* take another folder"):
            Publisher(tmp_path, base=base)


@pytest.mark.parametrize(
    ("base", "options", "said"),
    [
        ({"x": torch.ones(9).bfloat16()}, {}, r"'x' is F32 \[9\] here and is BF16 there"),
        ({"x": torch.ones(3, 3)}, {}, r"'x' is F32 \[9\] here and isn't there with this shape"),
        ({"model.x": torch.ones(9)}, {}, r"1 of 1 tensors go in full.*'x' is F32"),
        ({"x": torch.ones(9).bfloat16()}, {"dtype": "bfloat16"}, None),
        ({"model.x": torch.ones(9)}, {"rename": {"x": "model.x"}}, None),
    ],
)
def test_a_base_that_is_of_no_use_is_named(
    tmp_path: Path, base: State, options: State, said: str | None
) -> None:
    """All went in full without a word."""
    publisher = Publisher(tmp_path, base=base, **options)
    warned = contextlib.nullcontext() if said is None else pytest.warns(RuntimeWarning, match=said)
    with warned as caught:
        published = publisher.publish({"x": torch.arange(9.0)})
    assert (published.share_changed < 1) == (said is None)
    for one in caught or ():
        assert one.filename == __file__
    publisher.publish({"x": torch.arange(9.0) + 1})
