"""`ServerOptimizer`: workers and servers as processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import Cluster
from runs import adam, sgd
from server_jobs import Job, Served, run, train_alone
from ways import Inner


def check_replicas(workers: list[Served]) -> None:
    for worker in workers[1:]:
        common = worker.digests.keys() & workers[0].digests.keys()
        assert common
        assert all(worker.digests[v] == workers[0].digests[v] for v in common)
        assert worker.final == workers[0].final


@pytest.mark.parametrize("inner", [sgd, adam], ids=["sgd", "adam"])
def test_uncompressed_training_is_that_of_the_local_optimizer(
    cluster: Cluster, inner: Inner
) -> None:
    """Only the workers run the schedule."""
    job = Job(inner=inner, decay=0.8, arguments={"codec": "raw"})
    answers = cluster.run(3, run, job)
    check_replicas(answers[:2])
    for name, expected in train_alone(job, 2).items():
        torch.testing.assert_close(answers[0].model[name], expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(answers[0].model[name], answers[2].model[name])


def test_compressed_training_on_two_servers(cluster: Cluster) -> None:
    job = Job(versions=25, arguments={"servers": 2, "codec": "3lc:s=1.5,coder=rice"})
    answers = cluster.run(5, run, job)
    workers, servers = answers[:3], answers[3:]
    check_replicas(workers)
    for worker in workers:
        assert worker.version == 25
        assert sum(worker.losses[-5:]) < 0.9 * sum(worker.losses[:5])
        assert worker.stats["ratio"] > 10
    # Every tensor is whole on one server, and servers and workers count the same bytes.
    values = [server.stats["values"] for server in servers]
    assert sum(values) == workers[0].stats["values"]
    assert max(values) == 144 * 160  # second.weight outweighs all others
    for what in ("push_bytes", "pull_bytes"):
        assert sum(s.stats[what] for s in servers) == sum(w.stats[what] for w in workers)
    assert servers[0].stats["dropped_pushes"] == {0: 0, 1: 0, 2: 0}
    assert "25 (0 not finite)" in servers[0].report
    raw = {tensor["name"]: tensor["reason"] for tensor in workers[0].stats["raw_tensors"]}
    assert raw["first.bias"] == "fewer than two dimensions"


def test_a_stalled_worker_is_done_without_and_catches_up(cluster: Cluster) -> None:
    job = Job(versions=40, stalled=1, arguments={"backup_workers": 1})
    answers = cluster.run(4, run, job)
    check_replicas(answers[:3])
    dropped = answers[3].stats["dropped_pushes"]
    assert dropped[1] >= 1
    assert f"{dropped[1]} pushes of rank 1, too late" in answers[3].report
    assert answers[1].stats["steps"] < 40
    assert min(answer.version for answer in answers) >= 40


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_away_for_longer_than_the_history_gets_the_model(
    cluster: Cluster, staleness: int
) -> None:
    few = {"backup_workers": 1, "history": 2, "staleness": staleness}
    job = Job(versions=60, stalled=1, arguments=few)
    answers = cluster.run(4, run, job)
    check_replicas(answers[:3])  # the same bits as workers that pulled every version
    assert all(answer.version >= 60 for answer in answers[:3])
    for server in answers[3:]:
        assert server.stats["models_sent"] >= 1
        assert "for versions kept no more" in server.report
    assert answers[1].stats["steps"] < 60


def test_stale_pulls_end_with_the_same_model(cluster: Cluster) -> None:
    job = Job(versions=60, inner=adam, arguments={"staleness": 2})
    answers = cluster.run(4, run, job)
    check_replicas(answers[:3])
    assert all(answer.version >= 60 for answer in answers)
    assert sum(answers[0].losses[-5:]) < 0.9 * sum(answers[0].losses[:5])


def test_a_gradient_that_is_not_finite_is_applied_by_nobody(cluster: Cluster) -> None:
    for codec in ("3lc:s=1.75", "raw"):
        answers = cluster.run(3, run, Job(non_finite=1, arguments={"codec": codec}))
        check_replicas(answers[:2])
        assert answers[0].digests[3] == answers[0].digests[2]  # version 2 changed nothing
        assert answers[0].digests[4] != answers[0].digests[3]
        for answer in answers:
            assert answer.stats["skipped_versions"] == 1
            assert all(torch.isfinite(tensor).all() for tensor in answer.model.values())
            (warning,) = answer.warnings
            assert "rank 1 is not finite at element 5 of second.weight" in warning


def test_a_residual_that_outgrew_its_input_is_named_once(cluster: Cluster) -> None:
    # After 30 versions other residuals have outgrown their inputs as well.
    job = Job(versions=25, owed=1e4, arguments={"codec": "topk:ratio=0.001"})
    worker, other, server = cluster.run(3, run, job)
    (said,) = worker.warnings
    assert "the push residual of second.weight is" in said
    assert "times as large as its input in step 15" in said
    (found,) = worker.stats["outgrown_residuals"]
    assert (found["name"], found["step"]) == ("second.weight", 15)
    assert f"note: {said}" in worker.report
    assert worker.stats["remarks"] == (said,)
    for rank in (other, server):
        assert (rank.warnings, rank.stats["outgrown_residuals"]) == ([], ())


def test_a_server_with_adam_says_that_gradients_are_coarse(cluster: Cluster) -> None:
    *workers, server = cluster.run(3, run, Job(inner=adam, arguments={"codec": "3lc:s=1"}))
    (said,) = server.warnings
    assert said.startswith("Adam learns several times too slowly from gradients compressed with")
    assert server.stats["remarks"] == (said,)
    for worker in workers:
        assert (worker.warnings, worker.stats["remarks"]) == ([], ())


def test_a_server_goes_on_from_its_checkpoint(cluster: Cluster, tmp_path: Any) -> None:
    """With an exact codec it equals the uninterrupted run, up to the workers' rounding of sums."""
    for codec in ("raw", "3lc:s=1.75"):
        whole = Job(versions=10, arguments={"codec": codec}, folder=str(tmp_path))
        cut = Job(versions=6, arguments={"codec": codec}, folder=str(tmp_path))
        expected = cluster.run(3, run, whole)
        cluster.run(3, run, cut)
        resumed = Job(versions=10, arguments={"codec": codec}, folder=str(tmp_path), resume=True)
        answers = cluster.run(3, run, resumed)
        check_replicas(answers[:2])
        assert answers[2].stats["steps"] <= 5
        assert list(answers[0].digests) == [7, 8, 9, 10]
        if codec == "raw":
            for name, tensor in answers[0].model.items():
                torch.testing.assert_close(tensor, expected[0].model[name], atol=2e-6, rtol=1e-5)
