"""Coder rice on recorded gradients: its size compared with the entropy and with zre."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import gradwire
from golden import ROOT
from gradwire.tensor_files import read_tensor_file, values_of

SCALE_BYTES = 4
ROUNDS = 4  # rounds over the recorded steps, so that residuals have grown
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def gradients() -> list[list[Floats]]:
    """The recorded steps of each tensor that is compressed."""
    content = read_tensor_file(ROOT / "bench" / "data" / "resnet20_gradients.safetensors")
    tensors: dict[str, list[Floats]] = {}
    for tensor in content.tensors:
        values = values_of(tensor, "float32")
        if len(tensor.shape) > 1 and values.size >= 256:
            tensors.setdefault(tensor.name.partition("/")[2], []).append(values)
    return list(tensors.values())


def sent(steps: list[Floats], s: float) -> list[Floats]:
    """The values that 3lc sends for a tensor at each recorded step of the last round."""
    compressor = gradwire.Compressor(f"3lc:s={s}", steps[0].size)
    frames = [compressor.encode(x, step=i) for i, x in enumerate(steps * ROUNDS)]
    return [gradwire.decode(frame) for frame in frames[-len(steps) :]]


def entropy(values: Floats) -> float:
    """The bits of an ideal coder that knows only the shares of -m, 0 and m."""
    counts = np.unique(np.sign(values), return_counts=True)[1]
    return float(-np.sum(counts * np.log2(counts / values.size)))


def bits(values: Floats, coder: str) -> int:
    """The bits of the coded trits; with s=1, 3lc gives the same trits again."""
    frame = gradwire.encode(values, f"3lc:coder={coder}")
    assert np.array_equal(gradwire.decode(frame), values)
    return 8 * (int(gradwire.inspect(frame)["payload_bytes"]) - SCALE_BYTES)


@pytest.mark.parametrize(("s", "smaller_than_zre"), [(1.0, 1.4), (1.75, 2.0), (1.9, 2.0)])
def test_size_on_recorded_gradients(
    gradients: list[list[Floats]], s: float, smaller_than_zre: float
) -> None:
    tensors = [values for steps in gradients for values in sent(steps, s) if values.any()]
    rice = sum(bits(values, "rice") for values in tensors)
    assert rice < 1.03 * sum(map(entropy, tensors))
    assert rice * smaller_than_zre < sum(bits(values, "zre") for values in tensors)
    for values in tensors:
        density = np.count_nonzero(values) / values.size
        if values.size < 10000 or density < 0.001:
            continue
        # At densities above 10 % codes are short, so rounding them to whole bits costs more.
        slack = 1.04 if density > 0.1 else 1.03 if density > 0.01 else 1.10
        assert bits(values, "rice") < slack * entropy(values), (values.size, density)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.05])
def test_size_on_independent_trits(density: float) -> None:
    draw = np.random.default_rng(7)
    signs = draw.choice([-1.0, 1.0], 10 * 40960) * (draw.random(10 * 40960) < density)
    values = signs.astype(np.float32)
    assert bits(values, "rice") < (1.03 if density > 0.01 else 1.10) * entropy(values)
