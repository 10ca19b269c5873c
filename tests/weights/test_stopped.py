"""What breaks between a publisher and its receivers: nobody ends with a wrong model.

tests/faults/store_faults.py has the faults that are caused many times.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import pickle  # pickle: to show that it is refused
import random
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from folders import FaultyFolder
from gradwire.files import OutputFile
from gradwire.weights import (
    ConflictError,
    DamagedVersionError,
    Publisher,
    Subscriber,
    WeightsError,
    fold,
)
from gradwire.weights.folder import LocalFolder
from gradwire.weights.target import Target
from states import assert_same, state_of
from store_faults import damage
from store_processes import State, end_of, fork, publish, reached, received


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_receiver_killed_while_it_writes_takes_an_anchor(
    tmp_path: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker says so at the next start; a process that goes on knows it, too."""
    store, local = tmp_path / "store", tmp_path / "local"
    publish(store, 1, 1)
    target: State = {}
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    subscriber.apply_(target)
    publish(store, 2, 2, anchor_every=2)

    def break_off(self: Target, update: Any, _: Any = None) -> None:
        self.find(next(iter(update.entries.values()))).values[...] = 1  # type: ignore[union-attr]
        if not in_memory:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    def work() -> None:
        monkeypatch.setattr(Target, "write", break_off)
        subscriber.apply_()

    subscriber.fetch()
    if in_memory:
        with monkeypatch.context() as patched:
            patched.setattr(Target, "write", break_off)
            with pytest.raises(KeyboardInterrupt):
                subscriber.apply_(target)
    else:
        assert end_of(fork(work)) == signal.SIGKILL
        subscriber, target = Subscriber(store, local=local), {}
    assert subscriber.version is None
    fetched = subscriber.fetch()
    assert fetched is not None
    assert fetched.is_full
    subscriber.apply_(target)
    assert_same(target, state_of(2))
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(2))
    assert Subscriber(store, local=local).version == 2


def test_a_missing_delta_is_named() -> None:
    store = FaultyFolder()
    publish(store, 1, 4)
    (part,) = [name for name in store.files if name.startswith("v000003.") and "-" in name]
    del store.files[part]
    with pytest.raises(DamagedVersionError, match=rf"store/{part} is missing"):
        Subscriber(store, version=1, patience=0).fetch()
    with pytest.warns(RuntimeWarning, match=rf"a full one, as the newest.*{part} is missing"):
        publish(store, 5, 5, patience=0)
    assert reached(store) == 5


def test_a_folded_delta_that_has_lost_its_part_is_made_anew() -> None:
    """It was "there already", and receivers waited for its part at each fetch."""
    store = FaultyFolder()
    publish(store, 1, 5)
    size = fold(store, 1, 5)
    (part,) = [name for name in store.files if ".from." in name and not name.endswith(".json")]
    del store.files[part]
    assert fold(store, 1, 5) == size
    with pytest.raises(WeightsError, match="is there already"):
        fold(store, 1, 5)
    subscriber, target = Subscriber(store, version=1), state_of(1)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state_of(5))


def test_a_full_disk_of_a_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file has no room; the old one stays, and is known to be whole."""
    store, local = tmp_path / "store", tmp_path / "local"
    publisher, subscriber = Publisher(store), Subscriber(store, local=local)
    publisher.publish({"x": torch.ones(1000)})
    subscriber.fetch()
    subscriber.apply_()
    publisher.publish({"x": torch.ones(2000)})
    subscriber.fetch()

    def write(self: OutputFile, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(OutputFile, "write", write)
        with pytest.raises(OSError, match="No space left"):
            subscriber.apply_()
    again = Subscriber(store, local=local)
    assert again.version == 1
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), {"x": torch.ones(1000)})
    again.fetch()
    again.apply_()
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), {"x": torch.ones(2000)})


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_has_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As FAT is, and many that are mounted from afar: no version could be published."""

    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    folder = LocalFolder(tmp_path / "folder")
    folder.write("a", [b"1"], only_new=True)
    with pytest.raises(FileExistsError):
        folder.write("a", [b"2"], only_new=True)
    assert (folder.read("a"), folder.names()) == (b"1", ["a"])
    publish(tmp_path / "store", 1, 3)
    assert reached(tmp_path / "store") == 3


@pytest.mark.parametrize("only_new", [False, True])
def test_a_name_is_on_the_disk_when_its_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_new: bool
) -> None:
    """A manifest had another name there."""
    fsync, flushed = os.fsync, list[str]()

    def flush(handle: int) -> None:
        fsync(handle)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            flushed[:] = os.listdir(handle)

    monkeypatch.setattr(os, "fsync", flush)
    LocalFolder(tmp_path).write("a", [b"1"], only_new)
    assert flushed == ["a"]


def test_an_error_while_it_publishes_leaves_the_chain_whole(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    publisher.publish(state_of(1))
    with pytest.raises(WeightsError, match="'text'"):
        publisher.publish(state_of(2) | {"text": "no tensor"})
    assert publisher.publish(state_of(2)).version == 2
    assert reached(tmp_path) == 2


def test_a_damaged_full_version_is_never_applied() -> None:
    whole, drawn, errors = FaultyFolder(), random.Random(0), 0
    publish(whole, 1, 1)
    (part,) = [name for name in whole.files if name.endswith(".safetensors")]
    for _ in range(50):
        store = FaultyFolder()
        store.files = dict(whole.files)
        damage(store, part, "flipped", drawn)
        try:
            assert reached(store) == 1
        except DamagedVersionError:
            errors += 1
    assert errors > 40


def test_versions_of_two_chains_do_not_mix() -> None:
    store, other = FaultyFolder(), FaultyFolder()
    publish(store, 1, 3)
    publisher = Publisher(other)
    for version in range(2, 5):
        publisher.publish(state_of(version))
    for name in [name for name in store.files if name.startswith("v000003")]:
        del store.files[name]
    store.files |= {name: other.files[name] for name in other.files if name.startswith("v000003")}
    with pytest.raises(DamagedVersionError, match="version 3 does not begin where version 2 ends"):
        Subscriber(store, version=1).fetch()


def test_a_version_that_exists_in_spite_of_an_error_counts() -> None:
    """As when the answer to a put is lost."""

    class Forgetful(FaultyFolder):
        def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
            super().write(name, pieces, only_new)
            if name == "v000002.json":
                raise ConnectionResetError(name)

    store = Forgetful()
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    with pytest.raises(ConnectionResetError):
        publisher.publish(state_of(2))
    published = publisher.publish(state_of(3))
    assert published.version == 3
    assert published.share_changed < 0.05
    assert reached(store) == 3


@pytest.mark.parametrize("then", [ConnectionResetError, FileNotFoundError])
@pytest.mark.parametrize("reads", range(4))
def test_a_version_whose_answer_was_lost_is_not_taken_for_the_next(
    then: type[OSError], reads: int
) -> None:
    """Where reading it fails, too, or it is late: the store had the first values, and publish()
    said that it had the second ones."""

    class Lossy(FaultyFolder):
        left = 0

        def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
            super().write(name, pieces, only_new)
            if name == "v000002.json":
                self.left = reads
                raise ConnectionResetError(name)

        def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
            if name == "v000002.json" and self.left:
                self.left -= 1
                raise then(name)
            return super().read(name, begin, end)

    store, done = Lossy(), list[int]()
    publisher = Publisher(store, patience=0)
    for time in range(1, 9):
        with contextlib.suppress(OSError):
            done.append(publisher.publish(state_of(time)).version)
            assert_same(received(store), state_of(time))
    assert done[0] == 1
    assert done[-3:] == [done[-1] - 2, done[-1] - 1, done[-1]]
    assert publisher.publish(state_of(9)).share_changed < 0.05  # a delta again


@pytest.mark.parametrize(
    ("text", "late_lists"),
    [
        *((text, 0) for text in (b"", b"{}", b'{"version": "x"}', b"[1]", b'{"version": 99}')),
        (b'{"version": 1}', 0),
        (b'{"version": 2}', 10**6),
    ],
)
def test_a_hint_is_only_a_hint(text: bytes, late_lists: int) -> None:
    store = FaultyFolder(late_lists=late_lists)
    publish(store, 1, 3)
    store.files["newest.json"] = text
    assert reached(store) == 3


@pytest.mark.parametrize("text", [b"", b"[]", b'{"version": 1.5}'])
def test_a_damaged_marker_is_no_version(tmp_path: Path, text: bytes) -> None:
    publish(tmp_path / "store", 1, 1)
    subscriber = Subscriber(tmp_path / "store", local=tmp_path / "local")
    subscriber.fetch()
    subscriber.apply_()
    (marker,) = (tmp_path / "local").glob(".*.json")
    marker.write_bytes(text)
    assert Subscriber(tmp_path / "store", local=tmp_path / "local").version is None


@pytest.mark.parametrize("removed", range(4))
def test_a_receiver_killed_between_the_files_of_a_folder_takes_an_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """A tensor appears, so all go into one new file, and the old ones are removed one by one."""
    local, store = tmp_path / "local", tmp_path / "store"
    local.mkdir()
    first = {"x": torch.arange(10.0), "y": torch.ones(3)}
    for name, values in first.items():
        safetensors.torch.save_file({name: values}, local / f"{name}.safetensors")
    places = {name: f"{name}.safetensors" for name in first}
    (local / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    last = first | {"z": torch.ones(2)}
    Publisher(store, base=local).publish(last, anchor=True)
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    rest, unlink = [removed], Path.unlink

    def remove(self: Path, missing_ok: bool = False) -> None:
        if self.parent == local and not self.name.startswith("."):
            if not rest[0]:
                raise KeyboardInterrupt
            rest[0] -= 1
        unlink(self, missing_ok)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Path, "unlink", remove)
        subscriber.apply_()
        assert removed == 3, "all are removed then"
    again = Subscriber(store, local=local)
    assert again.version == (1 if removed == 3 else None)
    again.fetch()
    again.apply_()
    assert again.version == 1
    assert [path.name for path in local.glob("[!.]*")] == ["model.safetensors"]
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), last)


def test_a_child_that_was_forked_does_not_publish_as_its_parent(tmp_path: Path) -> None:
    """It overwrote the part of the parent's version, and both went on as if it were theirs."""
    publisher = Publisher(tmp_path)
    publisher.publish(state_of(1))

    def work() -> None:
        with pytest.raises(WeightsError, match=f"is of process {os.getppid()}; .* forked from it"):
            publisher.publish(state_of(7))
        Publisher(tmp_path).publish(state_of(2))

    assert end_of(fork(work)) == 0
    with pytest.raises(ConflictError):
        publisher.publish(state_of(3))
    assert reached(tmp_path) == 2


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", [Publisher, Subscriber])
def test_neither_side_is_copied(tmp_path: Path, act: Callable[[Any], Any], kind: Any) -> None:
    with pytest.raises(TypeError, match=f"a {kind.__name__} can't be copied or pickled"):
        act(kind(tmp_path))
