"""`ServerOptimizer(barrier="tensor")`: the parts of a model go their ways one by one."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from attention_jobs import Attention, Way, train_attention
from cluster import Cluster, Failed
from gradwire.torch import ServerOptimizer
from gradwire.torch.network.loopback import let_others_run
from gradwire.torch.options import grouped
from runs import adam, said_by, sgd, threads
from server_jobs import Job, Served, run
from training import batch, make_model

TENSOR: dict[str, Any] = {"barrier": "tensor"}
CODECS = ["3lc:s=1.5,coder=rice", "qsgd:bits=4", "raw"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_are_those_of_the_barrier_of_steps(cluster: Cluster, codec: str) -> None:
    """Workers read their models after every step."""
    for inner, servers in ((sgd, 1), (adam, 2)):
        job = Job(inner=inner, decay=0.8, arguments={"codec": codec, "servers": servers})
        expected = cluster.run(2 + servers, run, job)
        arguments = job.arguments | TENSOR
        answers = cluster.run(2 + servers, run, replace(job, arguments=arguments))
        for one, other in zip(expected, answers, strict=True):
            assert one.digests == other.digests
            assert one.losses == other.losses
            assert one.final == other.final
            assert one.stats["values"] == other.stats["values"]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_forward_pass_waits_where_it_needs_a_tensor(
    cluster: Cluster, micro_batches: int
) -> None:
    way = Way(micro_batches=micro_batches, servers=2)
    expected = cluster.run(4, train_attention, replace(way, barrier="step"))
    answers = cluster.run(4, train_attention, way)
    for one, other in zip(expected[:2], answers[:2], strict=True):
        assert len(one.losses) == 6
        assert one.losses == other.losses
        assert one.final == other.final


def test_parts_are_pushed_while_others_are_computed(cluster: Cluster) -> None:
    worker = cluster.run(3, train_attention, Way(steps=5))[0]
    names = [name for part in worker.timeline for name in part.names]
    assert sorted(names) == sorted(dict(Attention().named_parameters()))
    first, last = worker.timeline[0], worker.timeline[-1]
    assert "head.weight" in first.names or "tied.bias" in first.names
    assert first.pushed <= last.ready
    for part in worker.timeline:
        assert part.arrived is not None
        assert part.applied is not None
        assert part.ready < part.pushed < part.arrived < part.applied
        assert part.needed is None or part.needed > first.ready


def clip(model: nn.Module, optimizer: ServerOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def change_rate(model: nn.Module, optimizer: ServerOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def compute_again(model: nn.Module, optimizer: ServerOptimizer) -> None:
    model(torch.ones(8, 12, 16)).backward()


MISTAKES = {
    "clip": (clip, "was changed (clipped, unscaled) after it was sent"),
    "options": (change_rate, "the options of a parameter group changed between the first gradient"),
    "twice": (compute_again, "got a second gradient before optimizer.step()"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_push_in_the_backward_pass_rules_out_is_said(
    fragile_cluster: Cluster, mistake: str
) -> None:
    wrong, words = MISTAKES[mistake]
    fragile_cluster.start(3, train_attention, Way(mistake=wrong))
    answers = fragile_cluster.collect(range(3), seconds=60)
    said = [answer.message for answer in answers.values() if isinstance(answer, Failed)]
    assert len(said) == 3
    assert any(words in text for text in said), said


def use_secretly() -> None:
    """From step 2 on, a tensor is used without a call of its module."""
    model = make_model()
    optimizer = ServerOptimizer(sgd(model.parameters()), model=model, **grouped(TENSOR))
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return
    inputs, _ = batch(optimizer.rank, 0)
    for step in range(3):
        result = model(inputs) if step == 0 else inputs @ model.first.weight.T
        result.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)


def test_a_gradient_of_old_values_is_an_error(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, use_secretly)
    answers = fragile_cluster.collect(range(3), seconds=60)
    said = [answer.message for answer in answers.values() if isinstance(answer, Failed)]
    assert any("the gradient of first.weight was computed with old values" in s for s in said), said


def test_a_part_that_is_not_finite_is_skipped_alone(cluster: Cluster) -> None:
    """The others of its version are applied."""
    job = Job(arguments={"codec": "3lc:s=1.75"} | TENSOR, non_finite_at_backward=1)
    answers = cluster.run(3, run, job)
    assert answers[0].digests == answers[1].digests
    assert answers[0].digests[3] != answers[0].digests[2]
    for answer in answers:
        assert answer.stats["skipped_versions"] == 1
        assert all(torch.isfinite(tensor).all() for tensor in answer.model.values())
        (warning,) = answer.warnings
        assert "rank 1 is not finite at element 5 of second.weight" in warning


def read_model() -> list[bool]:
    """For each tensor: whether it changed, and whether the state of the model, and the model after
    `synchronize`, are as after `close`."""
    model = make_model()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    local = sgd(model.parameters())
    optimizer = ServerOptimizer(local, model=model, codec="raw", **grouped(TENSOR))
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
        return []
    inputs, _ = batch(optimizer.rank, 0)
    model(inputs).sum().backward()
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.synchronize()
    now = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer.close()
    assert optimizer.state_dict()["gradwire"]["version"] == 1
    last = dict(model.named_parameters())
    return [
        not torch.allclose(before[name], tensor, atol=1e-4)
        and torch.allclose(state[name], tensor, atol=1e-6)
        and torch.equal(state[name], now[name])
        for name, tensor in last.items()
    ]


def test_the_state_of_the_model_is_that_of_the_version(cluster: Cluster) -> None:
    for answer in cluster.run(3, read_model)[:2]:
        assert len(answer) == 10
        assert all(answer)


def test_a_worker_that_dies_in_the_middle_of_a_step_is_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, train_attention, Way(victim=1, steps=1000))
    for rank, answer in fragile_cluster.collect([0, 2], seconds=60).items():
        assert isinstance(answer, Failed)
        assert "rank 1 is gone" in answer.message, (rank, answer.trace)


def test_it_goes_on_from_its_checkpoint(cluster: Cluster, tmp_path: Any) -> None:
    arguments = {"codec": "3lc:s=1.75", "servers": 2} | TENSOR
    job = Job(versions=10, arguments=arguments, folder=str(tmp_path))
    cluster.run(4, run, replace(job, versions=6))
    answers = cluster.run(4, run, replace(job, resume=True))
    assert [answer.version for answer in answers] == [10] * 4
    assert answers[0].final == answers[1].final
    assert list(answers[0].digests) == [7, 8, 9, 10]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"barrier": "layer"}, "barrier is 'layer'; valid ones are 'step' and 'tensor'"),
    "model": (TENSOR, "barrier='tensor' needs model="),
    "stranger": (TENSOR | {"model": nn.Linear(3, 3)}, "which is no parameter of model="),
}


def test_settings_that_exclude_each_other_are_refused() -> None:
    def refuse(rank: int) -> None:
        model = make_model()
        for arguments, words in REFUSED.values():
            given = arguments | ({"model": model} if arguments.get("model") is True else {})
            make = partial(ServerOptimizer, named_parameters=model.named_parameters())
            said = said_by(partial(make, sgd(model.parameters()), **grouped(given)))
            assert rank == 1 or (said.startswith("ValueError") and words in said)  # it serves

    threads(2, refuse)


def differ() -> Served:
    return run(Job(arguments=TENSOR if dist.get_rank() else {}))


def test_ranks_with_different_barriers_are_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, differ)
    for answer in fragile_cluster.collect(range(3), seconds=60).values():
        assert isinstance(answer, Failed)
        assert "servers with barrier step" in answer.message, answer.trace


@pytest.mark.parametrize("looks", ["saves", "evaluates"])
def test_a_late_worker_may_look_at_its_model_afterwards(looks: str) -> None:
    """It may have taken a step more than the others, for a version that nobody makes."""

    def train(rank: int, seed: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
        optimizer = ServerOptimizer(
            SGD(model.parameters(), lr=0.05), "raw", model=model, backup_workers=1, barrier="tensor"
        )
        optimizer.connect()
        if optimizer.is_server:
            optimizer.serve()
            return
        delays, inputs = random.Random(7 * seed + rank), torch.ones(4, 8)
        while optimizer.version < 3:
            for _ in range(delays.randint(0, 3 * rank)):
                let_others_run()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        if looks == "saves":
            model.state_dict()
        else:
            with torch.no_grad():
                model(inputs)
        optimizer.close()

    for seed in range(20):
        threads(4, partial(train, seed=seed))
