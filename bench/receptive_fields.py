"""Whether it matters that a group of qsgd cuts the receptive field of a convolution's output.

    python bench/receptive_fields.py

QSGD's experiments reshape matrices so that none is cut (section 5). The weights of an output value
(inputs x height x width) lie together, so groups of a divisor or a multiple of that size cut none.

Prints the relative error of such groups on the recorded gradients of ResNet-20, and that of equally
large groups that begin a quarter, a half or three quarters of a group later: the root of the mean,
over the tensors, of the squared error / squared norm. It is an expectation; nothing is drawn.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
import safetensors

GRADIENTS = Path(__file__).parent / "data" / "resnet20_gradients.safetensors"
SIZES = (48, 72, 144, 288, 576)
LEVELS = {2: 1, 4: 7}  # by bits


def convolutions() -> list[npt.NDArray[np.float32]]:
    """All but the first, whose receptive field has three inputs."""
    with safetensors.safe_open(GRADIENTS, framework="np") as file:
        tensors = [file.get_tensor(name) for name in sorted(file.keys())]
    return [tensor for tensor in tensors if tensor.ndim == 4 and tensor.shape[1] > 3]


def relative_square(values: npt.NDArray[np.float32], size: int, shift: int, levels: int) -> float:
    """The expected squared error of qsgd with norm max, relative to the squared norm."""
    places = [0, *range(shift or size, len(values), size), len(values)]
    error = 0.0
    for begin, end in pairwise(places):
        magnitudes = np.abs(values[begin:end]).astype(np.float64)
        if (largest := magnitudes.max()) > 0:
            share = np.modf(magnitudes * levels / largest)[0]
            error += float((share * (1 - share)).sum()) * (largest / levels) ** 2
    return error / float(np.square(values.astype(np.float64)).sum())


def main() -> None:
    tensors = convolutions()
    print("| bits | group | whole | cut | squares, cut / whole |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for bits, levels in LEVELS.items():
        for size in SIZES:
            flat = [tensor.reshape(-1) for tensor in tensors]
            whole = fmean(relative_square(values, size, 0, levels) for values in flat)
            cut = fmean(
                relative_square(values, size, shift, levels)
                for values in flat
                for shift in (size // 4, size // 2, 3 * size // 4)
            )
            row = f"{math.sqrt(whole):.3f} | {math.sqrt(cut):.3f} | {cut / whole:.3f}"
            print(f"| {bits} | {size} | {row} |")


if __name__ == "__main__":
    main()
