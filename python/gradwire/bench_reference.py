"""The values that a codec must decode to, in plain NumPy, to be compared with before timing."""

from __future__ import annotations

import numpy as np

import gradwire
from gradwire.bench_data import Floats


def reference_decoded(codec: str, values: Floats) -> Floats | None:
    """The float32 values that the frame of `values`, residual included, decodes to; None for codecs
    that this module does not know."""
    name, _, parameters = codec.partition(":")
    if any(info["lossless"] for info in gradwire.codecs() if info["name"] == name):
        return values
    if name == "bf16":
        return _round_to_bf16(values)
    given = dict(part.split("=", 1) for part in parameters.split(",") if part)
    if name == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if name == "inceptionn":
        return _clip(values, int(given.get("bound", 10)), given.get("mode") == "strict")
    if name not in ("3lc", "int8"):
        return None
    group = int(given.get("bucket", 0)) or values.size or 1
    s = np.float32(given.get("s", "1"))
    groups = [values[start : start + group] for start in range(0, values.size, group)]
    parts = [_round_to_int8(x) if name == "int8" else _quantize_ternary(x, s) for x in groups]
    return np.concatenate(parts) if parts else values


def _quantize_ternary(values: Floats, s: np.float32) -> Floats:
    """3LC (Lim, Andersen, Kaminsky 2019, section 3.1): sign times m beyond m / 2, else +0."""
    with np.errstate(over="ignore"):
        m = np.minimum(s * np.abs(values).max(), np.finfo(np.float32).max)
    half = m * np.float32(0.5)
    return np.where(values > half, m, np.where(values < -half, -m, np.float32(0)))


def _clip(values: Floats, bound: int, strict: bool) -> Floats:
    """INCEPTIONN (Li et al. 2018, section V): magnitudes below 1 keep 0, 7 or 15 binary places."""
    size = np.abs(values)
    cut7, cut15 = (np.trunc(values * np.float32(2**k)) / np.float32(2**k) for k in (7, 15))
    narrow = size < np.float32(2.0 ** (bound // 2 - bound))
    if strict:
        narrow &= np.abs(values - cut7) < np.float32(2.0**-bound)
    cut = np.where(size < np.float32(2.0**-bound), np.float32(0), np.where(narrow, cut7, cut15))
    return np.where(size < 1, cut, values)


def _round_to_int8(values: Floats) -> Floats:
    """The nearest of 255 levels, ties to even. For values well below the largest float32."""
    unit = np.abs(values).max() / np.float32(127)
    if unit == 0:
        return np.zeros_like(values)
    levels: Floats = np.rint(np.clip(values / unit, -127, 127))
    return levels * unit + np.float32(0)


def _round_to_bf16(values: Floats) -> Floats:
    """Rounds to the nearest bfloat16, ties to even. For finite values."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
