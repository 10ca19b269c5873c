"""PyTorch tensors are arrays like any other. The tests are skipped without PyTorch."""

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
        (x.int(), "int32"),
    ]:
        with pytest.raises(gradwire.GradwireError, match=message):
            gradwire.encode(wrong, "3lc")


def test_a_parameter_need_not_be_detached() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    assert gradwire.encode(parameter, "raw") == gradwire.encode(np.ones(10, "f4"), "raw")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_16_bit_tensors_are_encoded_as_the_float32_they_equal(name: str) -> None:
    torch.manual_seed(1)
    for numel in (0, 1, 4097, 90_000):
        x = torch.randn(numel).to(getattr(torch, name))
        for codec in [entry["name"] for entry in gradwire.codecs()]:
            frame = gradwire.encode(x, codec, seed=1)
            assert gradwire.inspect(frame)["dtype"] == name
            wide = gradwire.encode(x.float(), codec, seed=1)
            assert gradwire.decode(frame).tobytes() == gradwire.decode(wide).tobytes(), codec
            if codec == "raw":
                assert len(frame) == 32 + 2 * numel
            else:
                assert frame[32:] == wide[32:]


def test_the_residual_of_a_16_bit_tensor_is_float32() -> None:
    x = torch.randn(50_000).bfloat16()
    narrow, wide = (gradwire.Compressor("3lc:s=1.75", x.numel()) for _ in range(2))
    for step in range(3):
        assert narrow.encode(x, step)[32:] == wide.encode(x.float(), step)[32:]
    assert narrow.residual is not None
    assert wide.residual is not None
    assert narrow.residual.tobytes() == wide.residual.tobytes()


def test_nan_in_a_16_bit_tensor_is_named() -> None:
    x = torch.zeros(100, dtype=torch.float16)
    x[7] = torch.nan
    with pytest.warns(gradwire.NonFiniteWarning, match="element 7 is NaN"):
        gradwire.encode(x, "3lc")
