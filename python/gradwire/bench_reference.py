"""What a codec must decode to, in plain NumPy: a second opinion to check against before timing."""

from __future__ import annotations

import numpy as np

from gradwire.bench_data import Floats


def reference_decoded(codec: str, values: Floats) -> Floats | None:
    """The float32 values that `values`, residual included, decode to; None for other codecs."""
    name, _, parameters = codec.partition(":")
    if name == "raw":
        return values
    if name == "bf16":
        return _round_to_bf16(values)
    if name != "3lc":
        return None
    given = dict(part.split("=", 1) for part in parameters.split(",") if part)
    bucket = int(given.get("bucket", 0)) or values.size or 1
    s = np.float32(given.get("s", "1"))
    starts = range(0, values.size, bucket)
    parts = [_quantize_ternary(values[start : start + bucket], s) for start in starts]
    return np.concatenate(parts) if parts else values


def _quantize_ternary(values: Floats, s: np.float32) -> Floats:
    """3LC (Lim, Andersen, Kaminsky 2019, section 3.1): sign times m beyond m / 2, else +0."""
    with np.errstate(over="ignore"):
        m = np.minimum(s * np.abs(values).max(), np.finfo(np.float32).max)
    half = m * np.float32(0.5)
    return np.where(values > half, m, np.where(values < -half, -m, np.float32(0)))


def _round_to_bf16(values: Floats) -> Floats:
    """Rounds to the nearest bfloat16, ties to even. For finite values."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
