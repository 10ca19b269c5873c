"""What breaks between a publisher and its receivers: nobody ends with a wrong model."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from folders import FaultyFolder
from gradwire.files import OutputFile
from gradwire.weights import (
    DamagedVersionError,
    Publisher,
    StaleBaseError,
    Subscriber,
    WeightsError,
    prune,
)
from gradwire.weights.folder import LocalFolder
from gradwire.weights.target import Target
from states import assert_same, state_of

State = dict[str, Any]
LARGE = 300_000
MOMENTS = 25


def fork(work: Callable[[], None]) -> int:
    """A process that does this and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)


def end_of(child: int) -> int:
    """The signal that ended a process; 0: it ended by itself."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def publish(store: Any, first: int, last: int, **options: Any) -> None:
    publisher = Publisher(store, **options)
    for version in range(first, last + 1):
        assert publisher.publish(state_of(version)).version == version


def reached(store: Any, n: int = 3000) -> int:
    """The version that a new receiver gets, whose values are right."""
    subscriber, target = Subscriber(store, patience=0.2), State()
    if subscriber.fetch() is None:
        return 0
    version = subscriber.apply_(target).version
    assert version is not None
    assert_same(target, state_of(version, n))
    return version


def test_a_publisher_killed_at_any_moment(tmp_path: Path) -> None:
    def work() -> None:
        publisher, version = Publisher(tmp_path, anchor_every=4), start
        while True:
            version += 1
            assert publisher.publish(state_of(version)).version == version

    drawn, start, moved = random.Random(0), 0, 0
    for _ in range(MOMENTS):
        child = fork(work)
        time.sleep(drawn.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == signal.SIGKILL
        version = reached(tmp_path)
        assert version >= start
        moved += version - start
        start = version
    assert moved > 0
    prune(tmp_path, 1)
    manifests = "".join(path.read_text() for path in tmp_path.glob("v*.json"))
    left = [name for name in os.listdir(tmp_path) if not name.endswith(".json")]
    stray = [name for name in left if name not in manifests]
    assert all(int(name.lstrip(".")[1:7]) > start for name in stray)
    assert reached(tmp_path) == start


class DyingFolder(LocalFolder):
    """Its process is killed at its nth write: before it, or when all but the name is there."""

    def __init__(self, path: Path, dies_at: int, is_late: bool) -> None:
        super().__init__(path)
        self._left, self._is_late = dies_at, is_late

    def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
        self._left -= 1
        if self._left == 0 and not self._is_late:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(name, self._die_after(pieces), only_new)

    def _die_after(self, pieces: Any) -> Any:
        yield from pieces
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 11))
def test_a_publisher_killed_between_parts_and_manifest(
    tmp_path: Path, dies_at: int, is_late: bool
) -> None:
    """Versions 1 and 3 are a part, a manifest and the hint, version 2 has an anchor, too. What is
    published after it are other values."""

    def work() -> None:
        publish(DyingFolder(tmp_path, dies_at, is_late), 1, 3, anchor_every=2)

    assert end_of(fork(work)) == signal.SIGKILL
    version = reached(tmp_path)
    assert version == (dies_at > 2) + (dies_at > 6)
    publisher = Publisher(tmp_path, anchor_every=2)
    for one in range(version + 1, version + 4):
        assert publisher.publish(state_of(one + 1)).version == one
        receiver, target = Subscriber(tmp_path), State()
        receiver.fetch()
        receiver.apply_(target)
        assert_same(target, state_of(one + 1))


def test_a_receiver_killed_at_any_moment(tmp_path: Path) -> None:
    store, local = tmp_path / "store", tmp_path / "local"

    def work() -> None:
        subscriber = Subscriber(store, local=local)
        subscriber.fetch()
        subscriber.apply_()

    publisher = Publisher(store, anchor_every=1)
    drawn, ends, longest = random.Random(0), [], 0.05
    for version in range(1, MOMENTS + 1):
        publisher.publish(state_of(version, LARGE))
        child, started = fork(work), time.monotonic()
        if version % 5:
            time.sleep(drawn.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            ends.append(end_of(child))
        else:
            assert end_of(child) == 0
            longest = time.monotonic() - started
        check = Subscriber(store, local=local)
        files = local / "model.safetensors"
        if check.version:
            found = safetensors.torch.load_file(files)
            assert_same(found, state_of(check.version, LARGE))
        if version % 2:
            check.fetch()
            check.apply_()
            assert_same(safetensors.torch.load_file(files), state_of(version, LARGE))
    assert signal.SIGKILL in ends


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


def damage(store: FaultyFolder, name: str, how: str, drawn: random.Random) -> None:
    data = bytearray(store.files[name])
    if how == "flipped":
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    store.files[name] = bytes(data[: drawn.randrange(len(data))] if how == "cut" else data)
    if how == "missing":
        del store.files[name]


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("has_anchor", [False, True])
def test_a_damaged_store(how: str, has_anchor: bool) -> None:
    """Whatever file is damaged, the receiver has the newest version that can be had, or says which
    file it is; and the publisher that starts again makes all right."""
    drawn, right = random.Random(0), 0
    errors: list[str] = []
    whole = FaultyFolder()
    publish(whole, 1, 1)
    behind: State = {}
    subscriber = Subscriber(whole)
    subscriber.fetch()
    subscriber.apply_(behind)
    publish(whole, 2, 3)
    publish(whole, 4, 5, anchor_every=5 * has_anchor)
    names = [name for name in whole.files if not name.startswith(("newest", "v000001"))]
    for name in 5 * names:
        store = FaultyFolder()
        store.files = dict(whole.files)
        damage(store, name, how, drawn)
        receiver = Subscriber(store, version=1, patience=0)
        target = {key: values.clone() for key, values in behind.items()}
        try:
            receiver.fetch()
            version = receiver.apply_(target).version
        except (DamagedVersionError, StaleBaseError) as error:
            errors.append(str(error))
            assert not has_anchor or name == "v000005.json"
            assert_same(target, behind)
            assert name.partition(".")[0] in errors[-1] or "no way leads" in errors[-1]
        else:
            assert version == 5 or (version == 4 and name == "v000005.json")
            assert_same(target, state_of(version))
            right += 1
        if name == "v000005.json":
            continue  # with its manifest a version is gone; who has it finds another chain
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            publisher = Publisher(store, patience=0)
            if how != "missing" or not name.endswith("5.json"):
                assert publisher.publish(state_of(6)).version == 6
                fresh = Subscriber(store, patience=0)
                fresh.fetch()
                fresh.apply_(target := State())
                assert_same(target, state_of(6))
    assert right > 0 or (how != "flipped" and not has_anchor)
    assert errors or has_anchor


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


@pytest.mark.parametrize("lists", [0, 10**6])
def test_a_store_that_shows_files_late(lists: int) -> None:
    store = FaultyFolder(late_reads=2, late_lists=lists)
    publisher, subscriber = Publisher(store), Subscriber(store)
    target, seen = State(), set[int]()
    for version in range(1, 8):
        assert publisher.publish(state_of(version)).version == version
        while subscriber.fetch() is None:
            continue
        found = subscriber.apply_(target).version
        assert found is not None
        assert found >= max(seen, default=0)
        assert_same(target, state_of(found))
        seen.add(found)
    assert max(seen) >= 6


@pytest.mark.parametrize(
    ("full_after", "done"), [(0, 0), (1, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 3)]
)
def test_a_full_disk(full_after: int, done: int) -> None:
    """Version 1 takes three files, version 2 two; version 3, with an anchor, four."""
    store = FaultyFolder(full_after=full_after)
    publisher = Publisher(store, anchor_every=3)
    for version in range(1, done + (full_after != 8)):
        publisher.publish(state_of(version))
    with pytest.raises(OSError, match="No space left"):
        publisher.publish(state_of(done + (full_after != 8)))
    assert reached(store) == done
    store.full_after = 10**9
    for version in range(done + 1, 5):
        # Not what could not be published, but other values.
        assert publisher.publish(state_of(version + 1)).version == version
        target = State()
        receiver = Subscriber(store)
        receiver.fetch()
        receiver.apply_(target)
        assert_same(target, state_of(version + 1))


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
