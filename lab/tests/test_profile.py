"""Profiles: when the gradients of a model come, and how DDP cuts them into buckets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Timer

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster
from gradwire.torch import loopback
from gradwire_lab.plan import meters
from gradwire_lab.plan.cluster import Cluster as Network
from gradwire_lab.plan.measure import _RESIDUAL_STEPS, measure_codec
from gradwire_lab.plan.meters import MessageMeter, measure_bytes
from gradwire_lab.plan.predict import LayerBucket, cut_buckets
from gradwire_lab.plan.profile import CodecSpeed, Layer, PlanError, Profile, read_profile
from gradwire_lab.plan.recorder import StepRecorder, profile_of, without_exchange
from gradwire_lab.plan.simulate import simulate
from processes import processes_of

SLEEP = 0.03


class _SlowBackward(torch.autograd.Function):
    """Sleeps in the backward pass."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return gradients[0]


class _Slow(nn.Module):
    """Three layers; before the gradients of the first two come, the backward pass sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        for layer in (self.first, self.second):
            x = _SlowBackward.apply(layer(x))  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.third(x)
        return result


def _record(model: nn.Module, steps: int) -> StepRecorder:
    with StepRecorder(model) as recorder:
        for _ in range(steps):
            recorder.begin_step()
            model(torch.ones(1, 8)).sum().backward()
            time.sleep(SLEEP)
            recorder.end_step()
    return recorder


def test_a_profile_says_when_each_gradient_comes() -> None:
    model = _Slow()
    profile = profile_of("slow", model, [_record(model, 6).steps])
    assert [layer.name for layer in profile.layers] == [
        "third.weight",
        "second.weight",
        "first.weight",
    ]
    seconds = [layer.backward_seconds for layer in profile.layers]
    assert seconds[0] < SLEEP
    for found in (profile.forward_seconds, *seconds[1:], profile.rest_seconds):
        assert found >= SLEEP
    assert profile.compute_seconds == pytest.approx(sum(seconds) + 2 * SLEEP, rel=0.5)


def test_a_mark_counts_when_the_last_rank_has_reached_it() -> None:
    model = _Slow()
    steps = _record(model, 5).steps
    late = [{mark: seconds + 1.0 for mark, seconds in step.items()} for step in steps]
    alone, together = profile_of("a", model, [steps]), profile_of("b", model, [steps, late])
    assert together.forward_seconds == pytest.approx(alone.forward_seconds + 1.0)
    assert together.backward_seconds == pytest.approx(alone.backward_seconds)
    assert together.workers == 2


def test_hooks_go_with_the_block() -> None:
    model = _Slow()
    recorder = _record(model, 1)
    model(torch.ones(1, 8)).sum().backward()
    assert len(recorder.steps) == 1
    assert not model._forward_hooks


def test_too_few_steps_and_missing_gradients_are_errors() -> None:
    model = _Slow()
    with pytest.raises(PlanError, match="more than 3 steps"):
        profile_of("few", model, [_record(model, 3).steps])
    steps = _record(model, 5).steps
    model.unused = nn.Linear(2, 2, bias=False)
    with pytest.raises(PlanError, match=r"unused\.weight"):
        profile_of("unused", model, [steps])


def _buckets_of_ddp() -> tuple[list[int], Profile]:
    """The sizes of DDP's buckets after its first step, and the profile of the same model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(30)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    sizes: list[int] = []

    def note(_: object, bucket):  # type: ignore[no-untyped-def]
        if bucket.index() == 0:
            sizes.clear()
        sizes.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    with StepRecorder(model) as recorder:
        for _ in range(5):
            recorder.begin_step()
            ddp(torch.ones(1, 300)).sum().backward()
            recorder.end_step()
    return sizes, profile_of("deep", model, [recorder.steps])


def test_buckets_are_those_of_ddp(cluster: Cluster) -> None:
    for sizes, profile in cluster.run(2, _buckets_of_ddp):
        cut = cut_buckets(profile, bucket_bytes=2 * 2**20)
        assert [bucket.numel for bucket in cut] == sizes
        assert len(sizes) > 4


def _gradients_without_exchange() -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4, bias=False)
    ddp = without_exchange(model)
    dist.barrier()
    for parameter in model.parameters():
        parameter.grad = None
    ddp(torch.full((1, 4), float(dist.get_rank() + 1))).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def test_steps_without_exchange_keep_each_ranks_gradient(cluster: Cluster) -> None:
    for rank, gradient in enumerate(cluster.run(2, _gradients_without_exchange)):
        assert torch.equal(gradient, torch.full((4, 4), float(rank + 1)))


def _gradients_beside_a_future() -> tuple[torch.Tensor, float]:
    """The gradient, and how long the future was under way when it came."""
    model = nn.Linear(4, 4, bias=False)
    began = []

    def begin() -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        began.append(time.perf_counter())
        Timer(SLEEP, lambda: future.set_result(None)).start()
        return future

    ddp = without_exchange(model, beside=begin)
    ddp(torch.ones(1, 4)).sum().backward()
    ended = time.perf_counter()
    assert model.weight.grad is not None
    return model.weight.grad, ended - began[0]


def test_a_step_waits_for_what_goes_beside_it(cluster: Cluster) -> None:
    for gradient, waited in cluster.run(2, _gradients_beside_a_future):
        assert torch.equal(gradient, torch.ones(4, 4))
        assert waited >= SLEEP


def _measure_messages() -> tuple[tuple[float, float], float]:
    meter = MessageMeter()
    began = time.perf_counter()
    for _ in range(3):
        meter.measure(None)
    return meter.close(), time.perf_counter() - began


def test_messages_alone_are_all_of_their_steps(cluster: Cluster) -> None:
    costs = cluster.run(3, _measure_messages)
    assert len({found for found, _ in costs}) == 1, "all ranks wait for the last one"
    (message, reduce), took = costs[0]
    assert 0 < 8 * message < took
    assert 0 < reduce < took


SIDE, CODEC = 256, "3lc:s=1.00,coder=rice"


def _gradient_of(rank: int) -> NDArray[np.float32]:
    return np.random.default_rng(rank).standard_normal((SIDE, SIDE)).astype(np.float32)


def _measure_codec() -> CodecSpeed:
    gradients = [{"weight": _gradient_of(dist.get_rank())}]
    return measure_codec(CODEC, gradients, dist.new_group())


def test_bits_are_those_of_workers_and_servers(cluster: Cluster) -> None:
    measured = cluster.run(3, _measure_codec)
    values = np.concatenate([_gradient_of(rank).ravel() for rank in range(3)])
    bucket = LayerBucket((Layer("weight", (SIDE, SIDE), 0.0),), 0.0)
    half, whole = (
        simulate(
            Network(3, 1e9, servers=1),
            *(CODEC, "server:pulls=gradients", [bucket], values),
            steps=steps,
            stride=SIDE**2,
        )
        for steps in (_RESIDUAL_STEPS // 2, _RESIDUAL_STEPS)
    )
    # A worker pushes what it has; the server sends to three workers.
    of_server = 2 * whole.bytes_sent - half.bytes_sent
    of_all = 2 * whole.bytes_of_all - half.bytes_of_all
    pushed, pulled = (8 * sent / 3 / SIDE**2 for sent in (of_all - of_server, of_server))
    assert fmean(one.bits for one in measured) == pytest.approx(pushed, rel=0.02)
    for one in measured:
        assert one.pull_bits == pytest.approx(pulled, rel=0.02)
    assert pulled != pytest.approx(pushed, rel=0.1), "else nothing is shown"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_measures_a_model(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "mlp.json"
    command = ["plan", "--model", "mlp", "--workers", str(workers), "--profile-steps", "5"]
    command += ["--codec", "int8", "--profile-out", str(file)]
    script = "import sys; from gradwire import cli; cli.main(sys.argv[1:])"
    run = [sys.executable, "-c", script, *command]
    subprocess.run(run, check=True, capture_output=True, timeout=300)
    profile = read_profile(file)
    assert profile.workers == workers
    assert profile.numel == 28 * 28 * 256 + 256 + 3 * (256 * 256 + 256) + 256 * 10 + 10
    assert profile.codecs["int8"].bits == pytest.approx(8, abs=0.1)
    # On a busy machine, what is measured twice differs by more than messages and bytes cost.
    costs = profile.transport
    assert min(costs.message_seconds, costs.byte_seconds) >= 0
    assert min(costs.allreduce_seconds, costs.allreduce_byte_seconds) >= 0


def test_bytes_cost_what_a_large_bucket_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock says 1 s for the bucket of one value and 3 s for the other, of 4,000 bytes, of which
    each of two ranks sends half and returns half."""

    def timed(call: Callable[[], object]) -> float:
        call()
        assert isinstance(call, partial)
        return 3.0 if call.args[0] else 1.0

    monkeypatch.setattr(meters, "time_together", timed)
    for costs in loopback.run(2, lambda rank: measure_bytes(1000, 2)):
        assert costs == pytest.approx((2 / 4000, 2 / 4000), rel=0.05)


TOGETHER = """
import time
from gradwire_lab.plan.measure import _run_together
if __name__ == "__main__":
    print("begins", flush=True)
    _run_together(2, time.sleep, 600)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_processes_that_measure_together_end_with_the_command(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "together.py").write_text(TOGETHER)
    command = subprocess.Popen(
        [sys.executable, "together.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    began = time.monotonic()
    while len(started := processes_of(command.pid)) < 3 and time.monotonic() < began + 300:
        time.sleep(0.1)
    # Ctrl-C in a terminal reaches all of them.
    (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
    said = command.communicate(timeout=300)[1]  # when nobody has its stderr any more
    assert command.returncode == -number
    assert len(started) == 3, "two and multiprocessing's resource tracker"
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1, said  # that of the script
    if number != signal.SIGKILL:
        assert [path.name for path in tmp_path.iterdir()] == ["together.py"]
