"""Numbers are not believed: a store that is emptied counts from 1 again, and the same number is
another version then. Whoever knows a version by its number compares its digests."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import GroupFolder, loopback
from gradwire.weights import ConflictError, Publisher, StaleBaseError, Subscriber, diff, fold
from gradwire.weights.folder import MemoryFolder
from gradwire.weights.target import Target
from states import assert_same, state_of

State = dict[str, Any]
OTHER = 100  # states of the second chain begin here


def publish(store: Path, times: range, **options: Any) -> None:
    publisher = Publisher(store, **options)
    for time in times:
        publisher.publish(state_of(time))


def begin_anew(store: Path, versions: int, **options: Any) -> State:
    """Empties the store, and publishes so many versions of another chain."""
    shutil.rmtree(store)
    publish(store, range(OTHER + 1, OTHER + versions + 1), **options)
    return state_of(OTHER + versions)


def follow(store: Path, local: Path) -> State:
    subscriber = Subscriber(store, local=local)
    subscriber.fetch()
    subscriber.apply_()
    assert Subscriber(store, local=local).fetch() is None
    return safetensors.torch.load_file(local / "model.safetensors")


def newest_of(store: Path) -> tuple[int | None, State]:
    """The version that a new receiver finds, and its tensors."""
    target: State = {}
    subscriber = Subscriber(store)
    subscriber.fetch()
    return subscriber.apply_(target).version, target


@pytest.mark.parametrize("versions", [2, 3, 4])  # the files have 3
@pytest.mark.parametrize("how", ["emptied", "another store", "other files", "killed fetch"])
def test_local_files_of_another_chain_are_replaced(tmp_path: Path, how: str, versions: int) -> None:
    store, local = tmp_path / "store", tmp_path / "local"
    publish(store, range(1, 4))
    assert_same(follow(store, local), state_of(3))
    wanted = state_of(OTHER + versions)
    if how == "another store":
        store = tmp_path / "other"
        publish(store, range(OTHER + 1, OTHER + versions + 1))
    elif how == "other files":
        wanted = state_of(max(versions, 3))
        publish(store, range(4, versions + 1), anchor_every=1)
        safetensors.torch.save_file(state_of(50), local / "model.safetensors")
    else:
        begin_anew(store, versions)
    if how == "killed fetch":
        Subscriber(store, local=local).fetch()  # and the process ends
    assert_same(follow(store, local), wanted)


@pytest.mark.parametrize("store_is", ["its own", "another"])
def test_the_number_of_a_model_is_compared_with_its_values(tmp_path: Path, store_is: str) -> None:
    publish(tmp_path, range(1, 4))
    target = state_of(3)
    if store_is == "another":
        begin_anew(tmp_path, 3)
    subscriber = Subscriber(tmp_path, version=3)
    fetched = subscriber.fetch()
    assert fetched is not None
    assert (fetched.version, fetched.bytes, fetched.is_full) == (3, 0, False)
    if store_is == "another":
        with pytest.raises(StaleBaseError, match=r"not the one of version 3: its values are other"):
            subscriber.apply_(target)
        assert_same(target, state_of(3))
        subscriber.fetch()
    assert subscriber.apply_(target).version == 3
    assert_same(target, state_of(OTHER + 3 if store_is == "another" else 3))
    assert subscriber.fetch() is None


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_fetch_that_fails_notices_another_chain_again(fails_at: int) -> None:
    """It forgot what it had seen, so the next one found nothing new: the number was the same."""

    class Failing(MemoryFolder):
        left = 0

        def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
            self.left -= 1
            if not self.left:
                raise ConnectionResetError(name)
            return super().read(name, begin, end)

    store, target = Failing(), State()
    subscriber = Subscriber(store)
    publisher = Publisher(store)
    for time in range(1, 4):
        publisher.publish(state_of(time))
    subscriber.fetch()
    subscriber.apply_(target)
    store.files.clear()
    publisher = Publisher(store)
    for time in range(OTHER + 1, OTHER + 4):
        publisher.publish(state_of(time))
    store.left = fails_at
    with suppress(ConnectionResetError):
        subscriber.fetch()
    store.left = 0
    subscriber.fetch()
    assert subscriber.apply_(target).version == 3
    assert_same(target, state_of(OTHER + 3))


def add_anchor(store: Path) -> None:
    Publisher(store).publish(state_of(3), anchor=True)


def add_fold(store: Path) -> None:
    publish(store, range(3, 4))
    fold(store, 1, 3)


@pytest.mark.parametrize("add", [add_anchor, add_fold])
@pytest.mark.parametrize("again", ["plain", "anchor", "fold"])
def test_what_is_left_of_a_removed_version_is_not_taken(
    tmp_path: Path, add: Callable[[Path], None], again: str
) -> None:
    """As after a damaged manifest of the newest version was removed."""
    publish(tmp_path, range(1, 3))
    new, behind = Subscriber(tmp_path), Subscriber(tmp_path)
    one: State = {}
    behind.fetch(1)
    behind.apply_(one)
    add(tmp_path)
    (tmp_path / "v000003.json").unlink()
    assert Publisher(tmp_path).publish(state_of(OTHER), anchor=again == "anchor").version == 3
    if again == "fold":
        fold(tmp_path, 1, 3)
    for subscriber, target in ((new, State()), (behind, one)):
        subscriber.fetch()
        assert subscriber.apply_(target).version == 3
        assert_same(target, state_of(OTHER))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_publisher_whose_store_was_emptied_goes_on_in_full(tmp_path: Path, ranks: int) -> None:
    store, targets = tmp_path / "store", [State(), State()]
    together = threading.Barrier(ranks)
    names = [["weight"], ["bias", "step"]] if ranks == 2 else [["weight", "bias", "step"]]

    def publish_rank(rank: int) -> None:
        publisher = Publisher(store, rank=rank, ranks=ranks, run="one", patience=2.0)
        subscriber = Subscriber(store, patience=1.0)
        for time in range(1, 5):
            state = state_of(time)
            together.wait()
            if time == 3 and rank == 0:
                shutil.rmtree(store)
            together.wait()
            publisher.publish({name: state[name] for name in names[rank]})
            fetched = subscriber.fetch()
            assert fetched is not None
            assert fetched.is_full == (time in (1, 3))
            assert subscriber.apply_(targets[rank]).version == time
            assert_same(targets[rank], state)

    with (
        pytest.warns(RuntimeWarning, match="version 2 no longer") as said,
        ThreadPoolExecutor(ranks) as pool,
    ):
        list(pool.map(publish_rank, range(ranks)))
    assert len(said) == ranks


def test_a_publisher_whose_store_another_took_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publisher = Publisher(store)
    publisher.publish(state_of(1))
    publisher.publish(state_of(2))
    wanted = begin_anew(store, 2)
    with pytest.raises(ConflictError, match="version 2 was published by process"):
        publisher.publish(state_of(3))
    _, target = newest_of(store)
    assert_same(target, wanted)


def test_files_of_an_earlier_run_follow_a_group(tmp_path: Path) -> None:
    """The versions of a GroupFolder end with the job; the next one counts from 1 again."""

    def job(first: int) -> Callable[[int], None]:
        def run(rank: int) -> None:
            with GroupFolder() as store:
                if rank == 0:
                    Publisher(store).publish(state_of(first))
                dist.barrier()
                if rank == 1:
                    subscriber = Subscriber(store, local=tmp_path)
                    subscriber.fetch()
                    subscriber.apply_()

        return run

    for first in (1, OTHER):
        loopback.run(2, job(first))
        found = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert_same(found, state_of(first))


def test_a_model_without_the_version_in_use_is_noticed(tmp_path: Path) -> None:
    """After a restart `local` may be at the newest version, and the model as it was made."""
    store, local = tmp_path / "store", tmp_path / "local"
    trained = nn.Linear(4, 4)
    Publisher(store).publish(trained)
    first = Subscriber(store, local=local)
    first.fetch()
    first.apply_()
    for target in (nn.Linear(4, 4), dict(nn.Linear(4, 4).state_dict())):
        subscriber = Subscriber(store, local=local)
        assert subscriber.fetch() is None
        with pytest.raises(StaleBaseError, match="is not the one of version 1"):
            subscriber.apply_(target)
        subscriber.fetch()
        subscriber.apply_(target)
        assert diff(trained, target) == diff(trained, trained)
        assert subscriber.fetch() is None
        assert subscriber.apply_(target).version == 1
        with pytest.raises(StaleBaseError):
            subscriber.apply_(nn.Linear(4, 4))


def test_a_model_that_has_the_version_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    Publisher(tmp_path).publish(model)
    subscriber = Subscriber(tmp_path)
    subscriber.fetch()
    subscriber.apply_(model)
    monkeypatch.setattr(Target, "check", lambda *_: pytest.fail("it was read"))
    assert subscriber.apply_(model).version == 1


@pytest.mark.parametrize("continued", [False, True])
def test_a_publisher_whose_store_was_begun_anew_is_refused(tmp_path: Path, continued: bool) -> None:
    store = tmp_path / "store"
    if continued:
        publish(store, range(1, 3))
    publisher = Publisher(store, patience=0.1)
    for time in range(3, 6):
        publisher.publish(state_of(time))
    state = begin_anew(store, 1)
    with pytest.raises(ConflictError, match="version 1 was published by process"):
        publisher.publish(state_of(6))
    version, target = newest_of(store)
    assert version == 1
    assert_same(target, state)
