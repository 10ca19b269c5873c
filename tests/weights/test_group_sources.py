"""GroupFolder with several ranks that publish, and with receivers that go and come again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import safetensors.torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cluster import PRELOADED, Cluster, Died
from gradwire.torch import GroupFolder, group_folder, host_store
from gradwire.torch.errors import CommunicationError, PeerLostError, RankLostWarning
from gradwire.torch.weight_keeper import Admission, Keeper, Link, join_keeper
from gradwire.weights import Publisher, Subscriber, WeightsError, prune
from gradwire.weights.folder import MemoryFolder
from states import assert_same, state_of

State = dict[str, Any]
NAMES = (["weight"], ["bias", "step"])  # which rank 0 and rank 1 publish


@pytest.fixture
def ranks() -> Iterator[Cluster]:
    cluster = Cluster(3, fragile=True)
    yield cluster
    cluster.close()


def shards_of(rank: int, version: int) -> State:
    return {name: state_of(version)[name] for name in NAMES[rank]}


def publish_shards(pieces: int, keeper: int, anchor_every: int = 2) -> list[bytes]:
    """Ranks 0 and 1 publish, one of them keeps the versions, and rank 2 receives each. Returns the
    parts, as this rank sees them."""
    source = [keeper, 1 - keeper]
    with (
        mock.patch.object(group_folder, "PIECE_BYTES", pieces),
        GroupFolder(source=source) as store,
    ):
        rank, target = dist.get_rank(), State()
        publisher = Publisher(
            store, rank=min(rank, 1), ranks=2, run="one", anchor_every=anchor_every, patience=20.0
        )
        subscriber = Subscriber(store)
        for version in range(1, 4):
            if rank < 2:
                assert publisher.publish(shards_of(rank, version)).version == version
            dist.barrier()
            if rank == 2:
                fetched = subscriber.fetch()
                assert fetched is not None
                assert (fetched.version, fetched.is_full) == (version, version == 1)
                subscriber.apply_(target)
                assert_same(target, state_of(version))
                with pytest.raises(WeightsError, match=f"rank 2 cannot publish.* rank {keeper}"):
                    store.write("v000009.json", [b""])
            dist.barrier()
        return sorted(store.read(name) for name in store.names() if name[-1] == "s")


@pytest.mark.parametrize("keeper", [0, 1])
@pytest.mark.parametrize("pieces", [100, 1 << 26])
def test_several_ranks_publish_without_files(
    ranks: Cluster, tmp_path: Path, pieces: int, keeper: int
) -> None:
    """The parts are those of a store of files, and each version is whole for all."""
    found, *others = ranks.run(3, publish_shards, pieces, keeper)
    assert others == [found, found]
    assert len(found) == 2 * 4  # three deltas and an anchor, of two ranks


def publish_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with GroupFolder(source=[0, 1]) as store:
        rank, target = dist.get_rank(), State()
        publisher = Publisher(store, rank=rank, ranks=2, run="one", patience=20.0)
        subscriber = Subscriber(store)
        for version in range(1, 4):
            state = state_of(version)
            sharded = {
                name: distribute_tensor(state[name], mesh, [Shard(0)])
                for name in ("weight", "bias")
            }
            publisher.publish(sharded)
            subscriber.fetch()
            subscriber.apply_(target)
            assert_same(target, {name: state[name] for name in sharded})


def test_shards_of_dtensors_without_files(ranks: Cluster) -> None:
    ranks.run(2, publish_dtensors)


class FullFolder(MemoryFolder):
    """Has room for two files."""

    def write(self, name: str, pieces: Any, only_new: bool = False) -> None:
        if len(self.files) >= 2:
            raise OSError(28, "No space left on device")
        super().write(name, pieces, only_new)


def write_badly() -> None:
    with GroupFolder(source=[0, 1], store=FullFolder()) as store:
        if dist.get_rank() == 1:
            store.write("a", [b"1"], only_new=True)
            with pytest.raises(FileExistsError, match="rank 0: a"):
                store.write("a", [b"2"], only_new=True)
            store.write("b", [b"", b"3", memoryview(b"45")])
            with pytest.raises(OSError, match=r"rank 0: .*No space left"):
                store.write("c", [b"6"])
            assert (store.read("a"), store.read("b"), store.names()) == (b"1", b"345", ["a", "b"])


def test_errors_of_the_rank_that_keeps_the_versions_come_back(ranks: Cluster) -> None:
    ranks.run(2, write_badly)


def lose(victim: int) -> str:
    """Returns of the last publications which ranks they tell to be lost."""
    store = GroupFolder(source=[0, 1], timeout=20.0)
    rank, target = dist.get_rank(), State()
    publisher = Publisher(store, rank=min(rank, 1), ranks=2, run="one", patience=60.0)
    subscriber = Subscriber(store)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in range(1, 6):
            if rank == victim and version == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank < 2:
                time.sleep(0.3)
                try:
                    publisher.publish(shards_of(rank, version))
                except PeerLostError as error:
                    return str(error)  # and the process ends
            elif victim == 2:
                subscriber.fetch()
                subscriber.apply_(target)
    store.close()
    return "".join(str(one.message) for one in caught if one.category is RankLostWarning)


def test_a_killed_receiver_stops_nobody_where_several_publish(ranks: Cluster) -> None:
    """An error on one publisher would let the others wait for it."""
    ranks.start(3, lose, 2)
    answers = ranks.collect(range(3), seconds=60.0)
    assert isinstance(answers[2], Died)
    assert "rank 2 is gone" in answers[0]
    assert answers[1] == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_publisher_is_named_at_once(ranks: Cluster, victim: int) -> None:
    ranks.start(2, lose, victim)
    answers = ranks.collect(range(2), seconds=60.0)
    assert isinstance(answers[victim], Died)
    assert f"rank {victim} is gone" in answers[1 - victim]


# Receivers that join -------------------------------------------------------------------------


def follow(port: int, here: Connection, local: str | None) -> None:
    """A receiver, as a process. Told a version, it follows to it; told to leave, it does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        folder = GroupFolder.join(TCPStore("127.0.0.1", port, is_master=False), timeout=30.0)
        subscriber, target = Subscriber(folder, local=local), State()
        here.send("here")
        while (version := here.recv()) is not None:
            was_full = False
            while subscriber.version != version:
                fetched = subscriber.fetch()
                was_full = was_full or (fetched is not None and fetched.is_full)
                subscriber.apply_(target if local is None else None)
            found = (
                target
                if local is None
                else safetensors.torch.load_file(f"{local}/model.safetensors")
            )
            assert_same(found, state_of(version))
            here.send(was_full)
        folder.close()
        here.send("left")
    except BaseException as error:
        here.send(f"{type(error).__name__}: {error}")
        raise


class Receiver:
    def __init__(self, port: int, local: Path | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.there, here = context.Pipe()
        arguments = (port, here, None if local is None else str(local))
        self.process = context.Process(target=follow, args=arguments, daemon=True)
        self.process.start()
        here.close()
        assert self.answer() == "here"

    def answer(self) -> Any:
        assert self.there.poll(60.0)
        return self.there.recv()

    def reach(self, version: int | None) -> Any:
        """Whether it took a full version."""
        self.there.send(version)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def serve(port: int, there: Any, path: str | None, first: int) -> list[str]:
    """The ranks that publish: each time the test says so, the next version."""
    meet = TCPStore("127.0.0.1", port, is_master=False)
    rank, said = dist.get_rank(), list[str]()
    store = GroupFolder(source=[0, 1], meet=meet if rank == 0 else None, store=path, timeout=30.0)
    publisher = Publisher(store, rank=rank, ranks=2, run=f"from {first}", anchor_every=4)
    version = first
    while (wanted := int(Path(there).read_text() or 0)) >= 0:
        if version > wanted:
            time.sleep(0.05)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert publisher.publish(shards_of(rank, version)).version == version
            said += [str(one.message) for one in caught if one.category is RankLostWarning]
        if rank == 0:
            prune(store, keep=2)
        version += 1
    store.close()
    return said


@pytest.fixture
def port() -> Iterator[int]:
    store = host_store("127.0.0.1", 0)
    yield store.port
    del store


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_a_receiver_comes_again(ranks: Cluster, tmp_path: Path, port: int, how: str) -> None:
    """It catches up with a delta, and with a full version where the deltas are gone."""
    newest, local = tmp_path / "newest", tmp_path / "local"
    newest.write_text("1")
    ranks.start(2, serve, port, str(newest), None, 1)
    stays, comes = Receiver(port), Receiver(port, local)
    assert (stays.reach(1), comes.reach(1)) == (True, True)
    gone = 0
    for version, is_full in ((2, False), (4, False), (14, True)):
        if how == "leaves":
            assert comes.reach(None) == "left"
        else:
            comes.kill()
            gone += 1
        newest.write_text(str(version))
        stays.reach(version)
        comes = Receiver(port, local)
        assert comes.reach(version) is is_full
    newest.write_text("-1")
    for receiver in (stays, comes):
        assert receiver.reach(None) == "left"
    said, others = (answer for _, answer in sorted(ranks.collect(range(2), 60.0).items()))
    assert len(said) == gone, said
    assert all("which has joined, is gone" in text for text in said)
    assert others == []


def test_publishers_come_again(ranks: Cluster, tmp_path: Path, port: int) -> None:
    """With the versions in a folder, the receiver that comes again goes on with deltas."""
    newest, local = tmp_path / "newest", tmp_path / "local"
    for first, last in ((1, 2), (3, 4)):
        newest.write_text(str(last))
        ranks.start(2, serve, port, str(newest), str(tmp_path / "kept"), first)
        receiver = Receiver(port, local)
        assert receiver.reach(last) is (first == 1)
        newest.write_text("-1")
        assert receiver.reach(None) == "left"
        assert list(ranks.collect(range(2), 60.0).values()) == [[], []]
    with pytest.raises(CommunicationError):
        GroupFolder.join(TCPStore("127.0.0.1", port, is_master=False), timeout=1.0)


def test_a_store_that_once_does_not_answer_lets_receivers_in_later(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    take_up, asked, served = Admission._take_up, list[int](), threading.Event()

    def answer_late(admission: Admission, number: int) -> bool:
        asked.append(number)
        if len(asked) == 1:
            raise RuntimeError("wait timeout after 5000ms")
        return take_up(admission, number)

    monkeypatch.setattr(Admission, "_take_up", answer_late)
    keeper: Any = SimpleNamespace(serve=lambda link: served.set())
    admission = Admission(keeper, TCPStore("127.0.0.1", port, is_master=False))
    wire = join_keeper(TCPStore("127.0.0.1", port, is_master=False), 30.0)
    assert served.wait(30.0)
    wire.abort()
    admission.end()


class SlowWire:
    """A connection whose reader ends late.

    other: `listen` waits until this is set, or for half a second.
    """

    def __init__(self, seconds: float, other: threading.Event | None = None) -> None:
        self.seconds, self.other, self.calls = seconds, other, list[str]()
        self.is_served, self.has_ended = threading.Event(), threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)

    def read(self) -> None:
        self.has_ended.wait(30.0)
        time.sleep(self.seconds)

    def listen(self, *_: Any) -> list[threading.Thread]:
        self.reader.start()
        self.is_served.set()
        if self.other is not None:
            self.other.wait(0.5)
        return [self.reader]

    def abort(self) -> None:
        self.calls.append("abort")
        self.has_ended.set()

    def drop(self) -> None:
        self.calls.append("drop")


def test_the_keeper_ends_the_readers_of_receivers_that_came_at_once() -> None:
    """It forgot one, which stayed in PyTorch's C++ when the interpreter ended."""
    keeper, second = Keeper(MemoryFolder()), threading.Event()
    wires = [SlowWire(0.0, second), SlowWire(0.5), SlowWire(0.0)]
    links = [Link(cast(Any, wire), 1, None, "a receiver") for wire in wires]
    thread = threading.Thread(target=keeper.serve, args=(links[0],))
    thread.start()
    assert wires[0].is_served.wait(30.0)
    keeper.serve(links[1])
    second.set()
    thread.join(30.0)
    keeper.end()
    assert [wire.reader.is_alive() for wire in wires] == [False] * 3
    keeper.serve(links[2])  # it connected while the keeper ended
    assert wires[2].calls == ["abort", "drop"]
    assert not wires[2].is_served.is_set()
