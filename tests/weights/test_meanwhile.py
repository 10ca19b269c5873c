"""A store that others prune, or a publisher or a model that others use, meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest
import torch

from gradwire import _core
from gradwire.weights import (
    Publisher,
    StaleBaseError,
    Subscriber,
    WeightsError,
    diff,
    fold,
    patch,
    prune,
)
from gradwire.weights.folder import MemoryFolder
from gradwire.weights.tensors import Bytes
from states import assert_same, state_of

State = dict[str, Any]


class WatchedFolder(MemoryFolder):
    """written, reading: called with the name of each file after and before that."""

    written: Callable[[str], object] = staticmethod(lambda name: None)
    reading: Callable[[str], object] = staticmethod(lambda name: None)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        self.reading(name)
        return super().read(name, begin, end)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        super().write(name, pieces, only_new)
        self.written(name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_anchor_under_way_is_not_pruned(ranks: int) -> None:
    """The publisher waited for its part."""
    store = WatchedFolder()
    publishers = [
        Publisher(store, rank=rank, ranks=ranks, run="one", anchor_every=2, patience=2)
        for rank in range(ranks)
    ]
    removed: list[str] = []

    def tidy(name: str) -> None:
        if name == "v000004.json":
            removed.extend(prune(store, 1))

    store.written = tidy
    with ThreadPoolExecutor(ranks) as pool:
        for time in range(1, 5):
            state = list(state_of(time).items())
            shares = [dict(state[rank::ranks]) for rank in range(ranks)]
            done = pool.map(lambda one, share: one.publish(share), publishers, shares)
            assert [one.version for one in done] == [time] * ranks
    assert "v000001.json" in removed
    target: State = {}
    subscriber = Subscriber(store, patience=0)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state_of(4))


def test_a_folded_delta_under_way_is_not_pruned() -> None:
    """Its part was removed before its manifest came. Receivers waited for it, and no fold made it
    anew."""
    store = publish_until(6)
    state, removed = state_of(3), list[str]()

    def tidy(name: str) -> None:
        if name.startswith("v000006.from.") and name.endswith(".safetensors"):
            removed.extend(prune(store, 4))

    store.written = tidy
    fold(store, 3, 6)
    assert "v000001.json" in removed
    folded = {name for name in store.files if name.startswith("v000006.from.")}
    assert len(folded) == 2
    read: set[str] = set()
    store.reading = read.add
    subscriber = Subscriber(store, version=3)
    subscriber.fetch()
    assert folded <= read
    subscriber.apply_(state)
    assert_same(state, state_of(6))


@pytest.mark.parametrize(
    ("name", "keep", "stays"),
    [
        ("v000004.anchor.json.0123abcd", 4, True),
        ("v000003.anchor.json.0123abcd", 4, False),
        ("v000004.from.v000002.json.0123abcd", 2, True),
        ("v000004.from.v000002.0123.0of1.safetensors.0123abcd", 2, True),
        ("v000002.from.v000000.json.0123abcd", 1, False),
        ("v000004.json.0123abcd", 4, False),
        ("v000005.json.0123abcd", 4, True),
    ],
)
def test_a_file_that_is_being_written_is_not_pruned(
    tmp_path: Path, name: str, keep: int, stays: bool
) -> None:
    """What an anchor's manifest is called until it is whole was taken for a killed writer's."""
    publisher = Publisher(tmp_path, anchor_every=3)
    for time in range(1, 5):
        publisher.publish(state_of(time))
    (tmp_path / f".{name}").touch()
    prune(tmp_path, keep)
    assert (tmp_path / f".{name}").exists() == stays


def test_threads_share_a_publisher() -> None:
    store = MemoryFolder()
    publisher = Publisher(store)
    with ThreadPoolExecutor(8) as pool:
        published = list(pool.map(lambda time: publisher.publish(state_of(time)), range(24)))
    assert sorted(one.version for one in published) == list(range(1, 25))
    subscriber, target = Subscriber(store), State()
    for time in range(24):
        subscriber.fetch(published[time].version)
        subscriber.apply_(target)
        assert_same(target, state_of(time))


def test_a_model_that_is_written_meanwhile_is_published_whole() -> None:
    """Values were read more than once: receivers refused the version, and all that follow."""
    store, state, target = MemoryFolder(), {"x": torch.zeros(2**20)}, State()
    publisher, subscriber, done = Publisher(store, anchor_every=0), Subscriber(store), Event()

    def step() -> None:
        while not done.is_set():
            state["x"].add_(1)

    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(step)
        try:
            for version in range(1, 31):
                publisher.publish(state)
                subscriber.fetch()
                assert subscriber.apply_(target).version == version
        finally:
            done.set()
        stepping.result()
    publisher.publish(state)
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state)


@pytest.mark.parametrize("publishes", [True, False])
def test_what_goes_in_full_is_read_once(monkeypatch: pytest.MonkeyPatch, publishes: bool) -> None:
    """Here another thread writes when the digest was made."""
    state, target = {"x": torch.arange(1000)}, State()
    digest_array = _core.digest_array

    def digest_and_step(array: Bytes, *, threads: int = 1) -> int:
        digest = digest_array(array, threads=threads)
        state["x"] += 1
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(_core, "digest_array", digest_and_step)
        if publishes:
            store = MemoryFolder()
            Publisher(store).publish(state)
        else:
            delta = diff({}, state)
    if publishes:
        subscriber = Subscriber(store)
        subscriber.fetch()
        subscriber.apply_(target)
    else:
        patch(target, delta)
    assert torch.all(target["x"] < state["x"])


def test_threads_share_a_subscriber() -> None:
    """Of a version that one applied, others fetched a delta to the next twice, or none."""
    store = MemoryFolder()
    publisher, subscriber, target = Publisher(store), Subscriber(store), State()
    publisher.publish(state_of(0))
    done = Event()

    def fetch() -> None:
        while not done.is_set():
            subscriber.fetch()

    subscriber.fetch()
    with ThreadPoolExecutor(2) as pool:
        fetching = [pool.submit(fetch) for _ in range(2)]
        try:
            for time in range(1, 100):
                publisher.publish(state_of(time))
                version = subscriber.apply_(target).version
                assert version is not None
                assert_same(target, state_of(version - 1))
        finally:
            done.set()
        for one in fetching:
            one.result()
    subscriber.fetch()
    subscriber.apply_(target)
    assert_same(target, state_of(99))


@pytest.mark.parametrize("version", [None, 2])
def test_a_receiver_far_behind_reads_no_more_than_the_last_versions(version: int | None) -> None:
    """It read the manifests of all of them, where an anchor is smaller than the way from there."""
    store = publish_until(60)
    read: list[str] = []
    store.reading = read.append
    Subscriber(store, version=version).fetch()
    assert not [name for name in read if "v000003" < name < "v000050"]


def publish_until(last: int, **options: Any) -> WatchedFolder:
    store = WatchedFolder()
    publisher = Publisher(store, anchor_every=3, **options)
    for time in range(1, last + 1):
        publisher.publish(state_of(time))
    return store


def test_a_version_that_is_pruned_while_it_is_fetched_is_named() -> None:
    store = publish_until(6)

    def tidy(name: str) -> None:
        if name.startswith("v000002.") and name.endswith(".safetensors"):
            prune(store, 1)

    store.reading = tidy
    begin = monotonic()
    subscriber = Subscriber(store)
    with pytest.raises(WeightsError, match="no version 2; the newest is 6, and prune"):
        subscriber.fetch(2)
    assert monotonic() - begin < 5, "it does not wait for what will not come"
    reach(subscriber, 6)


def test_the_newest_version_may_be_pruned_while_it_is_fetched() -> None:
    """A newer one is there then."""
    store = publish_until(5)
    publisher, begun = Publisher(store, anchor_every=3), list[str]()

    def go_on(name: str) -> None:
        if name.startswith("v000005.") and name.endswith(".safetensors") and not begun:
            begun.append(name)
            for time in range(6, 10):
                publisher.publish(state_of(time))
            prune(store, 1)

    subscriber = Subscriber(store, version=4)
    subscriber.fetch(4)  # which reads manifests
    store.reading = go_on
    reach(subscriber, 9)
    assert begun


def test_a_model_is_not_compared_with_a_version_that_was_pruned() -> None:
    """It was taken for that version without a look."""
    store = publish_until(6)
    prune(store, 1)
    subscriber = Subscriber(store, version=2)
    with pytest.raises(StaleBaseError, match="version 2, which is in use, is not in the store"):
        subscriber.apply_(state_of(1))
    reach(subscriber, 6)


def reach(subscriber: Subscriber, time: int) -> None:
    target: State = {}
    assert subscriber.fetch() is not None
    assert subscriber.apply_(target).version == time
    assert_same(target, state_of(time))
