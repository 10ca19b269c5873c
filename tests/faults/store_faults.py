"""What can go wrong between a publisher and its receivers, and what must come of it.

Each fault is caused many times; a wrong model, or an error that says too little, is an
AssertionError. No receiver may ever end with values that are no version's.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors.torch

from folders import FaultyFolder
from gradwire.weights import (
    ConflictError,
    DamagedVersionError,
    Publisher,
    StaleBaseError,
    Subscriber,
    prune,
)
from states import assert_same, state_of
from store_processes import (
    DyingFolder,
    PhasedReceiver,
    State,
    end_of,
    fork,
    publish,
    reached,
    received,
)

Outcomes = Counter[str]
LARGE = 300_000
_OTHER = 1000  # states of the second publisher begin here


@dataclass(frozen=True)
class StoreFault:
    """words: what happens. right: what must come of it. cause: does it so often, in a folder, and
    counts what came of it. times: of the recorded run."""

    name: str
    words: str
    right: str
    cause: Callable[[Path, int], Outcomes]
    times: int


def kill_publisher(folder: Path, times: int) -> Outcomes:
    def work() -> None:
        publisher, version = Publisher(folder, anchor_every=4), start
        while True:
            version += 1
            assert publisher.publish(state_of(version)).version == version

    drawn, start, seen = random.Random(0), 0, Outcomes()
    while (tried := sum(seen.values())) < times or not start:
        child = fork(work)
        time.sleep(drawn.uniform(0, 0.15 + 0.001 * tried))  # a loaded machine may publish nothing
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == signal.SIGKILL
        version = reached(folder)
        assert version >= start
        seen["it goes on, with new versions" if version > start else "it goes on"] += 1
        start = version
    prune(folder, 1)
    manifests = "".join(path.read_text() for path in folder.glob("v*.json"))
    left = [name for name in os.listdir(folder) if not name.endswith(".json")]
    stray = [name for name in left if name not in manifests]
    # Of versions to come, or the anchor of the last; or of the hint, which has no version, and was
    # not renamed yet.
    of_versions = [name for name in stray if not name.startswith(".newest.json")]
    to_come = [int(name.lstrip(".")[1:7]) + (".anchor" in name) > start for name in of_versions]
    assert all(to_come), (start, of_versions)
    assert reached(folder) == start
    return seen


def kill_publisher_between_files(folder: Path, times: int) -> Outcomes:
    """Versions 1 and 3 are a part, a manifest and the hint, version 2 has an anchor, too: ten
    files. What is published after it are other values."""
    seen = Outcomes()
    for number in range(times):
        dies_at, is_late = number // 2 % 10 + 1, bool(number % 2)
        store = folder / str(number)

        def work(dies_at: int = dies_at, is_late: bool = is_late, store: Path = store) -> None:
            publish(DyingFolder(store, dies_at, is_late), 1, 3, anchor_every=2)

        assert end_of(fork(work)) == signal.SIGKILL
        version = reached(store)
        assert version == (dies_at > 2) + (dies_at > 6)
        publisher = Publisher(store, anchor_every=2)
        for one in range(version + 1, version + 4):
            assert publisher.publish(state_of(one + 1)).version == one
            assert_same(received(store), state_of(one + 1))
        seen["the version before, and it goes on"] += 1
    return seen


def kill_receiver(phase: str, folder: Path, times: int) -> Outcomes:
    store, local = folder / "store", folder / "local"
    publisher, receiver = Publisher(store, anchor_every=1), PhasedReceiver(store, local, phase)
    publisher.publish(state_of(1, LARGE))
    receiver.run_whole()
    publisher.publish(state_of(2, LARGE))
    receiver.run_whole()
    seen, version = Outcomes(), 2
    while sum(seen.values()) < times:
        version += 1
        assert version < 20 * times + 20, "the process always ends too early"
        publisher.publish(state_of(version, LARGE))
        was_in_phase = receiver.kill()
        check = Subscriber(store, local=local)
        if check.version is not None:
            assert check.version in (version - 1, version)
            files = safetensors.torch.load_file(local / "model.safetensors")
            assert_same(files, state_of(check.version, LARGE))
        if was_in_phase:
            names = {None: "knows that it has none", version: "has the new version"}
            seen[names.get(check.version, "has the version before")] += 1
        check.fetch()
        check.apply_()
        files = safetensors.torch.load_file(local / "model.safetensors")
        assert_same(files, state_of(version, LARGE))
    return seen


def damage(store: FaultyFolder, name: str, how: str, drawn: random.Random) -> None:
    data = bytearray(store.files[name])
    if how == "flipped":
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    store.files[name] = bytes(data[: drawn.randrange(len(data))] if how == "cut" else data)
    if how == "missing":
        del store.files[name]


def damage_files(how: str, folder: Path, times: int) -> Outcomes:
    """Whatever file is damaged, the receiver has the newest version that can be had, or says which
    file it is; and the publisher that starts again makes all right. `times`, with and without an
    anchor."""
    seen = Outcomes()
    for has_anchor in (False, True):
        whole = FaultyFolder()
        publish(whole, 1, 1)
        behind = received(whole)
        publish(whole, 2, 3)
        publish(whole, 4, 5, anchor_every=5 * has_anchor)
        names = [name for name in whole.files if not name.startswith(("newest", "v000001"))]
        drawn = random.Random(0)
        for number in range(times):
            name = names[number % len(names)]
            store = FaultyFolder()
            store.files = dict(whole.files)
            damage(store, name, how, drawn)
            for version, state in ((1, behind), (None, State())):
                seen[_receive_damaged(store, name, version, state, has_anchor)] += 1
            if name != "v000005.json":  # with it a version is gone; who has it finds another chain
                _publish_after(store)
    return seen


def _receive_damaged(
    store: FaultyFolder, name: str, version: int | None, behind: State, has_anchor: bool
) -> str:
    receiver = Subscriber(store, version=version, patience=0)
    target = {key: values.clone() for key, values in behind.items()}
    try:
        receiver.fetch()
        version = receiver.apply_(target).version
    except (DamagedVersionError, StaleBaseError) as error:
        assert not has_anchor or name == "v000005.json"
        assert_same(target, behind)
        said = str(error)
        assert name.partition(".")[0] in said or "no way leads" in said
        return "an error, nothing changed"
    assert version == 5 or (version == 4 and name == "v000005.json")
    assert_same(target, state_of(version))
    return "the newest version" if version == 5 else "the version before"


def _publish_after(store: FaultyFolder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the next version is a full one
        assert Publisher(store, patience=0).publish(state_of(6)).version == 6
    fresh, target = Subscriber(store, patience=0), State()
    fresh.fetch()
    fresh.apply_(target)
    assert_same(target, state_of(6))


def join_late(folder: Path, times: int) -> Outcomes:
    """A receiver joins after each version, in a store that is pruned; all follow to the end."""
    publisher, followers = Publisher(folder, anchor_every=3), list[tuple[Subscriber, State]]()
    for version in range(1, times + 1):
        publisher.publish(state_of(version))
        prune(folder, 2)
        followers.append((Subscriber(folder), {}))
        for subscriber, target in followers:
            subscriber.fetch()
            assert subscriber.apply_(target).version == version
    for _, target in followers:
        assert_same(target, state_of(times))
    return Outcomes({"the newest version at once, and follows": len(followers)})


def fill_disk(folder: Path, times: int) -> Outcomes:
    """Version 1 takes three files, version 2 two; version 3, with an anchor, four. The disk is full
    after so many files, and has room again later."""
    cells = [(0, 0), (1, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 3)]
    seen = Outcomes()
    for number in range(times):
        full_after, done = cells[number % len(cells)]
        store = FaultyFolder(full_after=full_after)
        publisher, failed = Publisher(store, anchor_every=3), None
        for version in range(1, 5):
            try:
                publisher.publish(state_of(version))
            except OSError as error:
                failed = error
                break
        assert failed is not None
        assert "No space left" in str(failed)
        assert reached(store) == done
        store.full_after = 10**9
        for version in range(done + 1, 5):  # not what could not be published, but other values
            assert publisher.publish(state_of(version + 1)).version == version
            assert_same(received(store), state_of(version + 1))
        seen["the version before; the publisher gets the OSError and goes on"] += 1
    return seen


def publish_twice(folder: Path, times: int) -> Outcomes:
    """Two processes publish other values to one store, until one of them is refused."""
    seen = Outcomes()
    for number in range(times):
        store = folder / str(number)
        children = [fork(partial(_race, store, first)) for first in (0, _OTHER)]
        for child in children:
            assert end_of(child) == 0
        texts = {path.name: path.read_text() for path in folder.glob(f"{number}-*")}
        assert len(texts) == 1, texts
        ((loser, text),) = texts.items()
        winner = 0 if loser.endswith(str(_OTHER)) else 1
        assert f"process {children[winner]} on" in text
        subscriber, target = Subscriber(store), State()
        subscriber.fetch()
        version = subscriber.apply_(target).version
        assert version is not None
        assert_same(target, state_of((0, _OTHER)[winner] + version))
        seen["one goes on, the other is told its process"] += 1
    return seen


def _race(store: Path, first: int) -> None:
    """Publishes until it or the other is refused, and one version more."""
    mine, theirs = (store.with_name(f"{store.name}-{one}") for one in (first, _OTHER - first))
    publisher, version, is_alone = Publisher(store), 0, False
    while not is_alone:
        is_alone = theirs.exists()
        try:
            version = publisher.publish(state_of(first + version + 1)).version
        except ConflictError as error:
            new = mine.with_suffix(".new")
            new.write_text(str(error))
            new.rename(mine)
            return


def list_late(folder: Path, times: int) -> Outcomes:
    """Lists never show a file, or at once; each file is found at the third look only."""
    seen = Outcomes()
    for late_lists in (0, 10**6):
        store = FaultyFolder(late_reads=2, late_lists=late_lists)
        publisher, subscriber = Publisher(store), Subscriber(store)
        target, last = State(), 0
        for version in range(1, times + 1):
            assert publisher.publish(state_of(version)).version == version
            while subscriber.fetch() is None:
                continue
            found = subscriber.apply_(target).version
            assert found is not None
            assert found >= last
            last = found
            assert_same(target, state_of(found))
            seen["the newest version" if found == version else "the version before"] += 1
        assert last >= times - 1
    return seen


_GOES_ON = "receivers have the version before; started again, the publisher goes on"
_NEVER_WRONG = "the newest version that can be had, or an error that names the file"
STORE_FAULTS = (
    StoreFault("publisher-killed", "at a random moment", _GOES_ON, kill_publisher, 50),
    StoreFault(
        "publisher-killed-between",
        "before and after each file: part, manifest, anchor, hint",
        _GOES_ON,
        kill_publisher_between_files,
        20,
    ),
    StoreFault(
        "receiver-killed-in-fetch",
        "at a random moment of fetch()",
        "the files are those of the version before",
        partial(kill_receiver, "fetch"),
        50,
    ),
    StoreFault(
        "receiver-killed-in-apply",
        "at a random moment of apply_(), which writes files",
        "a whole version, or the next start knows that it is none and takes an anchor",
        partial(kill_receiver, "apply"),
        50,
    ),
    StoreFault("file-cut", "any file, anywhere", _NEVER_WRONG, partial(damage_files, "cut"), 50),
    StoreFault(
        "byte-flipped", "any file, any bit", _NEVER_WRONG, partial(damage_files, "flipped"), 50
    ),
    StoreFault("file-missing", "any file", _NEVER_WRONG, partial(damage_files, "missing"), 50),
    StoreFault(
        "late-joiner",
        "after each of 25 versions, of which two are kept",
        "the newest version at the first fetch",
        join_late,
        25,
    ),
    StoreFault(
        "disk-full",
        "the publisher's, after any file",
        "the version before; an OSError; later versions are right",
        fill_disk,
        8,
    ),
    StoreFault(
        "two-publishers",
        "two processes at once",
        "the versions of one; the other gets a ConflictError with host and process",
        publish_twice,
        20,
    ),
    StoreFault(
        "lists-late",
        "lists show files late or never, and reads find them late",
        "the newest version or the one before",
        list_late,
        20,
    ),
)
