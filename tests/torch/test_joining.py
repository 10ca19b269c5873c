"""ServerOptimizer(store=...): processes take the places of workers that died."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import free_port
from joining_jobs import Course, Ended, take_part, wait_asked, wait_file
from member_jobs import Fleet, Plan, host_store
from runs import adam
from selection import long

RAW: dict[str, Any] = {"codec": "raw"}
TERNARY: dict[str, Any] = {"codec": "3lc:s=1.5"}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    processes = Fleet()
    yield processes
    processes.close()


class Training:
    """Starts workers 0 and 1 and the servers, and lets processes come later, with numbers from 2.

    Worker 0 holds when it has the versions `hold`, by default 8. Meanwhile others come and go.
    """

    def __init__(self, fleet: Fleet, folder: Path, *hold: int, **course: Any) -> None:
        self.fleet, self.folder, self.hold = fleet, folder, list(hold or (8,))
        self.plain = Course(folder=str(folder), **course)
        self.servers = [100 + number for number in range(self.plain.servers)]
        self.come = 2

    def begin(self, deed: str = "kill", victim: int = 1, at: int = 3) -> None:
        for number in self.servers:
            self.fleet.start(number, self.plain.become(role="server"), take_part)
        for number in (0, 1):
            own = {"deed": deed, "at": at} if number == victim else {"hold": tuple(self.hold)}
            self.start(number, **own)
        for number in (0, 1):
            self.wait_for(number, 0)  # who comes later joins

    def start(self, number: int, **course: Any) -> int:
        self.fleet.start(number, self.plain.become(number=number, **course), take_part)
        return number

    def join(self, **course: Any) -> int:
        self.come += 1
        return self.start(self.come - 1, **course)

    def wait_for(self, number: int, version: int) -> None:
        self.wait_file(f"{number}-{version}")

    def wait_asked(self, number: int) -> None:
        """Until the process has a place, and the servers know that it wants the model."""
        wait_asked(self.folder, number, self.plain)

    def wait_file(self, name: str) -> None:
        wait_file(self.folder / name)

    def go(self) -> None:
        """Worker 0 holds no longer, until it has the next of these versions."""
        (self.folder / f"go{self.hold.pop(0)}").touch()

    def end(self, *workers: int) -> tuple[list[Ended], list[Ended]]:
        """How these workers and the servers ended; their models are equal in every version."""
        while self.hold:
            self.go()
        ended = self.fleet.collect(*workers)
        served = self.fleet.collect(*self.servers)
        for each in ended + served:
            assert each.error == "", each
        first = ended[0]
        for other in ended[1:]:
            common = first.digests.keys() & other.digests.keys()
            if "staleness" not in self.plain.options:  # then several may arrive in a step
                assert len(common) == self.plain.until - other.began + 1
            assert all(first.digests[version] == other.digests[version] for version in common)
            assert other.final == first.final
        if len(served) == 1 and self.plain.dtype == torch.float32:
            assert served[0].final == first.final
        return ended, served


CASES: dict[str, dict[str, Any]] = {
    "raw": {"options": RAW},
    "adam": {"options": TERNARY, "inner": adam, "decay": 0.9},
    "drawn": {"options": {"codec": "terngrad"}},
    "tensor": {"options": TERNARY | {"barrier": "tensor"}},
    "two servers": {"options": TERNARY, "servers": 2, "ranks": 4},
    "two servers, tensor": {"options": TERNARY | {"barrier": "tensor"}, "servers": 2, "ranks": 4},
    "staleness": {"options": TERNARY | {"staleness": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_process_takes_the_place_of_a_worker_that_died(
    fleet: Fleet, tmp_path: Path, case: str
) -> None:
    training = Training(fleet, tmp_path, **CASES[case])
    training.begin()
    training.wait_for(0, 8)
    joiner = training.join()
    training.wait_asked(joiner)  # it is let in when the version under way is made
    (old, new), servers = training.end(0, joiner)
    assert {old.rank, new.rank} == {0, 1}
    assert 8 <= new.began < 20
    assert new.owed == 0
    assert new.lr == pytest.approx(old.lr, rel=1e-6)
    for server in servers:
        assert server.stats["lost_workers"] == ()
        assert server.stats["joined_workers"] == (new.rank,)
        text = f"another process takes the place of rank {new.rank}, from version"
        assert any(text in warning for warning in server.warnings), server.warnings
        assert not any("differ" in warning for warning in server.warnings), server.warnings
        assert f"another process, in the place of rank {new.rank}" in server.report
    assert any(f"from version {new.began} on" in w for s in servers for w in s.warnings)


def test_what_joined_pushes_counts(fleet: Fleet, tmp_path: Path) -> None:
    """With one step of SGD a version, the model shows whose gradients were in it."""
    training = Training(fleet, tmp_path, options=RAW, until=14)
    training.begin()
    training.wait_for(0, 8)
    joiner = training.join()
    training.wait_asked(joiner)
    (old, new), _ = training.end(0, joiner)
    alone = Fleet()
    try:
        other = Training(alone, tmp_path / "alone", options=RAW, until=14)
        other.folder.mkdir()
        other.begin()
        (single,), _ = other.end(0)
    finally:
        alone.close()
    same = [v for v in range(15) if old.digests[v] == single.digests[v]]
    assert same == list(range(new.began + 1))


@pytest.mark.long
def test_two_processes_one_after_the_other(fleet: Fleet, tmp_path: Path) -> None:
    """The second takes the place of the first, which died in its turn."""
    training = Training(fleet, tmp_path, 8, 16, options=TERNARY, until=30)
    training.begin()
    first = training.join(deed="kill", at=12)
    training.wait_asked(first)
    training.go()
    fleet.wait_killed(first)
    second = training.join()
    training.wait_asked(second)
    (old, new), (server,) = training.end(0, second)
    assert server.stats["joined_workers"] == (new.rank, new.rank)
    assert new.rank == 1 - old.rank


def test_both_founders_die_one_by_one(fleet: Fleet, tmp_path: Path) -> None:
    """In the end nobody is left that was there in the beginning, but the server."""
    training = Training(fleet, tmp_path, 8, 16, 20, options=TERNARY, until=30)
    training.begin()
    first = training.join(hold=(20,))
    training.wait_asked(first)
    training.go()
    training.wait_for(0, 16)
    training.wait_for(first, 16)
    os.kill(fleet.pid(0), signal.SIGKILL)
    second = training.join()
    training.wait_asked(second)
    (_, new), (server,) = training.end(first, second)
    assert new.began >= 16
    assert sorted(server.stats["joined_workers"]) == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.long
def test_a_server_holds_no_more_after_many_processes(fleet: Fleet, tmp_path: Path) -> None:
    training = Training(fleet, tmp_path, 0, options=RAW, pause=0.05, until=100_000)
    training.begin()
    training.go()
    server = Path(f"/proc/{fleet.pid(training.servers[0])}")
    held = []
    for _ in range(6):
        joiner = training.join()
        training.wait_file(f"asked{joiner}")
        time.sleep(1.0)
        held.append([len(list((server / kind).iterdir())) for kind in ("fd", "task")])
        os.kill(fleet.pid(joiner), signal.SIGKILL)
    for files, threads in held[2:]:
        assert files <= held[1][0], held
        assert threads <= held[1][1], held


@pytest.mark.parametrize("moment", ["JOIN", *long("CATCH_UP", "pull")])
def test_a_process_that_dies_while_it_joins(fleet: Fleet, tmp_path: Path, moment: str) -> None:
    """Worker 0 goes on, and the next process gets the place."""
    training = Training(fleet, tmp_path, 8, 12, options=TERNARY, servers=2, ranks=4)
    training.begin()
    unlucky = training.join(deed=f"kill in {moment}")
    if moment != "JOIN":
        training.wait_asked(unlucky)
    training.go()  # the model is sent between two versions
    fleet.wait_killed(unlucky)
    lucky = training.join()
    training.wait_asked(lucky)
    (_, new), _ = training.end(0, lucky)
    assert new.began >= 12


def test_a_process_that_closes_before_it_connects(fleet: Fleet, tmp_path: Path) -> None:
    """Its place becomes free while it lives."""
    training = Training(fleet, tmp_path, options=TERNARY)
    training.begin()
    training.wait_for(0, 8)
    undecided = training.join(deed="close", hold=(0,))
    training.wait_for(undecided, 0)
    other = training.join()
    training.wait_asked(other)
    (tmp_path / "go0").touch()
    (closed,) = fleet.collect(undecided)
    assert closed.error == "CommunicationError: the ServerOptimizer was closed"
    training.end(0, other)


def test_a_process_that_dies_while_it_waits_for_a_place(fleet: Fleet, tmp_path: Path) -> None:
    training = Training(fleet, tmp_path, options=TERNARY)
    training.begin(deed="")
    training.wait_for(0, 8)
    unlucky = training.join()
    time.sleep(2.0)
    os.kill(fleet.pid(unlucky), signal.SIGKILL)
    fleet.wait_killed(unlucky)
    os.kill(fleet.pid(1), signal.SIGKILL)
    lucky = training.join()
    training.wait_asked(lucky)
    (_, new), _ = training.end(0, lucky)
    assert new.began >= 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"codec": "3lc:s=1"}}, "push 3lc:s=1 "),
        ({"options": TERNARY | {"staleness": 1}}, "staleness 1"),
        ({"options": TERNARY | {"exclude": ["second.weight"]}}, "second.weight"),
        ({"options": TERNARY, "classes": 6}, "values 35854"),
    ],
    ids=["codec", "staleness", "exclude", "model"],
)
def test_a_process_with_other_settings_is_refused_alone(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    training = Training(fleet, tmp_path, options=TERNARY)
    training.begin()
    training.wait_for(0, 8)
    other = training.join(**changes)
    (refused,) = fleet.collect(other)
    assert refused.error.startswith("PeerMismatchError: this process can't join: it has '")
    assert said in refused.error
    assert "the members have '" in refused.error
    _, (server,) = training.end(0)
    assert server.stats["joined_workers"] == ()


def test_the_process_becomes_responsible_for_the_buffers(fleet: Fleet, tmp_path: Path) -> None:
    """Rank 0, from which the server takes the buffers, dies."""
    options = RAW | {"buffers_from": 0, "buffers_every": 2}
    training = Training(fleet, tmp_path, options=options, has_buffers=True, pause=0.05, until=150)
    training.begin(victim=-1)
    training.wait_for(0, 8)
    victim = int((tmp_path / "rank0").read_text())
    os.kill(fleet.pid(victim), signal.SIGKILL)
    joiner = training.join()
    if victim == 1:
        training.wait_asked(joiner)
    ended, (server,) = training.end(1 - victim, joiner)
    assert ended[1].rank == 0
    assert ended[1].buffers == ended[0].buffers == server.buffers == [150.0]


def test_models_of_16_bits(fleet: Fleet, tmp_path: Path) -> None:
    """Workers sum in float32, and so does the one that joins."""
    training = Training(fleet, tmp_path, options=TERNARY, dtype=torch.bfloat16)
    training.begin()
    training.wait_for(0, 8)
    joiner = training.join()
    training.wait_asked(joiner)
    training.end(0, joiner)


def test_a_worker_that_slept_is_told_so(fleet: Fleet, tmp_path: Path) -> None:
    """Another process has its place meanwhile."""
    options = TERNARY | {"timeout": 15.0}
    training = Training(fleet, tmp_path, options=options)
    training.begin(deed="stop")
    joiner = training.join(options=TERNARY)
    training.wait_asked(joiner)
    os.kill(fleet.pid(1), signal.SIGCONT)
    (awake,) = fleet.collect(1)
    assert awake.error.startswith("ExpelledError: rank")
    assert "was taken for dead" in awake.error
    training.end(0, joiner)


def test_all_places_are_taken(fleet: Fleet, tmp_path: Path) -> None:
    training = Training(fleet, tmp_path, options=RAW)
    training.begin(deed="", victim=-1)
    training.wait_for(0, 8)
    late = training.join(options=RAW | {"timeout": 4.0})
    (refused,) = fleet.collect(late)
    assert refused.error == (
        "PeerSilentError: no place of the 2 workers became free within 4 s (timeout=): all of "
        "them live"
    )
    training.end(0, 1)


@pytest.mark.parametrize("deed", ["kill", *long("end")])
def test_the_servers_are_gone(fleet: Fleet, tmp_path: Path, deed: str) -> None:
    training = Training(fleet, tmp_path, options=RAW)
    training.begin(deed="", victim=-1)
    training.wait_for(0, 8)
    if deed == "kill":
        os.kill(fleet.pid(training.servers[0]), signal.SIGKILL)
        training.go()
    else:
        training.end(0, 1)
    late = training.join()
    (refused,) = fleet.collect(late)
    assert refused.error.startswith(
        "PeerLostError: this process can't join: the servers of this store (ranks 2) are gone, or "
        "the training is over. Start all ranks again from a checkpoint, with a new store"
    )


def test_no_server_can_join(fleet: Fleet, tmp_path: Path) -> None:
    training = Training(fleet, tmp_path, options=RAW)
    training.begin()
    training.wait_for(0, 8)
    other = training.join(role="server")
    (refused,) = fleet.collect(other)
    assert "this training has its 1 servers, and no server can join" in refused.error
    training.end(0)


def test_a_schedule_that_differs_is_not_used(fleet: Fleet, tmp_path: Path) -> None:
    training = Training(fleet, tmp_path, options=RAW)
    training.begin()
    training.wait_for(0, 8)
    joiner = training.join(decay=0.5)
    training.wait_asked(joiner)
    _, (server,) = training.end(0, joiner)
    differs = [text for text in server.warnings if "differ in their parameter groups" in text]
    assert len(differs) == 1
    assert "which has taken part for longer" in differs[0]
    assert server.lr == pytest.approx(0.05)


def test_the_end_of_the_store_ends_nothing(tmp_path: Path) -> None:
    port = free_port()
    fleet = Fleet(port)
    try:
        fleet.start(port, Plan((9, 9)), host_store)
        training = Training(fleet, tmp_path, options=RAW)
        training.begin(deed="", victim=-1)
        training.wait_for(0, 8)
        os.kill(fleet.pid(port), signal.SIGKILL)
        training.end(0, 1)
    finally:
        fleet.close()
