"""Places that become free, and the connections of those that take them, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.distributed_c10d import PrefixStore

from gradwire.torch.errors import PeerLostError, StoreLostError
from gradwire.torch.members.places import Admission, Admissions, Places
from gradwire.torch.network.connection import Connection
from gradwire.torch.network.meeting import Meeting
from gradwire.torch.network.transport import Kind, LostError
from gradwire.torch.options import Members
from gradwire.torch.server.server_link import Message, ServerLink

WORKER, SERVER = 1, 2
SECONDS = 20.0


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def link() -> Iterator[ServerLink]:
    """A server's, without workers."""
    alone = ServerLink(Meeting(HashStore(), 0, 1), 0.3, "")
    alone.listen((), {Kind.JOIN: 0})
    yield alone
    alone.close()


def connect() -> tuple[Connection, Connection]:
    """The ends of the server and of the worker."""
    store = HashStore()

    def make(place: int) -> Connection:
        return Connection(Meeting(store, place, 2, (), SECONDS, [SERVER, WORKER]), SECONDS)

    with ThreadPoolExecutor(2) as threads:
        server, worker = threads.map(make, range(2))
    return server, worker


def message(kind: Kind) -> Message:
    return Message(WORKER, kind, np.empty(0, dtype=np.uint8), 0, 0.0)


def test_a_place_is_not_offered_twice(link: ServerLink) -> None:
    """The process that takes it may be on its way when the worker's second error comes."""
    link._admissions = admissions = mock.Mock()
    admissions.stop.return_value = True
    link.offer(WORKER)
    link.offer(WORKER)
    assert admissions.offer.call_args_list == [mock.call(WORKER)]
    server, worker = connect()
    link.arrived.put((server, WORKER, None))
    worker.disconnect()
    with pytest.raises(LostError):
        link.take([WORKER])
    link.offer(WORKER)
    assert admissions.offer.call_args_list == 2 * [mock.call(WORKER)]


def test_a_message_of_a_connection_that_was_replaced(link: ServerLink) -> None:
    """It was queued before its process was told."""
    (older, expelled), (newer, worker) = connect(), connect()
    for item in (older, None), (newer, None), (older, message(Kind.OPTIONS)):
        link.arrived.put((item[0], WORKER, item[1]))
    worker.wire.send(SERVER, Kind.JOIN)
    assert link.take([WORKER]).kind is Kind.JOIN
    assert expelled.wire.receive(SERVER, {Kind.EXPELLED: 0}, SECONDS).kind is Kind.EXPELLED
    for end in expelled, worker:
        end.disconnect()


def test_what_arrived_while_a_server_slept_is_read(link: ServerLink) -> None:
    """Its readers come to it only after the timeout."""
    late = threading.Timer(
        link.wire.timeout + 0.3, lambda: link.arrived.put((link, WORKER, message(Kind.LEAVE)))
    )
    late.start()
    assert link.take([WORKER]).kind is Kind.LEAVE
    with pytest.raises(LostError, match=r"waited 0\.3 s") as lost:
        link.take([WORKER])
    assert lost.value.silent
    assert lost.value.peers == (WORKER,)


class Training:
    """A server, which has admitted nobody yet, and a process that joins."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.places = self.make("server")
        self.founders = [self.make("worker") for _ in range(2)]
        self.joiner = self.make("worker")
        assert self.joiner.rank is None
        self.arrived: list[tuple[int, Connection]] = []

    def make(self, role: str) -> Places:
        members = Members(on_lost="continue", store=self.store, ranks=3, role=role, lost_after=2.0)
        return Places(members, 1, SECONDS, "terms")

    def run(self, on_arrival: Callable[[Admissions, int], Any], attempts: list[bool]) -> None:
        """The place of WORKER is free. attempts: whether the process connects, each time."""

        def note(rank: int, connection: Connection) -> None:
            self.arrived.append((rank, connection))
            on_arrival(admissions, rank)

        def meet(meeting: Meeting) -> Connection:
            connection = Connection(meeting, SECONDS)
            if not attempts.pop(0):
                connection.disconnect()
                raise PeerLostError("a server was late")
            return connection

        admissions = Admissions(self.places, SECONDS, note)
        try:
            admissions.offer(WORKER)
            connection = self.joiner.join(meet)
            end = time.monotonic() + SECONDS
            while attempts or not self.arrived:
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            admissions.stop()
        assert self.joiner.rank == WORKER
        assert {rank for rank, _ in self.arrived} == {WORKER}
        for each in [connection, *(each for _, each in self.arrived)]:
            each.disconnect()


@pytest.mark.parametrize("arrives", [False, True])
def test_the_store_does_not_answer_to_an_admission(arrives: bool) -> None:
    """The admission is made again, also if it had reached the store."""
    training = Training()
    admit, calls = training.places.admit, []

    def admit_late(admission: Admission) -> None:
        calls.append(admission)
        if arrives or len(calls) > 1:
            admit(admission)
        if len(calls) == 1:
            raise StoreLostError("no answer")

    with mock.patch.object(training.places, "admit", admit_late):
        free: list[set[int]] = []
        training.run(lambda admissions, rank: free.append(set(admissions._free)), [True])
    assert free == [set()]
    assert len(calls) == 2
    assert calls[0] == calls[1]


def test_the_first_admission_of_a_number_is_valid() -> None:
    training = Training()
    training.places.admit(Admission(0, 5, 1))
    training.places.admit(Admission(0, 6, 0))
    assert training.places.admission(0) == Admission(0, 5, 1)


def test_a_process_that_could_not_connect_is_admitted_again() -> None:
    """The server connected, and hears that the process is gone again."""
    training = Training()

    def lose_the_first(admissions: Admissions, rank: int) -> None:
        if len(training.arrived) == 1:
            admissions.offer(rank)

    training.run(lose_the_first, [False, True])
    assert len(training.arrived) == 2


def test_a_store_that_is_gone_when_it_is_cloned() -> None:
    places = Training().places
    dead = mock.Mock(spec=PrefixStore)
    dead.clone.side_effect = dist.DistNetworkError("connection refused")
    places._store = dead
    with pytest.raises(StoreLostError, match="connection refused"):
        places.meeting(Admission(0, 5, WORKER), SERVER)
