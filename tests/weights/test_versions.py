"""Publisher and subscriber over stores of all kinds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from folders import FaultyFolder
from gradwire import GradwireError, _core
from gradwire.weights import (
    ConflictError,
    DamagedVersionError,
    Folder,
    Publisher,
    Shard,
    StaleBaseError,
    Subscriber,
    WeightsError,
    fold,
    prune,
)
from gradwire.weights.folder import open_folder
from states import assert_same, state_of

State = dict[str, Any]
Place = str | Path | Folder


@pytest.fixture(params=["folder", "fsspec", "own"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return tmp_path / "store"
    return f"memory://{uuid.uuid4().hex}/policy" if request.param == "fsspec" else FaultyFolder()


def publish(store: Place, first: int, last: int, **options: Any) -> None:
    publisher = Publisher(store, **options)
    for time in range(first, last + 1):
        assert publisher.publish(state_of(time)).version == time


def assert_reaches(subscriber: Subscriber, target: State, version: int) -> None:
    fetched = subscriber.fetch()
    assert fetched is not None
    assert fetched.version == version
    assert subscriber.apply_(target).version == version == subscriber.version
    assert_same(target, state_of(version))


def test_a_receiver_follows(store: Place) -> None:
    target: State = {}
    publisher = Publisher(store)
    subscriber = Subscriber(store)
    assert subscriber.fetch() is None
    assert subscriber.apply_(target).version is None
    for time in range(1, 6):
        published = publisher.publish(state_of(time))
        assert published.version == time
        assert_reaches(subscriber, target, time)
        assert subscriber.fetch() is None
        assert (published.share_changed == 1) == (time == 1)
    assert published.share_changed == pytest.approx(39 / 3008, rel=0.05)


def test_a_publisher_that_starts_again_goes_on(store: Place) -> None:
    publish(store, 1, 3)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 3)
    publisher = Publisher(store)
    published = publisher.publish(state_of(4))
    assert published.share_changed < 0.05
    fetched = subscriber.fetch()
    assert fetched is not None
    assert not fetched.is_full
    assert_reaches(subscriber, target, 4)


@pytest.mark.parametrize("last", [2, 3, 9])
def test_one_who_is_behind_takes_the_deltas_folded(store: Place, last: int) -> None:
    publish(store, 1, 1)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 1)
    publish(store, 2, last)
    fetched = subscriber.fetch()
    assert fetched is not None
    assert not fetched.is_full
    assert_reaches(subscriber, target, last)


def test_what_is_fetched_but_not_applied_is_folded_too(store: Place) -> None:
    publish(store, 1, 1)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 1)
    for time in range(2, 5):
        publish(store, time, time)
        fetched = subscriber.fetch()
        assert fetched is not None
        assert fetched.version == time
    assert_reaches(subscriber, target, 4)


def test_deltas_are_decoded_before_the_pause(store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 1, 1)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 1)
    publish(store, 2, 2)
    subscriber.fetch()
    monkeypatch.delattr(_core, "apply_delta")
    monkeypatch.delattr(_core, "DecodedDelta")
    subscriber.apply_(target)
    assert_same(target, state_of(2))


def test_deltas_of_files_alone_are_not_decoded_before(
    store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may be larger than memory."""
    publish(store, 1, 1)
    subscriber = Subscriber(store, local=tmp_path / "local")
    subscriber.fetch()
    subscriber.apply_()
    publish(store, 2, 2)
    monkeypatch.delattr(_core, "DecodedDelta")
    subscriber.fetch()
    assert subscriber.apply_().version == 2


def test_an_anchor_is_taken_where_it_is_smaller() -> None:
    """All of a small tensor changes in each version, so ten deltas are larger than the whole."""
    store = FaultyFolder()
    publisher = Publisher(store, anchor_every=10)
    states = [{"x": torch.randn(3000)} for _ in range(12)]
    publisher.publish(states[1])
    target: State = {}
    subscriber = Subscriber(store)
    subscriber.fetch()
    subscriber.apply_(target)
    for time in range(2, 12):
        assert (publisher.publish(states[time]).anchor_bytes > 0) == (time == 10)
    fetched = subscriber.fetch()
    assert fetched is not None
    assert fetched.is_full
    assert store.bytes_read < 4 * 12000 + 30000
    subscriber.apply_(target)
    assert_same(target, states[11])


def test_a_late_joiner_starts_from_the_last_anchor(store: Place) -> None:
    publish(store, 1, 11, anchor_every=5)
    assert_reaches(Subscriber(store), {}, 11)


def test_receivers_with_the_base_need_no_anchor(tmp_path: Path, store: Place) -> None:
    base = tmp_path / "base"
    base.mkdir()
    parts = list(state_of(0).items())
    safetensors.torch.save_file(dict(parts[:1]), base / "a.safetensors")
    safetensors.torch.save_file(dict(parts[1:]), base / "b.safetensors")
    publish(store, 1, 2, base=base)
    target = state_of(0)
    assert_reaches(Subscriber(store, version=0), target, 2)
    with pytest.raises(StaleBaseError, match=r"no way leads from nothing to version 2.*base\)"):
        Subscriber(store).fetch()
    publish(store, 3, 3, base=base)  # goes on from the base
    subscriber = Subscriber(store, local=base)
    assert subscriber.version == 0
    assert_reaches(subscriber, target := state_of(0), 3)
    found = {**safetensors.torch.load_file(base / "a.safetensors")}
    found |= safetensors.torch.load_file(base / "b.safetensors")
    assert_same(found, target)


def test_a_base_in_memory(store: Place) -> None:
    publish(store, 1, 1, base=state_of(0))
    assert_reaches(Subscriber(store, version=0), state_of(0), 1)


def test_local_files_follow_and_are_known_at_the_next_start(tmp_path: Path, store: Place) -> None:
    local = tmp_path / "local"
    publish(store, 1, 1)
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    subscriber.apply_()
    publish(store, 2, 3)
    subscriber = Subscriber(store, local=local)
    assert subscriber.version == 1
    fetched = subscriber.fetch()
    assert fetched is not None
    assert not fetched.is_full
    subscriber.apply_(target := state_of(1))
    assert_same(target, state_of(3))
    assert_same(safetensors.torch.load_file(local / "model.safetensors"), state_of(3))


def test_local_files_that_somebody_has_changed_are_replaced(tmp_path: Path, store: Place) -> None:
    local = tmp_path / "model.safetensors"
    publish(store, 1, 2, anchor_every=1)
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    subscriber.apply_()
    publish(store, 3, 3)
    other = state_of(2)
    other["bias"][0] = 5
    safetensors.torch.save_file(other, local)
    fetched = subscriber.fetch()
    assert fetched is not None
    assert fetched.is_full
    subscriber.apply_()
    assert_same(safetensors.torch.load_file(local), state_of(3))


def test_a_model_that_was_changed_gets_a_full_version(store: Place) -> None:
    publish(store, 1, 2)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 2)
    publish(store, 3, 4)
    target["weight"][3, 3] += 1
    kept = {name: values.clone() for name, values in target.items()}
    subscriber.fetch()
    with pytest.raises(StaleBaseError, match=r"'weight'.*version 2.*version 4.*anchor=True"):
        subscriber.apply_(target)
    assert_same(target, kept)
    assert subscriber.version is None
    assert_reaches(subscriber, target, 4)


@pytest.mark.parametrize("versions", [2, 4, 6])  # in use is 4
def test_a_store_that_was_begun_anew_is_noticed(store: Place, versions: int) -> None:
    publish(store, 1, 4)
    subscriber = Subscriber(store, patience=0.0)
    target: dict[str, Any] = {}
    assert_reaches(subscriber, target, 4)
    folder = open_folder(store)
    for name in folder.names():
        folder.remove(name)
    assert subscriber.fetch() is None
    publisher = Publisher(store)
    for time in range(10, 10 + versions):
        publisher.publish(state_of(time))
    fetched = subscriber.fetch()
    assert fetched is not None
    assert (fetched.version, fetched.is_full) == (versions, True)
    subscriber.apply_(target)
    assert_same(target, state_of(time))
    publisher.publish(state_of(time + 1))
    fetched = subscriber.fetch()
    assert fetched is not None
    assert not fetched.is_full


def test_tensors_appear_vanish_and_change(store: Place) -> None:
    states: list[State] = [
        {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(4)},
        {"a": torch.zeros(3), "b": torch.ones(2, 3), "d": torch.ones(1).bfloat16()},
        {"a": torch.zeros(3).half(), "d": torch.zeros(1).bfloat16(), "c": torch.ones(4)},
    ]
    publisher, one_by_one = Publisher(store), Subscriber(store)
    behind = Subscriber(store)
    target: State = {"first": torch.ones(1)}
    late: State = {"first": torch.ones(1)}
    for time, state in enumerate(states, 1):
        publisher.publish(state)
        one_by_one.fetch()
        one_by_one.apply_(target)
        assert_same(target, state)
        if time == 1:
            behind.fetch()
            behind.apply_(late)
    behind.fetch()
    behind.apply_(late)
    assert_same(late, states[-1])


def test_tied_tensors_stay_tied(tmp_path: Path, store: Place) -> None:
    target: State = {}
    publisher, subscriber = Publisher(store), Subscriber(store, local=tmp_path)
    for time in range(1, 4):
        state = state_of(time)
        state["head"] = state["weight"]
        publisher.publish(state)
        subscriber.fetch()
        subscriber.apply_(target)
        assert_same(target, state)
        assert target["head"] is target["weight"]
        assert_same(safetensors.torch.load_file(tmp_path / "model.safetensors"), state)


def test_published_dtype_and_names(store: Place) -> None:
    """A float32 master is seen as bfloat16: a change below its rounding does not travel."""
    master = {"w": torch.randn(1000), "n": torch.arange(3), "v": torch.randn(4)}
    publisher = Publisher(store, dtype=torch.bfloat16, rename={"w": "weight"})
    publisher.publish(master)
    target: State = {}
    subscriber = Subscriber(store)
    subscriber.fetch()
    subscriber.apply_(target)
    wanted = {"weight": master["w"].bfloat16(), "n": master["n"], "v": master["v"].bfloat16()}
    assert_same(target, wanted)
    exact = torch.randn(1000).bfloat16().float()
    publisher.publish({**master, "w": exact})
    assert publisher.publish({**master, "w": exact * (1 + 1e-6)}).share_changed == 0
    numpy = {"weight": exact.numpy(), "n": np.arange(3), "v": master["v"].numpy()}
    found = Publisher(store, dtype="bfloat16", rename=str).publish(numpy)
    assert found.share_changed == 0


def test_a_name_given_twice_is_refused(store: Place) -> None:
    with pytest.raises(WeightsError, match=r"two tensors have the name 'x'"):
        Publisher(store, rename={"y": "x"}).publish({"x": torch.ones(1), "y": torch.ones(1)})


def test_a_name_that_no_tensor_has_is_refused(store: Place) -> None:
    """A misspelled key of rename= would leave the tensor under its own name."""
    publisher = Publisher(store, rename={"W": "x", "n": "m"})
    with pytest.raises(WeightsError, match=r"rename='W': no tensor .* tensors are n, w, \.\.\."):
        publisher.publish({"w": torch.ones(1), "n": torch.ones(1)})
    assert Subscriber(store).fetch() is None


@pytest.mark.parametrize("wrong", [False, True])
def test_names_of_other_ranks_may_be_renamed(store: Place, wrong: bool) -> None:
    names = {"a": "x", "b": "y"} | ({"c": "z"} if wrong else {})

    def publish_rank(rank: int) -> None:
        one = Publisher(store, rename=names, rank=rank, ranks=2, run="job", patience=2)
        one.publish({"ab"[rank]: torch.full((3,), float(rank))})

    def publish_last() -> None:
        with contextlib.suppress(WeightsError):  # rank 0 commits nothing
            publish_rank(1)

    thread = threading.Thread(target=publish_last)
    thread.start()
    if wrong:
        with pytest.raises(WeightsError, match=r"rename='c': no tensor .* tensors are x, y"):
            publish_rank(0)
    else:
        publish_rank(0)
    thread.join()
    subscriber = Subscriber(store)
    target: State = {}
    assert (subscriber.fetch() is None) == wrong
    if not wrong:
        subscriber.apply_(target)
        assert sorted(target) == ["x", "y"]


def test_a_home_is_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` in Python is expanded as a shell does, not made a folder of this name."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(1000)}
    safetensors.torch.save_file(state, home / "base.safetensors")
    Publisher("~/store", base="~/base.safetensors").publish(state)
    assert list(home.glob("store/*.json"))
    Subscriber(home / "store", local=Path("~/base.safetensors")).fetch()
    assert not (tmp_path / "~").exists()
    with pytest.raises(WeightsError, match=r"~nobody-here/x: no such home is known"):
        Publisher("~nobody-here/x")


def test_fold_and_prune(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish(store, 1, 4)
    target: State = {}
    subscriber = Subscriber(store)
    assert_reaches(subscriber, target, 4)
    publish(store, 5, 12, anchor_every=5)
    size = fold(store, 4, 12)
    (label,) = store.glob("v000012.from.v000004.json")
    with pytest.raises(WeightsError, match=r"v000012.from.v000004 is there already"):
        fold(store, 4, 12)
    for stray in ("v000006.x-1.0of1.safetensors", "v000013.x-1.0of1.safetensors", "mine.txt"):
        (store / stray).touch()
    removed = prune(store, 3)
    assert "v000006.x-1.0of1.safetensors" in removed
    assert (store / "v000013.x-1.0of1.safetensors").exists()  # may be under way
    assert (store / "mine.txt").exists()
    assert not [name for name in removed if name.startswith("v00001")]
    assert min(path.name for path in store.glob("v*")) == "v000010.anchor.json"[:7] + min(
        path.name[7:] for path in store.glob("v000010*")
    )
    assert label.exists()
    assert 0 < size < 2000
    assert_reaches(subscriber, target, 12)  # by the folded delta
    assert_reaches(Subscriber(store), {}, 12)
    with pytest.raises(WeightsError, match=r"keep=0"):
        prune(store, 0)
    with pytest.raises(WeightsError, match=r"version 3 to 4: a fold takes two deltas"):
        fold(store, 3, 4)
    with pytest.raises(WeightsError, match=r"no version 4; the newest is 12"):
        fold(store, 3, 12)
    with pytest.raises(WeightsError, match=r"no version 20; the newest is 12"):
        fold(store, 10, 20)


def test_each_promised_version_is_within_reach_after_prune(tmp_path: Path) -> None:
    publish(tmp_path, 1, 7)
    assert [name for name in prune(tmp_path, 1) if name.endswith(".json")] == []  # one anchor: 1
    publish(tmp_path, 8, 17, anchor_every=8)
    prune(tmp_path, 4)  # 14 to 17, from the anchor 8
    for version in (0, 7):
        with pytest.raises(
            WeightsError, match=f"no version {version}; the newest is 17, and prune"
        ):
            Subscriber(tmp_path).fetch(version)
    with pytest.raises(WeightsError, match="no version 18; the newest is 17, and it did not come"):
        Subscriber(tmp_path, patience=0.0).fetch(18)
    for time in range(8, 18):
        assert (tmp_path / f"v{time:06}.json").exists()
    assert not (tmp_path / "v000007.json").exists()
    assert_reaches(Subscriber(tmp_path), {}, 17)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_publish_shards(store: Place, ranks: int) -> None:
    def shards(state: State, rank: int) -> State:
        rows = state["weight"].tensor_split(ranks)
        at = sum(len(part) for part in rows[:rank])
        own: State = {"weight": Shard(rows[rank], (at, 0), tuple(state["weight"].shape))}
        return own | ({"bias": state["bias"], "step": state["step"]} if rank == 0 else {})

    def run(rank: int, first: int, last: int, run: str) -> None:
        publisher = Publisher(store, rank=rank, ranks=ranks, run=run, anchor_every=3)
        for time in range(first, last + 1):
            versions.append(publisher.publish(shards(state_of(time), rank)).version)

    versions: list[int] = []
    subscriber = Subscriber(store)
    target: State = {"step": torch.tensor(0)}
    for first, last in ((1, 2), (3, 7)):
        threads = [
            threading.Thread(target=run, args=(rank, first, last, f"job {first}"))
            for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(versions) == sorted(list(range(first, last + 1)) * ranks)
        versions.clear()
        assert_reaches(subscriber, target, last)
    assert_reaches(Subscriber(store), {}, 7)


def test_a_rank_without_others_gives_up(store: Place) -> None:
    publisher = Publisher(store, rank=0, ranks=2, run="job", patience=0.1)
    with pytest.raises(WeightsError, match=r"rank 1 of 2 has not written its part in 0.1 s"):
        publisher.publish(state_of(1))
    with pytest.raises(WeightsError, match=r"v000001: rank 0 has not committed it in 0.1 s"):
        Publisher(store, rank=1, ranks=2, run="one", patience=0.1).publish({"x": torch.ones(1)})
    assert Subscriber(store).fetch() is None
    with pytest.raises(WeightsError, match="rank 1 of 2"):  # not with the part of the first attempt
        publisher.publish(state_of(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "ranks": 2, "run": "x"}, "rank 2 of 2 ranks"),
        ({"rank": 0, "ranks": 2}, "2 ranks need run="),
        ({"dtype": "float7"}, "dtype float7 is not supported"),
        ({"dtype": "int8"}, "floats are published as one of"),
    ],
)
def test_options_are_checked(options: State, message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        Publisher(tmp_path, **options)


def test_two_publishers_are_told_of_each_other(store: Place) -> None:
    one, other = Publisher(store), Publisher(store)
    one.publish(state_of(1))
    other.publish(state_of(2))  # it opens the store now, and goes on
    for _ in range(2):
        with pytest.raises(ConflictError, match=r"version 2 was published by process \d+ on "):
            one.publish(state_of(2))
    other.publish(state_of(3))
    assert_reaches(Subscriber(store), {}, 3)


def test_of_two_publishers_at_once_one_wins(tmp_path: Path) -> None:
    """Many start at the same moment; each version is that of one of them."""
    results: list[int | ConflictError] = []

    def run() -> None:
        try:
            results.append(Publisher(tmp_path).publish(state_of(1)).version)
        except ConflictError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = [version for version in results if isinstance(version, int)]
    assert sorted(versions) == list(range(1, len(versions) + 1))
    assert len(list(tmp_path.glob("v0?????.json"))) == len(versions)


def test_sparse_changes_of_the_fetched_version(store: Place) -> None:
    publish(store, 1, 1)
    target: State = {}
    subscriber = Subscriber(store)
    assert list(subscriber.changes(target)) == []
    assert_reaches(subscriber, target, 1)
    publish(store, 2, 3)
    subscriber.fetch()
    patched = {name: values.clone() for name, values in target.items()}
    for name, indices, values in subscriber.changes(target):
        patched[name].view(-1)[indices] = values
    assert_same(patched, state_of(3))
    assert_reaches(subscriber, target, 3)


def test_an_anchor_is_a_checkpoint_for_any_program(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    publisher.publish(state_of(1))
    publisher.publish(state_of(2), anchor=True)
    (file,) = tmp_path.glob("v000002.anchor.*.safetensors")
    assert_same(safetensors.torch.load_file(file), state_of(2))


def test_a_dtensor_is_published_as_it_lies(tmp_path: Path) -> None:
    """Two processes, each with half of the rows."""
    program = Path(__file__).with_name("sharded_publisher.py")
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), tmp_path / "rendezvous", tmp_path])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert_reaches(Subscriber(tmp_path), {}, 3)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(WeightsError, match=r"s3://b/p: fsspec not installed; .*'.\[fsspec\]'"):
        Subscriber("s3://b/p")


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(WeightsError, match=r"a store in nowhere://x: "):
        Publisher("nowhere://x")


def test_both_a_version_and_local_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="without local="):
        Subscriber(tmp_path, local=tmp_path, version=0)


def test_a_number_of_versions_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="anchor_every=-1"):
        Publisher(tmp_path, anchor_every=-1)


@pytest.mark.parametrize("begin", [Publisher, Subscriber])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(tmp_path: Path, begin: Any, value: float) -> None:
    with pytest.raises(WeightsError, match=f"patience={value}"):
        begin(tmp_path, patience=value)


@pytest.mark.parametrize("threads", [0, 1000])
def test_a_number_of_threads_that_cannot_be_is_refused_at_once(store: Place, threads: int) -> None:
    """A receiver was told in the middle of it that its tensors are of no version."""
    for begin in (Publisher, Subscriber):
        with pytest.raises(GradwireError, match=f"^threads must be 1 to 256, got {threads}$"):
            begin(store, threads=threads)


def test_a_store_is_no_checkpoint(tmp_path: Path) -> None:
    Publisher(tmp_path).publish(state_of(1))
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(WeightsError, match="is a store, whose files are no checkpoint"):
        Subscriber(tmp_path, local=tmp_path)
    with pytest.raises(WeightsError, match="is a store"):
        Publisher(tmp_path / "other", base=tmp_path).publish(state_of(1))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_nothing_to_apply_to_is_refused(store: Place) -> None:
    publish(store, 1, 1)
    subscriber = Subscriber(store)
    subscriber.fetch()
    with pytest.raises(WeightsError, match="needs local="):
        subscriber.apply_()


@pytest.mark.parametrize("claims", [False, True])
def test_a_refused_target_takes_nothing_away(store: Place, claims: bool) -> None:
    """The next target gets the version; it stayed as it was, without a word."""
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    subscriber = Subscriber(store, version=1 if claims else None)
    publisher.publish(state_of(2))
    subscriber.fetch()
    for wrong in (None, {"weight": 1.0}):
        with pytest.raises(WeightsError):
            subscriber.apply_(wrong)
    target = state_of(1)
    assert subscriber.apply_(target).version == 2
    assert_same(target, state_of(2))


def test_a_store_in_which_no_version_comes_is_named(
    store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mistyped, and the receiver waited without a word."""
    subscriber, said = Subscriber(store, patience=5.0), list[list[str]]()
    for now in (100.0, 104.0, 106.0, 120.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert subscriber.fetch() is None
        said.append([str(one.message) for one in caught])
    monkeypatch.undo()
    (text,) = said.pop(2)
    assert "has no version yet. If the publisher has made one" in text
    assert said == [[], [], []]
    publish(store, 1, 1)
    assert_reaches(subscriber, {}, 1)


@pytest.mark.parametrize(("damaged", "helps"), [("v000003", True), ("v000002", False)])
def test_only_the_newest_version_can_be_taken_back(
    tmp_path: Path, damaged: str, helps: bool
) -> None:
    """Without another one no way may lead on."""
    publisher = Publisher(tmp_path, anchor_every=0)
    for step in range(3):
        publisher.publish({"a": np.arange(1000.0) + step})
    (tmp_path / f"{damaged}.json").write_text("{")
    with pytest.raises(DamagedVersionError, match=damaged) as caught:
        Subscriber(tmp_path, version=1, patience=0).fetch()
    assert ("Without this file, the version before it is the newest" in str(caught.value)) == helps
