"""PyTorch tensors are arrays as any other. Skipped where PyTorch is not installed."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire

torch = pytest.importorskip("torch")


def test_a_tensor_is_an_array() -> None:
    x = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    frame = gradwire.encode(x, "3lc:s=1.25")
    assert gradwire.encode(torch.from_numpy(x), "3lc:s=1.25") == frame
    out = torch.zeros(60)
    gradwire.decode_into(frame, out)
    gradwire.decode_into(frame, out, accumulate=True)
    assert torch.equal(out, torch.from_numpy(2 * gradwire.decode(frame)))


def test_tensors_it_cannot_take_are_refused() -> None:
    x = torch.ones(6, 10)
    for wrong, message in [
        (x.t(), "contiguous"),
        (x.double(), "float64"),
        (x.bfloat16(), "bfloat16"),
        (x.int(), "int32"),
    ]:
        with pytest.raises(gradwire.GradwireError, match=message):
            gradwire.encode(wrong, "3lc")


def test_a_parameter_need_not_be_detached() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    assert gradwire.encode(parameter, "raw") == gradwire.encode(np.ones(10, "f4"), "raw")
