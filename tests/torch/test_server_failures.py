"""Workers and servers that die, fall silent or are set up differently."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cluster import Cluster, Died, Failed
from gradwire.torch.network.transport import Kind, Limits, LostError, Received
from gradwire.torch.network.wire import Wire
from gradwire.torch.server.server_link import ServerLink
from server_jobs import Job, Served, run

SERVER = 2


@pytest.mark.parametrize("victim", [0, 1, SERVER])
def test_a_killed_rank_is_named_by_all_others(fragile_cluster: Cluster, victim: int) -> None:
    fragile_cluster.start(3, run, Job(versions=1000, victim=victim))
    answers = fragile_cluster.collect(range(3), seconds=60)
    ended = time.monotonic()
    for rank, answer in answers.items():
        if rank == victim:
            assert isinstance(answer, Died)
            continue
        assert isinstance(answer, Failed)
        assert "PeerLostError" in answer.message, answer.trace
        assert f"rank {victim} is gone" in answer.message, answer.trace
        assert ended - answer.at < 30


@pytest.mark.parametrize("victim", [1, SERVER])
def test_a_silent_rank_is_named(fragile_cluster: Cluster, victim: int) -> None:
    job = Job(versions=1000, victim=victim, signal=signal.SIGSTOP, arguments={"timeout": 2.0})
    fragile_cluster.start(3, run, job)
    others = [rank for rank in range(3) if rank != victim]
    for answer in fragile_cluster.collect(others, seconds=60).values():
        assert isinstance(answer, Failed)
        assert f"rank {victim} sent nothing" in answer.message, answer.trace


def test_a_dead_worker_is_done_without_where_one_is_a_backup(fragile_cluster: Cluster) -> None:
    # Long enough for the server to hear of the death before the last version.
    job = Job(versions=200, victim=1, arguments={"backup_workers": 1})
    fragile_cluster.start(3, run, job)
    answers = fragile_cluster.collect([0, SERVER], seconds=60)
    for answer in answers.values():
        assert isinstance(answer, Served), answer.trace
        assert answer.version >= 200
    assert answers[SERVER].stats["lost_workers"] == (1,)
    assert any("training goes on without it" in text for text in answers[SERVER].warnings)


@pytest.mark.parametrize("barrier", ["step", "tensor"])
@pytest.mark.parametrize("victim", [0, 1])
def test_training_goes_on_without_a_dead_worker(
    fragile_cluster: Cluster, victim: int, barrier: str
) -> None:
    """The model is then that of a training with the other worker alone."""
    arguments = {"on_lost": "continue", "codec": "raw", "barrier": barrier}
    job = Job(versions=12, victim=victim, arguments=arguments)
    fragile_cluster.start(3, run, job)
    answers = fragile_cluster.collect([1 - victim, SERVER], seconds=60)
    worker, server = answers[1 - victim], answers[SERVER]
    for answer in (worker, server):
        assert isinstance(answer, Served), answer.trace
        assert answer.version == 12
    assert server.stats["lost_workers"] == (victim,)
    assert any("goes on without it, as on_lost='continue' allows" in w for w in server.warnings)
    assert len(set(worker.digests.values())) == 12
    torch.testing.assert_close(worker.model, server.model)


@pytest.mark.parametrize("victim", [1, SERVER])
def test_an_error_of_a_receiving_thread_is_told_to_all(
    fragile_cluster: Cluster, victim: int
) -> None:
    """The thread ended without a word, and the others blamed ranks that were well."""
    job = Job(versions=1000, victim=victim, arguments={"timeout": 20.0})
    began = time.monotonic()
    fragile_cluster.start(3, run_and_fail_to_receive, job)
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        assert isinstance(answer, Failed)
        if rank == victim:
            assert answer.message == "MemoryError: no room for the message", answer.trace
        else:
            assert "PeerStoppedError" in answer.message, answer.trace
            assert f"rank {victim} stopped: MemoryError: no room" in answer.message
        assert answer.at - began < 15  # nobody waited for the timeout


def run_and_fail_to_receive(job: Job) -> Served:
    """On the victim, the threads that receive fail at their fourth message."""
    received = Wire.receive
    count = itertools.count()

    def receive(self: Wire, peer: int, limits: Limits, timeout: float | None = None) -> Received:
        message = received(self, peer, limits, timeout)
        in_reader = threading.current_thread().name.startswith("gradwire-")
        if in_reader and message.kind is Kind.PACKET and next(count) == 3:
            raise MemoryError("no room for the message")
        return message

    if dist.get_rank() != job.victim:
        return run(replace(job, victim=-1))
    with mock.patch.object(Wire, "receive", receive):
        return run(replace(job, victim=-1))


def run_and_lose_two(job: Job) -> Served:
    return run(replace(job, victim=dist.get_rank() if dist.get_rank() in (1, 2) else -1))


@pytest.mark.parametrize("allowing", [{"on_lost": "continue"}, {"backup_workers": 1}], ids=str)
def test_a_worker_that_is_gone_while_the_server_flushes(
    fragile_cluster: Cluster, allowing: dict[str, Any]
) -> None:
    fragile_cluster.start(3, run_and_fail_to_flush, Job(versions=12, arguments=allowing))
    answers = fragile_cluster.collect([0, SERVER], seconds=60)
    for answer in answers.values():
        assert isinstance(answer, Served), answer
        assert answer.version == 12
    assert answers[SERVER].stats["lost_workers"] == (1,)


def run_and_fail_to_flush(job: Job) -> Served:
    """The third message of worker 1 breaks its connection, for the server."""
    calls = itertools.count()
    flush = ServerLink.flush

    def fail(link: ServerLink, peer: int, keep: int = 0) -> None:
        if dist.get_rank() == SERVER and peer == 1 and next(calls) >= 3:
            raise LostError((1,), False, "connection reset")
        flush(link, peer, keep)

    with mock.patch.object(ServerLink, "flush", fail):
        return run(job)


def test_the_last_worker_gets_the_last_model() -> None:
    """There are fewer workers left than backup workers and one more."""
    processes = Cluster(4, fragile=True)
    arguments = {"on_lost": "continue", "backup_workers": 1, "codec": "raw"}
    processes.start(4, run_and_lose_two, Job(versions=12, arguments=arguments))
    answers = processes.collect([0, 3], seconds=90)
    processes.close(seconds=1.0)
    for answer in answers.values():
        assert isinstance(answer, Served), answer
    assert answers[0].version == 12
    assert answers[0].final == answers[3].final


@pytest.mark.parametrize("victim", [0, 1])
def test_training_goes_on_without_a_silent_worker(fragile_cluster: Cluster, victim: int) -> None:
    arguments = {"on_lost": "continue", "timeout": 4.0}
    job = Job(versions=12, victim=victim, signal=signal.SIGSTOP, arguments=arguments)
    fragile_cluster.start(3, run, job)
    answers = fragile_cluster.collect([1 - victim, SERVER], seconds=60)
    for answer in answers.values():
        assert isinstance(answer, Served), answer
        assert answer.version == 12
    assert answers[SERVER].stats["lost_workers"] == (victim,)
    assert any(f"rank {victim} sent nothing (waited 4 s)" in w for w in answers[SERVER].warnings)


def test_no_worker_is_left(fragile_cluster: Cluster) -> None:
    job = Job(versions=1000, victim=0, arguments={"on_lost": "continue"})
    fragile_cluster.start(3, run_and_lose_both, job)
    (answer,) = fragile_cluster.collect([SERVER], seconds=60).values()
    assert isinstance(answer, Failed)
    assert answer.message.startswith("PeerLostError: rank"), answer.trace
    assert "gone" in answer.message  # rank 0 hosts the store, where the others look for the first


def run_and_lose_both(job: Job) -> Served:
    return run(replace(job, victim=dist.get_rank() if dist.get_rank() != SERVER else -1))


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "codec": ({"codec": "3lc:s=1.5"}, "push 3lc:s=1.5"),
    "staleness": ({"staleness": 1}, "staleness 1"),
    "seed": ({"seed": 7}, "seed 7"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_named(fragile_cluster: Cluster, what: str) -> None:
    other, words = DIFFERENT[what]
    fragile_cluster.start(3, run, Job(other=other))
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        assert isinstance(answer, Failed)
        pair = "ranks 1 and 0" if rank == 1 else f"ranks {rank} and 1"
        assert f"PeerMismatchError: {pair} can't exchange" in answer.message, answer.trace
        assert words in answer.message


def different_schedules() -> Served:
    return run(Job(decay=0.5 if dist.get_rank() == 1 else 0.9))


def test_workers_with_different_schedules_are_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, different_schedules)
    for answer in fragile_cluster.collect(range(3), seconds=60).values():
        assert isinstance(answer, Failed)
        assert "ranks 0 and 1 differ in their parameter groups" in answer.message, answer.trace
        assert "lr of group 0" in answer.message


def test_a_worker_that_leaves_early_ends_the_training(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, run, Job(versions=20, leaver=1))
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers[1], Served)
    assert answers[1].version == 3
    assert isinstance(answers[0], Failed)
    assert "makes no further version, because too few workers are left" in answers[0].message


def test_a_server_dies_and_goes_on_from_its_checkpoint(
    fragile_cluster: Cluster, cluster: Cluster, tmp_path: Any
) -> None:
    job = Job(versions=8, arguments={"codec": "raw"})
    expected = cluster.run(3, run, job)
    cut = Job(versions=8, victim=SERVER, arguments={"codec": "raw"}, folder=str(tmp_path))
    fragile_cluster.start(3, run, cut)
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        if rank != SERVER:
            assert f"rank {SERVER} is gone" in answer.message, answer.trace
    resumed = Job(versions=8, arguments={"codec": "raw"}, folder=str(tmp_path), resume=True)
    answers = cluster.run(3, run, resumed)
    assert min(answers[0].digests) <= 5  # nothing is lost but the steps since the checkpoint
    for name, tensor in answers[0].model.items():
        torch.testing.assert_close(tensor, expected[0].model[name], atol=2e-6, rtol=1e-5)
