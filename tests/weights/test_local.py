"""Subscriber(local=...): what else is in the files or beside them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import cli_runner
from gradwire.weights import Publisher, StaleBaseError, Subscriber, WeightsError, diff
from states import assert_same, state_of

State = dict[str, Any]


def follow(store: Path, local: Path) -> None:
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    subscriber.apply_()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_folder(folder: Path, time: int) -> None:
    folder.mkdir()
    for number, (name, values) in enumerate(state_of(time).items()):
        safetensors.torch.save_file({name: values}, folder / f"model-{number}.safetensors")


def link_to(blob: Path, local: Path, kind: str) -> None:
    local.mkdir()
    if kind == "symbolic":
        (local / "model.safetensors").symlink_to(blob)
    else:
        os.link(blob, local / "model.safetensors")


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("way", ["local", "patch"])
def test_nothing_is_written_through_links(tmp_path: Path, kind: str, way: str) -> None:
    """Two revisions in the cache of Hugging Face may be one file."""
    blob, local, store = tmp_path / "blob", tmp_path / "local", tmp_path / "store"
    safetensors.torch.save_file(state_of(0), blob)
    kept = blob.read_bytes()
    link_to(blob, local, kind)
    if way == "local":
        Publisher(store, base=state_of(0)).publish(state_of(1))
        with pytest.raises(WeightsError, match=r"is a link, or others link to it.*cp -rL"):
            follow(store, local)
    else:
        delta = tmp_path / "delta"
        delta.write_bytes(diff(state_of(0), state_of(1)))
        ended = cli_runner.run("patch", local, delta)
        assert ended.code == 1
        assert "is a link, or others link to it" in " ".join(ended.err.split())
        ended = cli_runner.run("patch", local, delta, "-o", tmp_path / "new.safetensors")
        assert ended.code == 0, ended.err  # it was refused, too
        assert_same(safetensors.torch.load_file(tmp_path / "new.safetensors"), state_of(1))
    assert blob.read_bytes() == kept


@pytest.mark.parametrize("name", ["model.safetensors", "."])
def test_nothing_is_written_through_a_link_to_nothing(tmp_path: Path, name: str) -> None:
    """The file was made in the other folder."""
    blob, local, store = tmp_path / "blob", tmp_path / "local", tmp_path / "store"
    link_to(blob, local, "symbolic")
    Publisher(store).publish(state_of(1))
    with pytest.raises(WeightsError, match=r"is a link, or others link to it.*cp -rL"):
        follow(store, local / name)
    assert not blob.exists()


@pytest.mark.parametrize("where", ["in its file", "in a file of its own"])
@pytest.mark.parametrize("base", [False, True])
def test_tensors_of_no_version_are_named_and_stay(tmp_path: Path, where: str, base: bool) -> None:
    """They were removed without a word, and the files with them."""
    local, store = tmp_path / "local", tmp_path / "store"
    save_folder(local, 0)
    more = {f"more{n}": torch.ones(2) for n in range(5)}
    if where == "in its file":
        first = {"weight": state_of(0)["weight"]}
        safetensors.torch.save_file(first | more, local / "model-0.safetensors")
    else:
        safetensors.torch.save_file(more, local / "adapter.safetensors")
    kept = contents(local)
    publisher = Publisher(store, base=state_of(0) if base else None)
    publisher.publish(state_of(1))
    said = r"which would be lost: 'more0', 'more1', 'more2' and 2 more\. Nothing was changed"
    for _ in range(2):
        with pytest.raises(WeightsError, match=said):
            follow(store, local)
        assert contents(local) == kept
    publisher.publish(state_of(1) | more)
    follow(store, local)
    found = [safetensors.torch.load_file(file) for file in local.glob("*.safetensors")]
    assert_same({name: one for file in found for name, one in file.items()}, state_of(1) | more)


@pytest.mark.parametrize("kind", ["values", "a new tensor"])
def test_a_file_that_was_put_beside_the_versions_is_named(tmp_path: Path, kind: str) -> None:
    local, store = tmp_path / "local", tmp_path / "store"
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    follow(store, local)
    mine = local / "adapter.safetensors"
    safetensors.torch.save_file({"lora": torch.ones(3)}, mine)
    kept = contents(local)
    state: State = state_of(2) | ({"x": torch.ones(1)} if kind == "a new tensor" else {})
    publisher.publish(state)
    with pytest.raises(WeightsError, match=r"would be lost: 'lora'\. Nothing was changed"):
        follow(store, local)
    assert contents(local) == kept
    mine.unlink()
    follow(store, local)
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state)


def test_tensors_that_vanish_from_a_version_vanish(tmp_path: Path) -> None:
    """Those of an earlier version, in whatever files, also after a restart."""
    local, store = tmp_path / "local", tmp_path / "store"
    save_folder(local, 0)
    publisher = Publisher(store, base=state_of(0))
    publisher.publish(state_of(1))
    follow(store, local)
    assert len(list(local.glob("*.safetensors"))) == 3
    publisher.publish({"weight": state_of(2)["weight"]})
    follow(store, local)
    assert [path.name for path in local.glob("*.safetensors")] == ["model.safetensors"]
    publisher.publish(state_of(3), anchor=True)
    follow(store, local)
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(3))


def load(folder: Path) -> State:
    files = map(safetensors.torch.load_file, folder.glob("*.safetensors"))
    return {name: values for file in files for name, values in file.items()}


@pytest.mark.parametrize("base", [False, True])
def test_a_tensor_that_appears_tied_appears(tmp_path: Path, base: bool) -> None:
    """It was in none of the files, unless they were made anew."""
    store, local = tmp_path / "store", tmp_path / "local"
    if base:
        save_folder(local, 0)
    publisher = Publisher(store, base=state_of(0) if base else None)
    state: State = state_of(1)
    publisher.publish(state)
    follow(store, local)
    state["head"] = state["weight"]
    publisher.publish(state)
    follow(store, local)
    assert_same(load(local), state)


def test_a_tied_tensor_that_the_base_lacks_need_not_appear(tmp_path: Path) -> None:
    """Programs save one name of tied tensors."""
    local, store = tmp_path / "local", tmp_path / "store"
    save_folder(local, 0)
    publisher = Publisher(store, base=state_of(0))
    for time in (1, 2, 3):
        state: State = state_of(time)
        publisher.publish(state | {"head": state["weight"]})
        follow(store, local)
        assert_same(load(local), state)
        assert len(list(local.glob("*.safetensors"))) == 3
    for head in (state["weight"].clone(), state["weight"]):
        publisher.publish(state | {"head": head})
        follow(store, local)
        assert_same(load(local), state | {"head": head})


def test_versions_without_tensors_have_a_file_without_tensors(tmp_path: Path) -> None:
    """There was an error of JSON."""
    local, store = tmp_path / "local", tmp_path / "store"
    publisher = Publisher(store)
    for state in ({}, {"x": torch.ones(3)}, {}, {"x": torch.ones(0, 3)}, {}):
        publisher.publish(state)
        follow(store, local)
        assert_same(safetensors.torch.load_file(local / "model.safetensors"), state)
        assert Subscriber(store, local=local).fetch() is None


@pytest.mark.parametrize("what", [b"", b"{}", b'{"version": 1}', b'{"version": 1, "files": 3}'])
def test_a_marker_that_says_too_little_is_not_believed(tmp_path: Path, what: bytes) -> None:
    local, store = tmp_path / "local", tmp_path / "store"
    Publisher(store).publish(state_of(1))
    follow(store, local)
    assert json.loads((local / ".gradwire.json").read_text()) == {
        "version": 1,
        "files": ["model.safetensors"],
    }
    (local / ".gradwire.json").write_bytes(what)
    subscriber = Subscriber(store, local=local)
    assert subscriber.version is None
    fetched = subscriber.fetch()
    assert fetched is not None
    assert fetched.is_full


def test_a_file_that_comes_between_fetch_and_apply_stays(tmp_path: Path) -> None:
    """It was taken for one of the version's, and removed."""
    local, store = tmp_path / "local", tmp_path / "store"
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    follow(store, local)
    publisher.publish(state_of(2))
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    mine = local / "adapter.safetensors"
    safetensors.torch.save_file({"lora": torch.ones(3)}, mine)
    kept = mine.read_bytes()
    for step in (subscriber.apply_, subscriber.apply_, Subscriber(store, local=local).fetch):
        with pytest.raises(WeightsError, match="would be lost: 'lora'"):
            step()
        assert mine.read_bytes() == kept
        assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(1))
    mine.unlink()
    assert subscriber.apply_().version == 2
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(2))
    publisher.publish(state_of(3))
    follow(store, local)
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(3))


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("what", ["removed", "changed"])
def test_files_that_change_between_fetch_and_apply_are_no_base(
    tmp_path: Path, what: str, with_model: bool
) -> None:
    """They lacked the tensors that stay, or had other values of them, as the new version."""
    store, local = tmp_path / "store", tmp_path / "local"
    target: State | None = {} if with_model else None
    states: list[State] = [state_of(1), state_of(1) | {"bias": torch.ones(8)}]
    publisher, subscriber = Publisher(store, anchor_every=2), Subscriber(store, local=local)
    for state in states:
        publisher.publish(state)
        subscriber.fetch()
        if state is states[0]:
            subscriber.apply_(target)
    if what == "removed":
        shutil.rmtree(local)
    else:
        others = states[0] | {"weight": states[0]["weight"] + 1}
        safetensors.torch.save_file(others, local / "model.safetensors")
    with pytest.raises(StaleBaseError, match="Nothing was changed; somebody has changed the"):
        subscriber.apply_(target)
    if target is not None:
        assert_same(target, states[0])
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), states[1])
    if target is not None:
        assert_same(target, states[1])


@pytest.mark.parametrize("change", ["values", "a new tensor"])
def test_the_metadata_of_the_files_stay(tmp_path: Path, change: str) -> None:
    local, store = tmp_path / "local.safetensors", tmp_path / "store"
    metadata = {"format": "pt", "by": "me"}
    safetensors.torch.save_file(state_of(0), local, metadata)
    state: State = state_of(1) | ({"x": torch.ones(1)} if change == "a new tensor" else {})
    Publisher(store, base=state_of(0)).publish(state)
    follow(store, local)
    assert_same(safetensors.torch.load_file(local), state)
    with safetensors.safe_open(local, "pt") as opened:
        assert opened.metadata() == metadata


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model"])
def test_files_of_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    """A folder of this name was made."""
    file = tmp_path / name
    said = f"{name}: a checkpoint is a .safetensors file, or a folder of such files"
    if name == "model":
        torch.save(state_of(1), file)
    with pytest.raises(WeightsError, match=said):
        Subscriber(tmp_path / "store", local=file)
    with pytest.raises(WeightsError, match=said):
        Publisher(tmp_path / "store", base=file).publish(state_of(1))


@pytest.mark.parametrize("first", [False, True])
def test_a_folder_that_became_a_store_is_refused(tmp_path: Path, first: bool) -> None:
    """Whether the receiver began before the first version or between fetch and apply_."""
    store, local = tmp_path / "store", tmp_path / "local"
    subscriber = Subscriber(local if first else store, local=local)
    Publisher(store).publish(state_of(1))
    if not first:
        subscriber.fetch()
    Publisher(local).publish(state_of(1))
    kept = contents(local)
    with pytest.raises(WeightsError, match=f"{local} is a store, whose files are no checkpoint"):
        subscriber.fetch() if first else subscriber.apply_()
    assert contents(local) == kept
