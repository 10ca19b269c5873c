"""The hook with NaN, infinities, denormals and values whose sum with a residual overflows.

With and without a gradient scaler, on the CPU and with the GPU's kernels on the host.
"""

from __future__ import annotations

import numpy as np
import pytest

import edge_jobs
from cluster import Cluster
from edge_jobs import NAME, SPOILT, STEPS, Edge

CODECS = ["3lc", "3lc:residual=bf16", "onebit:bucket=64"]
REFUSED = ["nan", "infinite", "overflow"]


def run(cluster: Cluster, special: str, codec: str, scaled: bool, on_device: bool) -> list[Edge]:
    return cluster.run(2, edge_jobs.train_at_the_edge, special, codec, scaled, on_device)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("special", list(edge_jobs.SPECIAL))
def test_every_rank_skips_what_cannot_be_encoded_and_goes_on(
    cluster: Cluster, special: str, codec: str, scaled: bool
) -> None:
    if special == "overflow" and codec.startswith("onebit"):
        pytest.skip("onebit leaves too little of the value for a sum that overflows")
    ranks = run(cluster, special, codec, scaled, on_device=False)
    refused = special in REFUSED
    for rank in ranks:
        assert rank.skipped == [refused and step == SPOILT for step in range(STEPS)]
        for step in range(STEPS):
            is_nan = np.isnan(rank.averaged[step])
            assert is_nan.all() if rank.skipped[step] else not is_nan.any()
            np.testing.assert_array_equal(rank.averaged[step], ranks[0].averaged[step])
            for owed in (*rank.owed[step]["push"].values(), *rank.owed[step]["pull"].values()):
                assert np.isfinite(owed).all()
        if refused:
            (warning,) = rank.warnings
            assert f"step {SPOILT}: the gradient of rank 1" in warning
            assert f"element 3 of {NAME}" in warning
        else:
            assert rank.warnings == []
        if scaled:
            assert rank.scales == [
                4.0 if refused and step >= SPOILT else 8.0 for step in range(STEPS)
            ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("special", list(edge_jobs.SPECIAL))
def test_the_kernels_of_a_gpu_do_the_same(cluster: Cluster, special: str, scaled: bool) -> None:
    for codec in CODECS[:2]:
        on_cpu, on_device = (
            run(cluster, special, codec, scaled, device) for device in (False, True)
        )
        for cpu, device in zip(on_cpu, on_device, strict=True):
            assert (cpu.skipped, cpu.scales) == (device.skipped, device.scales)
            assert cpu.warnings == device.warnings
            # docs/reference/gpu.md: residuals may differ where x + residual overflows.
            same = STEPS if special != "overflow" else SPOILT
            for step in range(same):
                np.testing.assert_array_equal(cpu.averaged[step], device.averaged[step])
                assert cpu.owed[step].keys() == device.owed[step].keys()
                for kind in ("push", "pull"):
                    for name, values in cpu.owed[step][kind].items():
                        np.testing.assert_array_equal(values, device.owed[step][kind][name])
