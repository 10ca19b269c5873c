"""The whole DDP run equals a single-process simulation in NumPy, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import jobs
from cluster import Cluster
from simulate import quantize_3lc, round_to_bf16, simulate
from training import Options, Trained

CASES: dict[str, dict[str, Any]] = {
    "3lc-1.75": {"codec": "3lc:s=1.75"},
    "3lc-1.0-from-the-first-step": {"codec": "3lc:s=1.0", "start_iter": 0},
    "push-3lc-pull-bf16": {"codec": "3lc:s=1.5", "pull_codec": "bf16"},
    "rules": {
        "codec": "bf16",
        "rules": [("second.*", "3lc:s=1.25"), ("conv.weight", "3lc", "push")],
        "exclude": ["last.*"],
        "min_numel": 1000,
    },
    "raw": {"codec": "raw"},
}
STEPS = 8


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Gradients must be computed with one thread, as in the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=(1, 2, 3, 4))
def trained(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[int, list[list[Trained]]]:
    runs = [Options(steps=STEPS, state=state) for state in CASES.values()]
    return request.param, cluster.run(request.param, jobs.train_each, runs)


@pytest.mark.parametrize("run", range(len(CASES)), ids=list(CASES))
def test_ddp_equals_the_simulation(trained: tuple[int, list[list[Trained]]], run: int) -> None:
    world_size, ranks = trained
    state = dict(list(CASES.values())[run])
    start_iter = state.pop("start_iter", 2)
    buckets = ranks[0][run].buckets
    expected = simulate(world_size, Options(steps=STEPS), state, start_iter, buckets)
    for rank in ranks:
        for name, values in expected.items():
            np.testing.assert_array_equal(
                rank[run].parameters[name].view(np.uint32), values.view(np.uint32), err_msg=name
            )


def test_the_cases_reach_what_they_mean_to(trained: tuple[int, list[list[Trained]]]) -> None:
    ranks = trained[1]
    buckets = ranks[0][0].buckets
    assert buckets[0] != buckets[1], "DDP must cut its buckets again after the first step"
    assert len(buckets[1]) > 1
    raw = {tensor["name"] for tensor in ranks[0][3].stats["raw_tensors"]}
    assert {"last.weight", "last.bias", "conv.bias"} <= raw
    assert "second.weight" not in raw


def test_the_simulation_quantizes_as_written() -> None:
    x = np.array([1.0, -0.4, 0.5, -0.51, 0.0], np.float32)
    np.testing.assert_array_equal(
        quantize_3lc(x, 1.0), np.array([1.0, 0.0, 0.0, -1.0, 0.0], np.float32)
    )
    exact = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8], np.float32)  # ties go to even
    np.testing.assert_array_equal(
        round_to_bf16(exact), np.array([1.0, 1.0, 1.0 + 2**-6], np.float32)
    )
