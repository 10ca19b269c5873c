"""The job key: a process without it can't join, expel, or get a model."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.distributed_c10d import PrefixStore, Store

from cluster import Cluster, free_port
from gradwire.job_key import FILE_VARIABLE, TAG_BYTES, VARIABLE, JobKey, with_new_key
from gradwire.torch import host_store
from gradwire.torch.errors import JobKeyError
from gradwire.torch.members.generations import Generations, MemberReport
from gradwire.torch.members.heartbeat import Heartbeat, State
from gradwire.torch.members.membership import enter
from gradwire.torch.network.connection import Connection
from gradwire.torch.network.meeting import Meeting, add_gloo
from gradwire.torch.network.sealed_store import (
    TAG,
    Numbers,
    SealedStore,
    StoreAccess,
    proof_of,
    prove,
    read,
)
from gradwire.torch.network.transport import Kind
from gradwire.torch.options import Members
from joining_jobs import Course, wait_asked
from key_jobs import KEY, OTHER_KEY, Keyed, run, train_with_hook
from member_jobs import Fleet, Plan
from member_jobs import host_store as host_until_killed

SECONDS = 20.0
OWN, OTHER = JobKey(KEY.encode()), JobKey(OTHER_KEY.encode())


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def write(store: Any, name: str, content: str | bytes) -> None:
    """As a stranger does."""
    store.set(name, content)


def all_names(store: Store) -> list[str]:
    """As a stranger sees them."""
    names: list[str] = store.list_keys()
    return names


# The key ---------------------------------------------------------------------------------------


def test_where_the_key_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert JobKey.of_environment() is None
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    assert JobKey.of_environment() == OWN
    assert KEY not in repr(OWN)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ValueError, match=r"has 5 characters, .*\(openssl rand"):
        JobKey.of_environment()
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(ValueError, match="both set"):
        JobKey.of_environment()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=r"key .*can't be read: .*No such file"):
        JobKey.of_environment()
    (tmp_path / "key").write_text(KEY)
    assert JobKey.of_environment() == OWN
    first, second = with_new_key(os.environ), with_new_key(os.environ)
    assert first[VARIABLE] != second[VARIABLE]
    assert FILE_VARIABLE not in first


@pytest.fixture
def configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's folder, which is empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_a_user_has_a_key_of_his_own(configuration: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda _: JobKey.of_user(), range(32)))
    assert len({key and key.secret for key in keys}) == 1
    file = configuration / "gradwire" / "job_key"
    assert [path.name for path in file.parent.iterdir()] == ["job_key"]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert keys[0] == JobKey(file.read_bytes())
    assert len(file.read_bytes()) == 64
    for path, mode in ((file, 0o640), (file.parent, 0o770)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"{path}, .* may be used by others"):
            JobKey.of_user()
        path.chmod(before)
    assert JobKey.of_user() == keys[0]
    file.write_text("")  # as after a crash of the machine: it was a key that anybody knows
    with pytest.raises(ValueError, match=f"{file} has 0 characters, and a job key at least 32"):
        JobKey.of_user()
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    assert JobKey.of_user() is None


# Records ---------------------------------------------------------------------------------------


def test_a_record_without_the_key_is_absent() -> None:
    behind = HashStore()
    store = SealedStore(behind, OWN).under("place")
    store.set("one", "value")
    assert (store.get("one"), store.check(["one"])) == (b"value", True)
    assert store.multi_get(["one"]) == [b"value"]
    whole = behind.get("place/one")
    forged = [
        b"value",
        b"",
        b"\0" * 32 + b"value",
        whole[:-1],
        whole + b"!",
        SealedStore(behind, OTHER).seal("one", b"value"),
    ]
    for content in forged:
        write(behind, "place/one", content)
        assert (store.check(["one"]), read(store, ["one"])) == (False, [None])
    write(behind, "place/two", whole)  # another place
    assert read(store, ["one", "two", "three"]) == [None, None, None]
    write(behind, "place/one", whole)
    assert read(store, ["one"]) == [b"value"]


def test_the_first_record_with_the_key_is_valid() -> None:
    behind = HashStore()
    store = SealedStore(behind, OWN)
    behind.set("one", "a stranger's")
    assert store.compare_set("one", "", "first") == b"first"
    assert store.compare_set("one", "", "second") == b"first"
    assert store.get("one") == b"first"


def test_a_number_belongs_to_who_took_it() -> None:
    behind = HashStore()
    store = SealedStore(behind, OWN)
    numbers = Numbers(store, "id")
    for number in range(70):  # more than one look finds
        assert numbers.take() == number
    behind.set("id/70", "a stranger's")
    assert numbers.take() == 71
    assert [numbers.is_ours(number) for number in (69, 70, 71, 72)] == [True, False, True, False]
    behind.set("id/3", "a stranger's")
    assert numbers.take() == 72


# Connections -----------------------------------------------------------------------------------


def connect_both(stores: list[Store], seconds: float = SECONDS) -> list[Any]:
    """A connection of each of two ranks, or its error."""

    def make(rank: int) -> Any:
        try:
            return Connection(Meeting(stores[rank], rank, 2), seconds)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


def test_ranks_with_the_key_connect(keyed: None) -> None:
    store = HashStore()
    first, second = connect_both([store, store])
    first.wire.send(1, Kind.JOIN)
    assert second.wire.receive(0, {Kind.JOIN: 0}, SECONDS).kind is Kind.JOIN
    # Whatever a stranger writes now is no report of a rank.
    for name in all_names(store):
        if "/sealed/" in name:
            write(store, name, '{"waited_for": [1], "silent": true, "error": ""}')
    error = ValueError("its own")
    first.board.announce(error)
    first.disconnect()
    assert "rank 0 stopped: ValueError: its own" in str(second.find_lost(SECONDS))


@pytest.mark.parametrize("other", [OTHER, None])
def test_a_rank_without_the_key_is_named(other: JobKey | None) -> None:
    store = HashStore()
    theirs = store if other is None else SealedStore(store, other)
    first, second = connect_both([SealedStore(store, OWN), theirs], 3.0)
    assert isinstance(first, JobKeyError)
    assert "rank 0: what calls itself rank 1 has not this job's key" in str(first)
    assert isinstance(second, Exception)


def test_the_records_of_an_earlier_meeting_are_of_no_use() -> None:
    """A stranger has noted them, and plays rank 1."""
    earlier, store = HashStore(), HashStore()
    for connection in connect_both([SealedStore(earlier, OWN)] * 2):
        connection.disconnect()
    noted = {name: earlier.get(name) for name in all_names(earlier)}

    def replay() -> None:
        for name, content in noted.items():
            if name != "gradwire/calls/0":
                write(store, name, content)

    replay()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(Connection, Meeting(SealedStore(store, OWN), 0, 2), 3.0)
        while not made.done():
            replay_of_others = {n: c for n, c in noted.items() if not n.endswith(("/0", "s/0"))}
            for name, content in replay_of_others.items():
                write(store, name, content)
            time.sleep(0.05)
        assert isinstance(made.exception(), JobKeyError)


def pair() -> list[dist.ProcessGroup]:
    """The two ends of a connection."""
    store = HashStore()

    def make(rank: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, rank, 2)
        add_gloo(group, store, timedelta(seconds=SECONDS))
        return group

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


REPLIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "what it got": lambda proof: proof,
    "nothing": torch.zeros_like,
    "another key's": lambda _: proof_of(OTHER, 1, 0),
    "another rank's": lambda _: proof_of(OWN, 2, 0),
    "for another rank": lambda _: proof_of(OWN, 1, 2),
}


@pytest.mark.parametrize("reply", REPLIES)
def test_a_stranger_at_the_other_end_is_found(reply: str) -> None:
    ours, stranger = pair()
    with ThreadPoolExecutor(1) as threads:
        proving = threads.submit(prove, ours, OWN, [5, 7], SECONDS)
        proof = torch.zeros(TAG_BYTES, dtype=torch.uint8)
        stranger.recv([proof], 0, TAG).wait()
        stranger.send([REPLIES[reply](proof)], 0, TAG).wait()
        with pytest.raises(JobKeyError, match="rank 5: the process that connected as rank 7 has"):
            proving.result()


def test_a_stranger_that_says_nothing_is_not_awaited_for_long() -> None:
    ours, _silent = pair()
    with pytest.raises(RuntimeError):
        prove(ours, OWN, [0, 1], 0.5)


# Members ---------------------------------------------------------------------------------------


def test_the_members_have_one_key(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def join(store: Store, key: str | None) -> Store:
        monkeypatch.delenv(VARIABLE, raising=False)
        if key is not None:
            monkeypatch.setenv(VARIABLE, key)
        return enter(store, "members/", StoreAccess(), "terms")

    store = HashStore()
    first = join(store, KEY)
    with pytest.raises(JobKeyError, match=r"with another job key\. .*the same GRADWIRE_JOB_KEY"):
        join(store, OTHER_KEY)
    with pytest.raises(JobKeyError, match=r"have a job key, .* has none\. .*GRADWIRE_JOB_KEY"):
        join(store, None)
    assert capfd.readouterr().err == ""
    store.set("members//key", "a stranger's")
    first.set("a record", "value")
    assert join(store, KEY).get("a record") == b"value"
    # Another training with the same key has other records.
    again = HashStore()
    second = join(again, KEY)
    (name,) = (name for name in all_names(store) if "a record" in name)
    write(again, name, store.get(name))
    assert read(second, ["a record"]) == [None]

    store = HashStore()
    for _ in range(3):
        join(store, None)
    said = capfd.readouterr().err
    assert said.count("this job has no key") == 1
    assert "export GRADWIRE_JOB_KEY=$(openssl rand -hex 32)" in said
    with pytest.raises(JobKeyError, match="with no job key"):
        join(store, KEY)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_one_machine_a_stranger_needs_the_users_key(
    address: str, configuration: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    place = PrefixStore("training", TCPStore(address, store.port, is_master=False))
    first = enter(place, "members/", StoreAccess(), "terms")
    first.set("a record", "value")
    assert enter(place, "members/", StoreAccess(), "terms").get("a record") == b"value"
    assert capfd.readouterr().err == ""
    # Another user, who says that nobody has a key.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(configuration / "of another user"))
    with pytest.raises(JobKeyError, match="members with another job key"):
        enter(place, "members/", StoreAccess(), "terms")
    write(place, "members//key", "none")
    write_all(store, "a record", "a stranger's")
    assert read(first, ["a record"]) == [None]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(configuration))
    enter(place, "members/", StoreAccess(), "terms").set("a record", "ours")
    assert first.get("a record") == b"ours"


def test_where_other_machines_may_join_a_key_must_be_given(configuration: Path, capfd: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mock.patch.object(TCPStore, "host", "192.0.2.1"):  # as if it were reached there
        enter(store, "members/", StoreAccess(), "terms")
    assert capfd.readouterr().err.count("this job has no key") == 1
    assert not configuration.exists()


def write_all(store: Store, part: str, content: str | bytes) -> None:
    """A stranger writes the same into all records whose names have this part."""
    for name in all_names(store):
        if part in name:
            write(store, name, content)


def test_a_stranger_expels_nobody(keyed: None) -> None:
    """Whatever he writes into the record of a process that lives, also what it wrote before."""
    behind = HashStore()
    records = enter(behind, "members/", StoreAccess(), "terms")
    watching, living = (Heartbeat(records.clone(), 1.0) for _ in range(2))  # type: ignore
    try:
        living.say(State.MEMBER)
        (name,) = (name for name in all_names(behind) if name.endswith(f"beat/{living.id}"))
        old = behind.get(name)
        left = SealedStore(behind, OTHER).seal("beat", b"left 999999")
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            for content in (old, b"left 999999", left, b""):
                write(behind, name, content)
                time.sleep(0.01)
        assert not watching.is_gone(living.id)
        living.say(State.MEMBER)
        with mock.patch.object(living, "_beat"):  # as if the process were stopped
            records_of_it = cycle((old, behind.get(name)))  # which don't show that it lives

            def is_gone() -> bool:
                write(behind, name, next(records_of_it))
                return watching.is_gone(living.id)

            wait_until(is_gone)
    finally:
        living.stop()
        watching.stop()


def test_a_stranger_that_asks_is_not_seen(keyed: None) -> None:
    """Nor is one that replays what a member of another training with this key wrote."""
    noted, behind = HashStore(), HashStore()
    earlier = make_generations(noted, 1, 1.0)
    earlier.leave()
    members = make_generations(behind, 1, 1.0)
    try:
        members.join()
        for number in range(1, 4):
            for place in ("gradwire/members/", *places_of(behind)):
                write(behind, f"{place}id/{number}", "a stranger's")
                write(behind, f"{place}beat/{number}", f"asking {number}")
        for name in all_names(noted):
            if name.endswith("/0"):
                write(behind, name.removesuffix("/0") + "/4", noted.get(name))
        time.sleep(1.0)
        assert members.asking() == ()
    finally:
        members.leave()


def make_generations(store: Store, ranks: int, lost_after: float) -> Generations:
    members = Members(on_lost="continue", store=store, ranks=ranks, lost_after=lost_after)
    return Generations(members, SECONDS, "terms")


def places_of(store: Store) -> set[str]:
    return {name.rpartition("beat/")[0] for name in all_names(store) if "beat/" in name}


def test_a_stranger_decides_nothing(keyed: None) -> None:
    """Members meet though he writes a roster of his own first, and over their reports."""
    behind = HashStore()
    both = [make_generations(behind, 2, 4.0) for _ in range(2)]
    try:
        with ThreadPoolExecutor(3) as threads:
            rosters = list(threads.map(Generations.join, both))
            assert rosters[0] == rosters[1]
            (place,) = places_of(behind)
            alone = replace(rosters[0], generation=1, members=(1,), receivers=())
            write(behind, f"{place}decision/1", json.dumps(asdict(alone)))
            met = [threads.submit(one.meet, MemberReport(0, 0, (0,))) for one in both[:1]]
            time.sleep(0.3)
            write_all(behind, "report/1/", MemberReport(7, 0, (0,)).to_text())
            met.append(threads.submit(both[1].meet, MemberReport(0, 0, (0,))))
            after = [one.result(SECONDS) for one in met]
        assert after[0] == after[1]
        assert (after[0].members, after[0].done) == ((0, 1), 0)
    finally:
        for one in both:
            one.leave()


def test_a_store_listens_on_its_address_alone() -> None:
    store = host_store("127.0.0.1", 0)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("one", "value")
    assert store.get("one") == b"value"
    with pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", store.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))


# Whole trainings -------------------------------------------------------------------------------


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    processes = Fleet()
    yield processes
    processes.close()


def test_members_go_on_without_who_was_stopped_and_refuse_who_has_no_key(
    fleet: Fleet, tmp_path: Path
) -> None:
    """The process that was stopped is no ghost: it learns that it was expelled."""
    plan = Plan((1, 3), pause=0.05, folder=str(tmp_path))
    for number in range(3):
        own = replace(plan, at=2, deed="stop") if number == 1 else plan
        fleet.start(number, Keyed(KEY, own), run)
    wait_until(lambda: len(list(tmp_path.glob("0-*.npz"))) == 3, 120)
    for number, key in ((3, OTHER_KEY), (4, None)):
        fleet.start(number, Keyed(key, plan), run)
    for refused in fleet.collect(3, 4):
        assert refused.error.startswith("JobKeyError: this process can't join: ")
    ended = fleet.collect(0, 2)
    for each in ended:
        assert (each.error, each.digest) == ("", ended[0].digest)
        assert (len(each.members), len(each.lost)) == (2, 1)
    os.kill(fleet.pid(1), signal.SIGCONT)
    (awake,) = fleet.collect(1)
    assert awake.error.startswith("ExpelledError: member")


def test_the_hook_exchanges_with_a_key(cluster: Cluster) -> None:
    first, second = cluster.run(2, train_with_hook, [KEY, KEY])
    assert first == second


def test_a_rank_of_the_hook_with_another_key_is_named(cluster: Cluster) -> None:
    first, second = cluster.run(2, train_with_hook, [KEY, OTHER_KEY])
    assert "rank 0: what calls itself rank 1 has not this job's key" in first
    assert "rank 1: what calls itself rank 0 has not this job's key" in second


def test_a_place_is_for_processes_with_the_key(fleet: Fleet, tmp_path: Path) -> None:
    """A worker dies. A process with another key does not get its place, and no model."""
    course = Course(options={"codec": "raw"}, folder=str(tmp_path), hold=(8,))
    fleet.start(100, Keyed(KEY, course.become(role="server")), run)
    for number, own in ((0, {}), (1, {"deed": "kill", "at": 3, "hold": ()})):
        fleet.start(number, Keyed(KEY, course.become(number=number, **own)), run)
    fleet.wait_killed(1)
    fleet.start(2, Keyed(OTHER_KEY, course.become(number=2)), run)
    (refused,) = fleet.collect(2)
    assert refused.error.startswith("JobKeyError: this process can't join: ")
    assert refused.digests == {}
    fleet.start(3, Keyed(KEY, course.become(number=3, hold=())), run)
    wait_asked(tmp_path, 3, course)
    (tmp_path / "go8").touch()
    ended = fleet.collect(0, 3, 100)
    assert [each.error for each in ended] == ["", "", ""]
    assert ended[0].final == ended[1].final == ended[2].final


@pytest.mark.long
def test_a_crowd_at_the_store_stops_nobody(tmp_path: Path) -> None:
    """Thousands of connections, with nothing, half a message and garbage; a member joins."""
    port = free_port()
    fleet = Fleet(port)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = []
    try:
        fleet.start(port, Plan((9, 9)), host_until_killed)
        plan = Plan((1, 3), ranks=2, pause=0.05, folder=str(tmp_path))
        for number in (0, 1):
            fleet.start(number, Keyed(KEY, plan), run)
        while not list(tmp_path.glob("1-*.npz")):
            time.sleep(0.1)
        for number in range(min(10_000, most - 500)):
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            crowd[-1].send((b"", b"\0", b"\0\x10\0\0\0\0\0\0\0ab", b"\xff" * 100)[number % 4])
        fleet.start(2, Keyed(KEY, plan), run)
        ended = fleet.collect(0, 1, 2)
        for each in ended:
            assert (each.error, each.digest) == ("", ended[0].digest)
            assert each.members == (0, 1, 2)
    finally:
        for one in crowd:
            one.close()
        fleet.close()


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
