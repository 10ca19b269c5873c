"""QSGD's corollary 3.3 on recorded gradients: at most 2.8 n + 32 bits with sqrt(n) levels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import safetensors

import gradwire

GRADIENTS = Path(__file__).parents[2] / "bench" / "data" / "resnet20_gradients.safetensors"
N = 192 * 192  # values of a convolution of the last stage
STEPS = 4


def test_recorded_gradients_keep_the_papers_bound() -> None:
    codec = f"qsgd:levels={math.isqrt(N)},bucket={N},norm=l2,coder=elias-dense"
    zeros = 8 * len(gradwire.encode(np.zeros(N, np.float32), codec))  # a header alone
    found = []
    with safetensors.safe_open(GRADIENTS, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            values = file.get_tensor(name).reshape(-1)
            if values.size != N:
                continue
            frames = [gradwire.encode(values, codec, step=step) for step in range(STEPS)]
            found.append(sum(8 * len(frame) - zeros for frame in frames) / STEPS)
    assert len(found) == 15
    assert max(found) <= 2.8 * N + 32
    assert round((min(found) - 32) / N, 2) == 2.53, "docs/results/codecs.md"
    assert round((max(found) - 32) / N, 2) == 2.71, "docs/results/codecs.md"
