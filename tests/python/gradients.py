"""Values, codecs and sizes that the tests of the Python API share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire

Floats = NDArray[np.float32]

NAMES = [codec["name"] for codec in gradwire.codecs()]
# Every codec with its defaults, and with the parameters that change bytes or residual.
CODECS = [
    *NAMES,
    "3lc:s=1.75",
    "3lc:coder=none",
    "3lc:bucket=1000",
    "3lc:residual=bf16",
    "3lc:ef=off",
]
WITH_RESIDUAL = [
    "3lc",
    "3lc:s=1.75,coder=none",
    "3lc:bucket=1000",
    "3lc:residual=bf16",
    "bf16:ef=on",
]
# Codecs that round at random.
STOCHASTIC = {"terngrad", "stoch3", "qsgd"}
# Sizes around the five values of a byte, the 40960 of a chunk, and the lanes of every SIMD target.
SIZES = [0, 1, 2, 4, 5, 6, 15, 17, 63, 65, 1000, 1001, 40959, 40960, 40961, 100_003]

FLT_MAX = float(np.finfo(np.float32).max)


def floats(values: list[float]) -> Floats:
    return np.array(values, np.float32)


def gradient(numel: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng([seed, numel])
    values = rng.standard_normal(numel) * np.exp(rng.standard_normal(numel))
    return values.astype(np.float32)


def same_bits(a: Floats | None, b: Floats | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def has_code(error: pytest.ExceptionInfo[Any], code: str) -> bool:
    return bool(error.value.code == code)
