"""`ServerOptimizer(pulls="gradients")`: servers average, and every worker steps a replica."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster import Cluster, Failed
from gradwire.torch import ServerOptimizer
from gradwire.torch.options import grouped
from runs import adam, sgd
from server_jobs import Job, run, train_alone
from test_server import check_replicas
from training import batch, make_model
from ways import Inner

TRITS: dict[str, Any] = {"pulls": "gradients", "codec": "terngrad"}


@pytest.mark.parametrize("inner", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("servers", [1, 2])
def test_uncompressed_training_is_that_of_the_local_optimizer(
    cluster: Cluster, inner: Inner, servers: int
) -> None:
    job = Job(
        inner=inner,
        decay=0.8,
        arguments={"pulls": "gradients", "codec": "raw", "servers": servers},
    )
    answers = cluster.run(2 + servers, run, job)
    check_replicas(answers[:2])
    for name, expected in train_alone(job, 2).items():
        torch.testing.assert_close(answers[0].model[name], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_trits_train_every_replica_alike_in_the_bits_of_the_paper(
    cluster: Cluster, workers: int, servers: int
) -> None:
    job = Job(versions=45, arguments=TRITS | {"servers": servers})
    answers = cluster.run(workers + servers, run, job)
    check_replicas(answers[:workers])
    # The batches repeat after three versions.
    losses = [sum(at) / workers for at in zip(*(w.losses for w in answers[:workers]), strict=True)]
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])
    for worker in answers[:workers]:
        assert worker.version == 45
        # 2 bits a value and one scale a tensor; the last byte of a tensor may be padded.
        assert worker.stats["compressed_bits_push"] == pytest.approx(2, abs=0.01)
    for server in answers[workers:]:
        up = math.ceil(math.log2(2 * workers + 1))
        assert server.stats["compressed_bits_pull"] == pytest.approx(up, abs=0.02)
        assert server.stats["values"] > 0
    for what in ("push_bytes", "pull_bytes"):
        of_workers = sum(w.stats[what] for w in answers[:workers])
        assert sum(s.stats[what] for s in answers[workers:]) == of_workers


def test_a_gradient_that_is_not_finite_is_applied_by_nobody(cluster: Cluster) -> None:
    answers = cluster.run(4, run, Job(non_finite=1, arguments=TRITS | {"servers": 2}))
    check_replicas(answers[:2])
    assert answers[0].digests[3] == answers[0].digests[2]  # version 2 changed nothing
    assert answers[0].digests[4] != answers[0].digests[3]
    for answer in answers:
        assert answer.stats["skipped_versions"] == 1
        (warning,) = answer.warnings
        assert "rank 1 is not finite at element 5 of second.weight" in warning


def refuse() -> None:
    model = nn.Linear(300, 4)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    averages = "pulls='gradients' averages the pushes of all workers in each version"
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"pulls": "trits"},
            f"rank {rank}: pulls is 'trits'; valid ones are updates and gradients",
        ),
        ({"staleness": 2}, f"rank {rank}: {averages}; staleness is 2, valid is 0"),
        ({"backup_workers": 1}, f"rank {rank}: {averages}; backup_workers is 1, valid is 0"),
        (
            {"barrier": "tensor", "model": model},
            f"rank {rank}: {averages}; barrier is 'tensor', valid is 'step'",
        ),
        (
            {"pull_codec": "raw"},
            f"rank {rank}, pulls of gradients: tensor '0.0', push terngrad",
        ),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            ServerOptimizer(local, **grouped(TRITS | arguments))


def test_settings_that_cannot_work_are_named(cluster: Cluster) -> None:
    cluster.run(3, refuse)


def test_ranks_with_other_pulls_are_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, run, Job(arguments=TRITS, other={"pulls": "updates"}))
    for answer in fragile_cluster.collect(range(3), seconds=60).values():
        assert isinstance(answer, Failed)
        assert "PeerMismatchError" in answer.message, answer.trace
        assert "pulls of updates" in answer.message, answer.trace


def train(state: dict[str, Any] | None, versions: int, rate_of_rank_1: float = 0.05) -> Any:
    """Trains to a version, from the states of all ranks if they are given. Returns this rank's."""
    model = make_model()
    rank = dist.get_rank()
    rate = rate_of_rank_1 if rank == 1 else 0.05
    local = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = ServerOptimizer(
        local, named_parameters=model.named_parameters(), **grouped({"timeout": 20.0, **TRITS})
    )
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizers"][rank])
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
    while not optimizer.is_server and optimizer.version < versions:
        inputs, labels = batch(rank, optimizer.version % 3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    own = optimizer.state_dict()
    if not optimizer.is_server:
        optimizer.close()
    return {"model": model.state_dict(), "optimizer": own, "version": optimizer.version}


def test_a_training_goes_on_from_the_states_of_its_workers(cluster: Cluster) -> None:
    whole = cluster.run(3, train, None, 8)
    half = cluster.run(3, train, None, 4)
    assert half[2]["optimizer"]["gradwire"]["model"] == {}, "the server has no model"
    state = {"model": half[0]["model"], "optimizers": [rank["optimizer"] for rank in half]}
    resumed = cluster.run(3, train, state, 8)
    for rank in (0, 1):
        assert resumed[rank]["version"] == 8
        for name, expected in whole[0]["model"].items():
            assert torch.equal(resumed[rank]["model"][name], expected)


def fail(cluster: Cluster, *arguments: Any) -> list[str]:
    cluster.start(3, train, *arguments)
    answers = cluster.collect(range(3), seconds=60).values()
    assert all(isinstance(answer, Failed) for answer in answers)
    return [answer.message for answer in answers]


def test_replicas_that_would_differ_are_named(fragile_cluster: Cluster) -> None:
    messages = fail(fragile_cluster, None, 4, 0.5)
    assert all("ranks 0 and 1 differ in their parameter groups: lr" in m for m in messages)


def test_a_worker_without_its_state_is_named(fragile_cluster: Cluster) -> None:
    half = fragile_cluster.run(3, train, None, 4)
    optimizers = [rank["optimizer"] for rank in half]
    optimizers[1]["gradwire"]["version"] = 0
    messages = fail(fragile_cluster, {"model": half[0]["model"], "optimizers": optimizers}, 8)
    assert "rank 2 goes on from version 4, rank 1 from 0" in messages[1]
