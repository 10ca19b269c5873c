"""Values to measure on: recorded gradients, or synthetic values with a heavy tail.

Both are one *period* of about a million values, repeated to the wanted length. Each measured call
takes a window that starts at a random place, so that a residual meets other values in each call, as
it does in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradwire.machine import find_checkout
from gradwire.tensor_dtypes import FRAME_DTYPES
from gradwire.tensor_files import TensorFileError, read_tensor_file, values_of, widen

Floats = NDArray[np.float32]

RECORDED = Path("bench") / "data" / "resnet20_gradients.safetensors"

# A window starts at a multiple of a cache line, at most _MARGIN values after the start. That is so
# little that 200 k values and their margin stay in a second-level cache.
_MARGIN = 1 << 15
_ALIGNMENT = 16

_SYNTHETIC_PERIOD = 1 << 20


@dataclass(frozen=True)
class BenchData:
    """period: float32, one-dimensional. description: how the values were made, in a sentence."""

    name: str
    description: str
    period: Floats

    def windows(self, numel: int, count: int, seed: int) -> list[Floats]:
        """`count` views of `numel` values each, into one array that is a little longer."""
        base = np.resize(self.period, numel + _MARGIN)
        starts = np.random.default_rng([seed, numel]).integers(0, _MARGIN // _ALIGNMENT, count)
        return [base[s : s + numel] for s in (int(start) * _ALIGNMENT for start in starts)]


def load_data(choice: str, seed: int) -> BenchData:
    """choice: "recorded", "synthetic", the path of a file of gradients, or "auto": "recorded" where
    the source tree is at hand, else "synthetic". Raises OSError, TensorFileError."""
    checkout = find_checkout()
    recorded = checkout / RECORDED if checkout else None
    is_here = recorded is not None and recorded.is_file()
    if choice == "synthetic" or (choice == "auto" and not is_here):
        return _synthetic(seed)
    if choice not in ("auto", "recorded"):
        return _load(Path(choice))
    if recorded is None or not is_here:
        raise TensorFileError(
            f"{RECORDED} is not here: it belongs to the source tree of gradwire. Give its path, or "
            "take synthetic data"
        )
    return _load(recorded)


def _synthetic(seed: int) -> BenchData:
    rng = np.random.default_rng(seed)
    normal, spread = rng.standard_normal((2, _SYNTHETIC_PERIOD), dtype=np.float32)
    return BenchData(
        "synthetic",
        "synthetic: x = 0.01 * g * exp(h / 2), g and h standard normal, independent for each "
        f"value (period {_SYNTHETIC_PERIOD}, seed {seed})",
        np.float32(0.01) * normal * np.exp(np.float32(0.5) * spread),
    )


def _load(path: Path) -> BenchData:
    content = read_tensor_file(path)
    dtypes = FRAME_DTYPES[content.kind]
    tensors = [t for t in content.tensors if t.dtype in dtypes]
    scaled = [scale(widen(values_of(t, dtypes[t.dtype]))) for t in tensors if t.data]
    if not scaled:
        raise TensorFileError(f"{path}: no float32, float16 or bfloat16 values in it")
    period = np.concatenate(scaled)
    if not np.isfinite(period).all():
        raise TensorFileError(f"{path}: it holds NaN or Inf")
    how = content.metadata.get("how", "no word on how it was made")
    return BenchData(
        str(path.name),
        f"{path.name}: {how}; {len(tensors)} tensors, {period.size} values, each tensor divided "
        "by its largest magnitude",
        period,
    )


def scale(values: Floats) -> Floats:
    """Divides by the largest magnitude, unless it is 0 or not finite.

    In training each tensor has its own scale, but a benchmark's long tensor has a single scale.
    """
    largest = np.abs(values).max()
    return values / largest if np.isfinite(largest) and largest > 0 else values
