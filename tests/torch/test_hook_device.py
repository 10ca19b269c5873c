"""The hook with buckets on a device: the same training, bit for bit, as with them on the CPU.

The device is the CPU, on which the kernels run here; Gloo stands for NCCL.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

import device_jobs
import jobs
from cluster import Cluster, Died, Failed
from gradwire.torch import GradwireState
from training import Options

CUT_ONCE = {"bucket_cap_mb": 0.05, "find_unused_parameters": True}
STATES: list[dict[str, Any]] = [
    {"codec": "3lc:s=1.75"},
    {"codec": "3lc:s=1.5,coder=none", "pull_codec": "int8"},
    {"codec": "qsgd:bits=3", "seed": 9, "rules": [("conv.*", "topk")]},
]
TRANSPORTS = ("gloo", "nccl")


@pytest.fixture(scope="module")
def on_cpu(cluster: Cluster) -> list[Any]:
    return cluster.run(3, jobs.train_each, [Options(4, state) for state in STATES])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_is_that_on_the_cpu(cluster: Cluster, on_cpu: list[Any], transport: str) -> None:
    options = [Options(4, {**state, "transport": transport}) for state in STATES]
    trained = cluster.run(3, device_jobs.train_on_device, options)
    for cpu, device in zip(on_cpu, trained, strict=True):
        for a, b in zip(cpu, device, strict=True):
            assert a.digest == b.digest
            for name in ("steps", "raw_steps", "values"):
                assert a.stats[name] == b.stats[name]
            # Heads of messages differ from those of packets.
            assert b.stats["push_bytes"] == pytest.approx(a.stats["push_bytes"], rel=0.02)
            assert b.stats["control_bytes"] >= 0


def test_gradients_of_16_bits(cluster: Cluster) -> None:
    options = Options(3, {"codec": "3lc:coder=rice,residual=bf16"}, dtype=torch.bfloat16)
    cpu = cluster.run(2, jobs.train_each, [options])
    device = cluster.run(2, device_jobs.train_on_device, [options])
    assert cpu[0][0].digest == device[0][0].digest


@pytest.mark.parametrize("on_device", [[0, 1, 2], []])
def test_a_checkpoint_goes_on_where_the_other_kind_stopped(
    cluster: Cluster, on_device: list[int]
) -> None:
    """Saved by the hook of a device and loaded by that of the CPU, and the other way round."""
    state = {"codec": "3lc:s=1.75"}
    whole = cluster.run(3, jobs.train_each, [Options(5, state, CUT_ONCE)])
    first = [Options(3, state, CUT_ONCE)] * 3
    others = [rank for rank in range(3) if rank not in on_device]
    stopped = cluster.run(3, device_jobs.train_one_on_device, first, on_device)
    rest = Options(
        2,
        state,
        CUT_ONCE,
        start=3,
        residuals=[rank.residuals for rank in stopped],
        weights=stopped[0].weights,
    )
    for rank in cluster.run(3, device_jobs.train_one_on_device, [rest] * 3, others):
        assert rank.digest == whole[0][0].digest


def test_a_step_that_is_not_finite_is_skipped(cluster: Cluster) -> None:
    arguments = (6, 3, "second.weight", {"codec": "3lc:s=1.5"})
    cpu = cluster.run(2, jobs.train_scaled, *arguments)
    device = cluster.run(2, device_jobs.train_scaled_on_device, *arguments)
    for a, b in zip(cpu, device, strict=True):
        assert a.digests == b.digests
        assert a.skipped == b.skipped
        assert a.warnings == b.warnings
        assert sum(b.skipped) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_named(fragile_cluster: Cluster, transport: str) -> None:
    options = Options(steps=1000, state={"codec": "3lc", "transport": transport})
    job = device_jobs.train_and_signal_on_device
    fragile_cluster.start(3, job, options, 1, 3, signal.SIGKILL)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers[1], Died)
    for rank in (0, 2):
        assert isinstance(answers[rank], Failed)
        assert "rank 1 is gone" in answers[rank].message, answers[rank].trace


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_fails_between_two_messages_is_named(
    fragile_cluster: Cluster, transport: str
) -> None:
    options = Options(steps=1000, state={"codec": "3lc", "timeout": 20.0, "transport": transport})
    job = device_jobs.train_and_fail_between_push_and_pull
    fragile_cluster.start(3, job, options, 1, 3)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert "ArithmeticError: planted" in answers[1].message
    for rank in (0, 2):
        assert "PeerStoppedError" in answers[rank].message, answers[rank].trace
        assert "rank 1" in answers[rank].message
        assert "planted" in answers[rank].message


def test_ranks_on_unlike_devices_are_named(fragile_cluster: Cluster) -> None:
    options = [Options(4, {"codec": "3lc", "transport": "gloo"})] * 3
    fragile_cluster.start(3, device_jobs.train_one_on_device, options, [0, 2])
    answers = fragile_cluster.collect(range(3), seconds=60)
    for answer in answers.values():
        assert "PeerMismatchError" in answer.message, answer.trace
        assert "messages on cpu" in answer.message


def test_other_exchanges_are_refused(fragile_cluster: Cluster) -> None:
    options = [Options(4, {"codec": "3lc", "exchange": "ring"})]
    fragile_cluster.start(2, device_jobs.train_on_device, options)
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert "averaged by exchange='sharded' alone, not by 'ring'" in answer.message


def test_transports_are_checked(fragile_cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="transport is 'tcp'; valid ones are: auto, nccl, gloo"):
        GradwireState(transport="tcp")
    fragile_cluster.start(2, jobs.train_each, [Options(4, {"transport": "nccl"})])
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert "transport='nccl' is for gradients on a GPU" in answer.message


# CUDA graphs -------------------------------------------------------------------------------------


def test_captured_steps_are_the_same_steps(cluster: Cluster) -> None:
    state = {"codec": "3lc:s=1.75,coder=none", "transport": "nccl"}
    eager = cluster.run(3, device_jobs.train_captured, state, 7, 7)
    captured = cluster.run(3, device_jobs.train_captured, state, 4, 7)
    assert captured == eager
    assert eager[0][1:] == (0, [False] * 7)


def test_a_captured_step_that_is_not_finite_is_nan_everywhere(cluster: Cluster) -> None:
    state = {"codec": "int8", "transport": "nccl"}
    ranks = cluster.run(2, device_jobs.train_captured, state, 3, 6, 4)
    assert ranks[0] == ranks[1]
    assert ranks[0][1:] == (1, [False, False, False, False, True, False])


@pytest.mark.parametrize(
    ("state", "captured_from", "why"),
    [
        ({"codec": "3lc:coder=none"}, 1, "take some more iterations first"),
        ({"codec": "3lc:coder=rice"}, 4, "can't be captured in a CUDA graph"),
        ({"codec": "3lc:coder=none", "transport": "gloo"}, 4, "it takes transport='nccl'"),
    ],
)
def test_what_cannot_be_captured_says_so(
    fragile_cluster: Cluster, state: dict[str, Any], captured_from: int, why: str
) -> None:
    job = device_jobs.train_captured
    fragile_cluster.start(2, job, {"transport": "nccl", **state}, captured_from, 6)
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert isinstance(answer, Failed)
        assert why in answer.message, answer.trace
