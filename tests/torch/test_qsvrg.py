"""QSVRG keeps what QSGD's theorem 3.6 promises, in one process and over ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import finite_sums
import gradwire
from cluster import Cluster
from finite_sums import PROBLEMS, FiniteSum, M, N
from gradwire.contrib.qsvrg import QSVRG, QSVRGEpoch
from gradwire.torch import loopback
from gradwire.torch.errors import CommunicationError


def minimize_share(problem: str, epochs: int, steps: int) -> tuple[list[float], list[Any], int]:
    """Each rank holds its share of the functions. Returns weight, epochs and pushed bytes."""
    share = finite_sums.M // dist.get_world_size()
    first = dist.get_rank() * share
    chosen = finite_sums.PROBLEMS[problem]()
    weight = torch.nn.Parameter(torch.zeros(finite_sums.N))
    optimizer = chosen.optimizer(weight, share, first, steps=steps, seed=3)
    done = [optimizer.epoch() for _ in range(epochs)]
    return weight.tolist(), done, optimizer.stats().push_bytes


def differ(what: str) -> None:
    """Rank 1 has another count, or other parameters."""
    odd = dist.get_rank() == 1
    chosen = finite_sums.least_squares()
    weight = torch.nn.Parameter(torch.full((finite_sums.N,), float(odd and what == "parameters")))
    optimizer = chosen.optimizer(weight, 9 if odd and what == "count" else 10)
    optimizer.epoch()


def go_on_after_close() -> str:
    chosen = finite_sums.least_squares()
    weight = torch.nn.Parameter(torch.zeros(finite_sums.N))
    optimizer = chosen.optimizer(weight)
    optimizer.epoch()
    optimizer.close()
    try:
        optimizer.epoch()
    except CommunicationError as error:
        return str(error)
    return "it went on"


EPOCHS, SEEDS, WORKERS = 3, 3, 4
REPOSITORY = Path(__file__).parents[2]


def minimize(
    problem: FiniteSum, epochs: int, workers: int = WORKERS, **options: Any
) -> list[tuple[torch.Tensor, QSVRG, list[QSVRGEpoch], list[float]]]:
    """Of each worker in this process: the weight, the optimizer, its epochs, and the function's
    value after each."""

    def run(rank: int) -> tuple[torch.Tensor, QSVRG, list[QSVRGEpoch], list[float]]:
        weight = torch.nn.Parameter(torch.zeros(N))
        share = M // workers
        optimizer = problem.optimizer(weight, share, rank * share, **options)
        done, values = [], []
        for _ in range(epochs):
            done.append(optimizer.epoch())
            values.append(problem.value(weight))
        return weight.detach(), optimizer, done, values

    return loopback.run(workers, run)


def test_the_codec_is_that_of_the_theorem() -> None:
    (_, optimizer, _, _), *_ = minimize(finite_sums.least_squares(), 0)
    assert optimizer.codec == "qsgd:levels=10,bucket=96,norm=l2,coder=elias-dense"
    assert optimizer.factor <= 0.9
    (_, shorter, _, _), *_ = minimize(finite_sums.least_squares(), 0, steps=180)
    assert shorter.factor > optimizer.factor


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_gap_falls_by_the_proven_factor_with_the_proven_bits(name: str) -> None:
    problem = PROBLEMS[name]()
    best = problem.minimum()
    gaps = np.zeros(EPOCHS + 1)
    for seed in range(SEEDS):
        (_, optimizer, epochs, values), *_ = minimize(problem, EPOCHS, seed=seed)
        gaps += (np.array([problem.value(torch.zeros(N)), *values]) - best) / SEEDS
        for done in epochs:
            # A worker broadcasts F n bits, and in each step 4 n + F on average: the paper says
            # 2.8 n + F, which holds if the updates' tails are heavy (docs/reference/qsvrg.md).
            assert done.full_bits == 32 * N
            assert done.update_bits <= (4 * N + 32) * done.steps
            paper = (32 + 2.8 * N) * (done.steps + 1) + 32 * N
            assert done.full_bits + done.update_bits <= paper * 1.05
            packets = (WORKERS - 1) * (done.steps + 1)
            assert done.sent_bytes * 8 > (WORKERS - 1) * (done.full_bits + done.update_bits)
            assert done.sent_bytes * 8 < packets * (400 + (4 * N + 32)) + 96 * N
    for epoch in range(1, EPOCHS + 1):
        assert gaps[epoch] <= optimizer.factor * gaps[epoch - 1]
    assert gaps[EPOCHS] < gaps[0] / 100, "far better than proven"


def test_without_variance_reduction_the_gap_stays() -> None:
    """The same steps with the gradients of single functions: QSGD with a constant step."""
    problem = finite_sums.least_squares()
    best = problem.minimum()
    (_, optimizer, _, values), *_ = minimize(problem, EPOCHS)
    reduced = values[-1] - best
    weight = torch.nn.Parameter(torch.zeros(N))
    draws = np.random.default_rng(0)
    mean = torch.zeros(N)
    for step in range(EPOCHS * optimizer.steps):
        update = torch.zeros(N)
        for worker in range(WORKERS):
            j = torch.tensor([int(draws.integers(M))])
            (gradient,) = torch.autograd.grad(problem.loss(weight, j), weight)
            frame = gradwire.encode(gradient.numpy(), optimizer.codec, step=step, stream=worker)
            update += torch.from_numpy(gradwire.decode(frame)) / WORKERS
        with torch.no_grad():
            weight.sub_(update, alpha=optimizer.lr)
            mean += weight / optimizer.steps * (step >= (EPOCHS - 1) * optimizer.steps)
    assert problem.value(mean) - best > 3 * reduced


def test_ranks_compute_the_bits_of_one_process(cluster: Cluster) -> None:
    name = "logistic regression"
    problem = PROBLEMS[name]()
    here = minimize(problem, 2, steps=20, seed=3)
    apart = cluster.run(WORKERS, minimize_share, name, 2, 20)
    for (weight, optimizer, done, _), (values, epochs, pushed) in zip(here, apart, strict=True):
        assert values == weight.tolist()
        assert epochs == done
        assert sum(epoch.sent_bytes for epoch in epochs) == pushed == optimizer.stats().push_bytes


def test_a_closed_one_takes_no_further_epoch(cluster: Cluster) -> None:
    for said in cluster.run(2, go_on_after_close):
        assert "it was closed" in said


def test_a_lone_worker_sends_nothing(cluster: Cluster) -> None:
    ((values, epochs, pushed),) = cluster.run(1, minimize_share, "least squares", 1, 20)
    assert epochs == [QSVRGEpoch(20, 0, 0, 0)]
    assert pushed == 0
    ((weight, _, done, _),) = minimize(finite_sums.least_squares(), 1, 1, steps=20, seed=3)
    assert done == epochs
    assert values == weight.tolist()


@pytest.mark.parametrize(
    ("what", "named"),
    [("count", "QSVRG of (9|10) functions a worker"), ("parameters", "parameters [0-9a-f]{64}")],
)
def test_ranks_that_differ_are_named(fragile_cluster: Cluster, what: str, named: str) -> None:
    fragile_cluster.start(3, differ, what)
    for answer in fragile_cluster.collect(range(3)).values():
        assert "PeerMismatchError" in answer.message, answer.trace
        assert re.search(f"rank 1 has '{named}", answer.message), answer.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "QSVRG minimizes a finite sum: count is 0, valid are 1, 2, "),
        ({}, r"needs a process group: .*gradwire.torch.loopback.run\(workers, function\)"),
        ({"convexity": 0.0}, "convexity is 0.0 and smoothness 1.25; .*add L2 regularization"),
        ({"convexity": 2.0}, "valid are 0 < convexity <= smoothness"),
        ({"lr": 0.0}, "both must be above 0"),
        ({"steps": 0}, "both must be above 0"),
        ({"params": []}, "no parameters"),
        ({"codec": "qsgd:levels=9999"}, "from 1 to 8191"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(N))], "count": M}
    given |= {"smoothness": 1.25, "convexity": 0.25, "loss_of": torch.sum}
    with pytest.raises(ValueError, match=message):
        QSVRG(**given | options)


def test_other_parameters_are_refused() -> None:
    for parameter in (torch.zeros(3), torch.zeros(3, dtype=torch.float64, requires_grad=True)):
        with pytest.raises(TypeError, match="dense float32 parameters on the CPU"):
            QSVRG([parameter], torch.sum, 4, smoothness=1, convexity=1)


@pytest.mark.filterwarnings("ignore::gradwire.torch.errors.NonFiniteStepWarning")
def test_a_gradient_that_is_not_finite_leaves_the_parameters() -> None:

    def run(rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(N))
        optimizer = QSVRG(
            [weight],
            lambda j: (weight * float("inf")).sum() * j.sum(),
            M,
            smoothness=1.0,
            convexity=1.0,
        )
        with pytest.raises(FloatingPointError, match="is not finite in exchange 0"):
            optimizer.epoch()
        return weight.tolist()

    assert loopback.run(2, run) == [[1.0] * N] * 2


def test_the_example_prints_what_its_page_shows() -> None:
    page = (REPOSITORY / "docs" / "reference" / "qsvrg.md").read_text(encoding="utf-8")
    expected = re.findall(r"^epoch .*$", page, re.MULTILINE)
    assert len(expected) == 4
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--master-port=0"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    for launcher in ([], torchrun):
        result = subprocess.run(
            [sys.executable, *launcher, str(REPOSITORY / "examples" / "qsvrg.py")],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == expected


def test_a_function_may_leave_a_parameter_out() -> None:
    """Its gradient of that parameter is 0, as if it had it times 0."""

    def minimum(left_out: bool, rank: int) -> torch.Tensor:
        weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        one, other = weights

        def loss_of(j: torch.Tensor) -> torch.Tensor:
            share = (j % 2 == 0).float().mean()
            least = one.square().sum() / 2
            return least if left_out and share == 0 else least + share * other.square().sum() / 2

        QSVRG(weights, loss_of, 4, smoothness=1.0, convexity=0.5).epoch()
        return torch.cat([weight.detach() for weight in weights])

    ends = [loopback.run(2, run)[0] for run in (partial(minimum, True), partial(minimum, False))]
    assert torch.equal(*ends)
    assert ends[0].abs().max() < 0.9
