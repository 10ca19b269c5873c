"""The hook with buckets on a device trains bit for bit as with buckets on the CPU.

Here the kernels run on the CPU, which plays the device.
"""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import jobs
import scaled_jobs
from cluster import Cluster, Died, Failed
from gradwire.torch import GradwireState
from gradwire.torch.network import engine
from on_host import device_kernels
from training import Options, Trained, train
from ways import CUT_ONCE


def train_on_device(all_options: list[Options]) -> list[Trained]:
    with device_kernels():
        return [train(options) for options in all_options]


def train_one_on_device(options: list[Options], on_device: list[int]) -> Trained:
    """Some ranks have their buckets on a device, the others on the CPU."""
    rank = dist.get_rank()
    if rank not in on_device:
        return train(options[rank])
    with device_kernels():
        return train(options[rank])


def train_and_signal_on_device(options: Options, victim: int, at_step: int, number: int) -> None:
    with device_kernels():
        jobs.train_and_signal(options, victim, at_step, number)


def train_and_fail_between_push_and_pull(options: Options, victim: int, at_step: int) -> None:
    """The victim raises after it has received a push, before it makes a pull."""

    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            broken = mock.Mock(side_effect=ArithmeticError("planted"))
            mock.patch.object(engine, "_receive", broken).start()

    try:
        with device_kernels():
            train(options, on_step)
    finally:
        mock.patch.stopall()


def train_scaled_on_device(*arguments: Any) -> scaled_jobs.Scaled:
    with device_kernels():
        return scaled_jobs.train_scaled(*arguments)


STATES: list[dict[str, Any]] = [
    {"codec": "3lc:s=1.75"},
    {"codec": "3lc:s=1.75", "memory": "pinned"},
    {"codec": "3lc:s=1.5,coder=none", "pull_codec": "int8"},
    {"codec": "qsgd:bits=3", "seed": 9, "rules": [("conv.*", "topk")]},
]


@pytest.fixture(scope="module")
def on_cpu(cluster: Cluster) -> list[Any]:
    return cluster.run(3, jobs.train_each, [Options(4, state) for state in STATES])


@pytest.mark.parametrize("on_device", [[0, 1, 2], [1]])
def test_training_is_that_on_the_cpu(
    cluster: Cluster, on_cpu: list[Any], on_device: list[int]
) -> None:
    """The buckets of all ranks, or of some, are on a device; all exchange the same packets."""
    for index, state in enumerate(STATES):
        options = [Options(4, state)] * 3
        trained = cluster.run(3, train_one_on_device, options, on_device)
        for cpu, device in zip(on_cpu, trained, strict=True):
            assert cpu[index].digest == device.digest
            for name in ("steps", "raw_steps", "values", "push_bytes", "pull_bytes"):
                assert cpu[index].stats[name] == device.stats[name], name


@pytest.mark.parametrize(
    "state",
    [
        {"codec": "3lc:s=1", "exchange": "ring"},
        {"codec": "qsgd:ef=on", "exchange": "broadcast"},
        {"codec": "int8", "exchange": "hierarchical", "ranks_per_machine": 2},
    ],
)
def test_other_exchanges(cluster: Cluster, state: dict[str, Any]) -> None:
    options = [Options(4, state)]
    cpu = cluster.run(4, jobs.train_each, options)
    device = cluster.run(4, train_on_device, options)
    assert [rank[0].digest for rank in cpu] == [rank[0].digest for rank in device]


def test_gradients_of_16_bits(cluster: Cluster) -> None:
    options = Options(3, {"codec": "3lc:coder=rice,residual=bf16"}, dtype=torch.bfloat16)
    cpu = cluster.run(2, jobs.train_each, [options])
    device = cluster.run(2, train_on_device, [options])
    assert cpu[0][0].digest == device[0][0].digest


@pytest.mark.parametrize("on_device", [[0, 1, 2], []])
def test_a_checkpoint_goes_on_where_the_other_kind_stopped(
    cluster: Cluster, on_device: list[int]
) -> None:
    """A device's state is loaded on the CPU, and a CPU's state on a device."""
    state = {"codec": "3lc:s=1.75"}
    whole = cluster.run(3, jobs.train_each, [Options(5, state, CUT_ONCE)])
    first = [Options(3, state, CUT_ONCE)] * 3
    others = [rank for rank in range(3) if rank not in on_device]
    stopped = cluster.run(3, train_one_on_device, first, on_device)
    rest = Options(
        2,
        state,
        CUT_ONCE,
        start=3,
        residuals=[rank.residuals for rank in stopped],
        weights=stopped[0].weights,
    )
    for rank in cluster.run(3, train_one_on_device, [rest] * 3, others):
        assert rank.digest == whole[0][0].digest


def test_a_step_that_is_not_finite_is_skipped(cluster: Cluster) -> None:
    arguments = (6, 3, "second.weight", {"codec": "3lc:s=1.5"})
    cpu = cluster.run(2, scaled_jobs.train_scaled, *arguments)
    device = cluster.run(2, train_scaled_on_device, *arguments)
    for a, b in zip(cpu, device, strict=True):
        assert a.digests == b.digests
        assert a.skipped == b.skipped
        assert a.warnings == b.warnings
        assert sum(b.skipped) == 1


def test_a_killed_rank_is_named(fragile_cluster: Cluster) -> None:
    options = Options(steps=1000, state={"codec": "3lc"})
    job = train_and_signal_on_device
    fragile_cluster.start(3, job, options, 1, 3, signal.SIGKILL)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers[1], Died)
    for rank in (0, 2):
        assert isinstance(answers[rank], Failed)
        assert "rank 1 is gone" in answers[rank].message, answers[rank].trace


def test_a_rank_that_fails_between_two_messages_is_named(fragile_cluster: Cluster) -> None:
    options = Options(steps=1000, state={"codec": "3lc", "timeout": 20.0})
    job = train_and_fail_between_push_and_pull
    fragile_cluster.start(3, job, options, 1, 3)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert "ArithmeticError: planted" in answers[1].message
    for rank in (0, 2):
        assert "PeerStoppedError" in answers[rank].message, answers[rank].trace
        assert "rank 1" in answers[rank].message
        assert "planted" in answers[rank].message


def test_an_exchange_that_kernels_lack_is_done_on_the_host(cluster: Cluster) -> None:
    options = [Options(4, {"exchange": "terngrad"})]
    cpu = cluster.run(2, jobs.train_each, options)
    there = cluster.run(2, train_on_device, options)
    assert [rank[0].digest for rank in cpu] == [rank[0].digest for rank in there]


def test_a_captured_step_is_refused() -> None:
    bucket = mock.Mock()
    with (
        mock.patch("gradwire.torch.hook.ddp_module.is_capturing", return_value=True),
        pytest.raises(RuntimeError, match="can't be captured in a CUDA graph"),
    ):
        GradwireState().average(bucket)
