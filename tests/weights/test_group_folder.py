"""Versions that ranks fetch from each other, without files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import array_device
from cluster import Cluster, Died, Failed
from gradwire.torch import GroupFolder, group_folder, loopback
from gradwire.torch.errors import CommunicationError, PeerLostError, PeerSilentError
from gradwire.weights import Publisher, StaleBaseError, Subscriber, WeightsError, prune
from gradwire.weights.folder import LocalFolder, MemoryFolder
from runs import said_by
from states import assert_same, state_of

State = dict[str, Any]


@pytest.fixture
def ranks() -> Iterator[Cluster]:
    cluster = Cluster(3, fragile=True)
    yield cluster
    cluster.close()


def follow(pieces: int, path: str | None) -> dict[str, bytes]:
    """Rank 0 publishes five versions, rank 1 takes each, rank 2 the third and the last. Returns the
    files of the store that are no manifest, as each rank sees them."""
    with mock.patch.object(group_folder, "PIECE_BYTES", pieces), GroupFolder(store=path) as store:
        rank, target = dist.get_rank(), dict[str, Any]()
        publisher, subscriber = Publisher(store, anchor_every=3), Subscriber(store)
        for version in range(1, 6):
            if rank == 0:
                assert publisher.publish(state_of(version)).version == version
            dist.barrier()
            if rank == 1 or (rank == 2 and version in (3, 5)):
                fetched = subscriber.fetch()
                assert fetched is not None
                assert fetched.version == version
                assert fetched.is_full == (version == 1 or (rank, version) == (2, 3))
                subscriber.apply_(target)
                assert_same(target, state_of(version))
                assert subscriber.fetch() is None
            dist.barrier()
        parts = {name: store.read(name) for name in store.names() if name.endswith(".safetensors")}
        if rank == 0:
            return parts
        with pytest.raises(WeightsError, match=rf"rank {rank} cannot publish here, only rank 0"):
            store.write("v000009.json", [b""])
        with pytest.raises(WeightsError, match="only rank 0"):
            prune(store, keep=1)
        return parts


@pytest.mark.parametrize("pieces", [100, 1 << 26])
@pytest.mark.parametrize("keep", ["memory", "folder"])
def test_ranks_follow_without_files(ranks: Cluster, tmp_path: Path, pieces: int, keep: str) -> None:
    path = None if keep == "memory" else str(tmp_path / "kept")
    found, *others = ranks.run(3, follow, pieces, path)
    assert others == [found, found]
    # The same bytes as in a store of files, and each version once: five deltas and an anchor.
    publisher = Publisher(tmp_path / "files", anchor_every=3)
    for version in range(1, 6):
        publisher.publish(state_of(version))
    wanted = [file.read_bytes() for file in (tmp_path / "files").glob("*.safetensors")]
    assert sorted(found.values()) == sorted(wanted)
    assert len(found) == 6
    if path is not None:
        target: State = {}
        subscriber = Subscriber(path)
        subscriber.fetch()
        subscriber.apply_(target)
        assert_same(target, state_of(5))


def test_ranks_of_one_process_follow() -> None:
    assert len({frozenset(files) for files in loopback.run(3, lambda _: follow(100, None))}) == 1


@pytest.mark.parametrize("step", ["flush", "receive", "release"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_receiver_that_is_interrupted_reads_no_answer_of_before(step: str, nth: int) -> None:
    """It took each answer for that of the question before it, as damaged versions."""

    def run(rank: int) -> None:
        store = GroupFolder()
        if rank == 0:
            Publisher(store).publish(state_of(1))
        dist.barrier()
        if rank == 1:
            left, call = [nth], getattr(store._wire, step)

            def interrupt(*given: Any) -> Any:
                found = call(*given)
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
                return found

            subscriber, target = Subscriber(store), dict[str, Any]()
            with mock.patch.object(store._wire, step, interrupt), pytest.raises(KeyboardInterrupt):
                subscriber.fetch()
            for _ in range(2):
                with pytest.raises(WeightsError, match=r"is closed.* or by an interrupt"):
                    subscriber.fetch()
            assert subscriber.apply_(target).version is None
        dist.barrier()
        if rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 is gone"):
                store.close()

    loopback.run(2, run)


def test_an_error_of_the_store_that_keeps_the_versions_reaches_who_asked() -> None:
    """Those of fsspec's packages are of many kinds, and the receiver waited for its answer."""

    class Cloud(MemoryFolder):
        fails = False

        def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
            if self.fails:
                raise RuntimeError("503, try again")
            return super().read(name, begin, end)

    cloud = Cloud()

    def run(rank: int) -> None:
        with GroupFolder(store=cloud) as store:
            if rank == 0:
                Publisher(store).publish(state_of(1))
            dist.barrier()
            if rank == 1:
                subscriber, target = Subscriber(store), dict[str, Any]()
                cloud.fails = True
                with pytest.raises(OSError, match="rank 0: 503, try again"):
                    subscriber.fetch()
                cloud.fails = False
                subscriber.fetch()
                subscriber.apply_(target)
                assert_same(target, state_of(1))

    loopback.run(2, run)


def take_another_base() -> None:
    with GroupFolder() as store:
        rank, target = dist.get_rank(), dict[str, Any]()
        publisher, subscriber = Publisher(store), Subscriber(store)
        for version in range(1, 4):
            if rank == 0:
                publisher.publish(state_of(version), anchor=version == 3)
            dist.barrier()
            if rank == 1:
                if version == 2:
                    target["weight"][0, 0] += 1
                subscriber.fetch()
                if version == 2:
                    with pytest.raises(StaleBaseError, match="'weight'"):
                        subscriber.apply_(target)
                    fetched = subscriber.fetch()
                    assert fetched is not None
                    assert fetched.is_full
                    assert fetched.version == 2
                subscriber.apply_(target)
                assert_same(target, state_of(version))
            dist.barrier()


def test_a_receiver_with_another_base_takes_a_full_version(ranks: Cluster) -> None:
    ranks.run(2, take_another_base)


def fork_and_read() -> None:
    with GroupFolder(timeout=20.0) as store:
        if dist.get_rank() == 0:
            store.write("first", [b"1"])
            store.write("second", [b"2"])
        dist.barrier()
        if dist.get_rank() == 1:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                said = said_by(lambda: store.read("second"))
                store.close()
                os._exit("a child that was forked" not in said)
            assert os.waitpid(child, 0)[1] == 0
            assert store.read("first") == b"1"
        dist.barrier()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_asks_nothing(ranks: Cluster) -> None:
    """Its parent got the answer, or none any more."""
    ranks.run(2, fork_and_read)


def drop_in_a_child() -> None:
    stores = [GroupFolder()]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        stores.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stores[0].close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_child_may_drop_it(ranks: Cluster, world: int) -> None:
    """It waited for the threads of its parent."""
    ranks.run(world, drop_in_a_child)


def repeat(call: Callable[[], Any]) -> None:
    """Until the system says that a process has ended."""
    for _ in range(100):
        call()
        time.sleep(0.1)


def lose_a_receiver(victim: int) -> str:
    store = GroupFolder(timeout=20.0)
    rank, target = dist.get_rank(), dict[str, Any]()
    publisher, subscriber = Publisher(store), Subscriber(store)
    if rank == 0:
        publisher.publish(state_of(1))
    dist.barrier()
    if rank == victim:
        subscriber.fetch()
        os.kill(os.getpid(), signal.SIGKILL)
    message = ""
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            repeat(lambda: publisher.publish(state_of(1)))
        assert caught.value.ranks == (victim,)
        message = str(caught.value)
        assert publisher.publish(state_of(2)).share_changed < 0.05  # a delta: nothing was lost
        publisher.publish(state_of(3))
    else:
        while True:
            fetched = subscriber.fetch()
            subscriber.apply_(target)
            if fetched is not None and target["step"].item() == 3:
                break
            time.sleep(0.1)
        assert_same(target, state_of(3))
    store.close()
    return message


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_receiver_is_named_and_the_others_go_on(ranks: Cluster, victim: int) -> None:
    ranks.start(3, lose_a_receiver, victim)
    answers = ranks.collect(range(3), seconds=60.0)
    assert isinstance(answers.pop(victim), Died)
    assert not [answer for answer in answers.values() if isinstance(answer, Failed)], answers
    assert f"rank {victim} is gone" in answers[0]


def lose_the_publisher() -> None:
    store = GroupFolder(timeout=20.0)
    if dist.get_rank() == 0:
        Publisher(store).publish(state_of(1))
    dist.barrier()
    subscriber, target = Subscriber(store), dict[str, Any]()
    subscriber.fetch()
    subscriber.apply_(target)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"fetching weights: rank 0 is gone"):
        repeat(subscriber.fetch)
    with pytest.raises(PeerLostError, match="rank 0"):
        subscriber.fetch()
    assert subscriber.version == 1
    assert_same(target, state_of(1))
    store.close()


def test_a_killed_publisher_is_named(ranks: Cluster) -> None:
    ranks.start(3, lose_the_publisher)
    answers = ranks.collect(range(3), seconds=60.0)
    assert isinstance(answers[0], Died)
    assert (answers[1], answers[2]) == (None, None), answers


def leave_badly(how: str) -> None:
    store = GroupFolder(timeout=2.0)
    if dist.get_rank() == 0:
        error = PeerSilentError if how == "stay" else PeerLostError
        with pytest.raises(error, match=r"rank 1 (has not closed|is gone)") as caught:
            store.close()
        assert caught.value.ranks == (1,)
        assert "'../secret'" in str(caught.value) or how != "ask"
        store.close()  # it is closed
    elif dist.get_rank() == 2:
        store.close()
    elif how == "raise":
        with pytest.raises(KeyError), store:
            raise KeyError
    elif how == "ask":
        with pytest.raises((PeerLostError, PeerSilentError), match=r"rank 0 is (gone|silent)"):
            store.read("../secret")
    dist.barrier()


@pytest.mark.parametrize("how", ["stay", "raise", "ask"])
def test_a_receiver_that_leaves_badly_is_named(ranks: Cluster, how: str) -> None:
    ranks.run(3, leave_badly, how)


def follow_on_a_device() -> None:
    """Over a group that carries tensors of its device alone."""
    group = array_device.new_group()
    with GroupFolder(group) as store:
        served = {
            name: torch.zeros_like(tensor).to(array_device.DEVICE)
            for name, tensor in state_of(0).items()
        }
        publisher, subscriber = Publisher(store), Subscriber(store)
        for version in range(1, 4):
            if dist.get_rank() == 0:
                state = state_of(version)
                publisher.publish({n: t.to(array_device.DEVICE) for n, t in state.items()})
            dist.barrier()
            if dist.get_rank() == 1:
                subscriber.fetch()
                subscriber.apply_(served)
                assert_same({n: t.cpu() for n, t in served.items()}, state_of(version))
            dist.barrier()


def test_a_group_without_tensors_on_the_cpu(ranks: Cluster) -> None:
    ranks.run(2, follow_on_a_device)


def test_a_source_outside_the_group_is_refused() -> None:
    def make(rank: int) -> None:
        with pytest.raises(WeightsError, match="ranks 0 to 1"):
            GroupFolder(source=2)

    loopback.run(2, make)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (None, "call torch.distributed.init_process_group first"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in the process group"),
    ],
)
def test_a_rank_without_a_group_is_told_so(group: Any, said: str) -> None:
    """It was said that the group has ranks 0 to -2."""
    with pytest.raises(CommunicationError, match=said):
        GroupFolder(group)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_files_of_one_process(tmp_path: Path, kind: str) -> None:
    """What a store asks of a folder."""
    folder = MemoryFolder() if kind == "memory" else LocalFolder(tmp_path)
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    folder.write("a", [b"12", memoryview(b"345")], only_new=True)
    with pytest.raises(FileExistsError):
        folder.write("a", [b"6"], only_new=True)
    assert (folder.read("a"), folder.read("a", 1, 3), folder.names()) == (b"12345", b"23", ["a"])
    folder.write("a", [b"6"])
    assert folder.read("a") == b"6"
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == []
