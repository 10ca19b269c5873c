"""Publisher(dtype=...): values are rounded, and never lost without a word."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.weights import Publisher, Subscriber, WeightsError
from states import assert_same

WITH_INFINITY = [torch.bfloat16, torch.float16, torch.float8_e5m2]
WITHOUT = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
# The least number that rounds beyond the largest.
LIMITS = {
    torch.bfloat16: 2.0**128 - 2.0**119,
    torch.float16: 65520.0,
    torch.float8_e5m2: 61440.0,
    torch.float8_e4m3fn: 464.0,
    torch.float8_e4m3fnuz: 248.0,
    torch.float8_e5m2fnuz: 61440.0,
}


def received(store: Path) -> dict[str, Any]:
    target: dict[str, Any] = {}
    subscriber = Subscriber(store)
    subscriber.fetch()
    subscriber.apply_(target)
    return target


@pytest.mark.parametrize("dtype", WITH_INFINITY + WITHOUT)
def test_published_values_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    """As `to` casts them: NaN, infinities, -0, denormals, and what rounds to the largest."""
    largest = math.nextafter(LIMITS[dtype], 0.0)
    special = [math.nan, -0.0, 1e-7, float(np.nextafter(np.float32(LIMITS[dtype]), np.float32(0)))]
    special += [math.inf, -math.inf] if dtype in WITH_INFINITY else []
    publisher = Publisher(tmp_path, dtype=dtype)
    for scale in (1.0, 1.5):
        values = torch.cat([torch.tensor(special), torch.linspace(-3, 3, 500) * scale])
        master = {"w": values, "n": torch.ones(2), "d": torch.tensor(largest, dtype=torch.float64)}
        publisher.publish(master)
        found = received(tmp_path)
        assert float(found.pop("d")) == torch.finfo(dtype).max
        assert_same(found, {name: master[name].to(dtype) for name in found})
        assert found["w"].float().isfinite()[3]


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
@pytest.mark.filterwarnings("error")
def test_arrays_that_are_read_only_are_cast(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """PyTorch warned of undefined behavior."""
    values = np.ones(shape, np.float32)
    values.flags.writeable = False
    Publisher(tmp_path, dtype="bfloat16").publish({"x": values, "y": values.T})
    ones = torch.ones(shape).bfloat16()
    assert_same(received(tmp_path), {"x": ones, "y": ones.permute(tuple(range(ones.ndim))[::-1])})


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_float64_is_rounded_once(tmp_path: Path, dtype: torch.dtype, kept: int, kind: str) -> None:
    """To the nearest of numbers with so many bits, also from beside the middle of two: float32 in
    between would round to the middle, and then to even."""
    generator = np.random.default_rng(5)
    grid = np.ldexp(generator.integers(2 ** (kept - 1), 2**kept, 500).astype(float), 1 - kept)
    middle = grid + 2.0**-kept
    below, above = np.nextafter(middle, 0.0), np.nextafter(middle, 4.0)
    values = np.concatenate([below, above, -below, -above])
    expected = np.concatenate([grid, grid + 2.0 ** (1 - kept)] * 2) * np.sign(values)
    master = {"w": torch.from_numpy(values) if kind == "torch" else values}
    Publisher(tmp_path, dtype=dtype).publish(master)
    found = torch.as_tensor(received(tmp_path)["w"])
    np.testing.assert_array_equal(found.double().numpy(), expected)


@pytest.mark.parametrize("dtype", WITH_INFINITY + WITHOUT)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_numbers_beyond_the_largest_are_refused(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """Before anything is written, by name, and how many."""
    publisher = Publisher(tmp_path, dtype=dtype)
    good: dict[str, Any] = {"a": torch.ones(3), "w": torch.ones(5)}
    publisher.publish(good)
    there = sorted(tmp_path.iterdir())
    bad = torch.tensor([math.nan, LIMITS[dtype], -LIMITS[dtype], 1.0, math.inf])
    lost = 2 + (dtype in WITHOUT)
    said = rf"'w': {lost} of its 5 values are too large for dtype={str(dtype)[6:]}, whose largest"
    state = {"a": torch.zeros(3), "w": bad}
    with pytest.raises(WeightsError, match=said):
        publisher.publish({name: v.numpy() if kind == "numpy" else v for name, v in state.items()})
    assert sorted(tmp_path.iterdir()) == there
    published = publisher.publish({**good, "a": torch.zeros(3)})
    assert published.share_changed == pytest.approx(3 / 8)  # a delta: the publisher goes on
    assert_same(received(tmp_path), {"a": torch.zeros(3, dtype=dtype), "w": good["w"].to(dtype)})


def test_doubles_beyond_float32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'w': 1 of its 2 values are too large"):
        Publisher(tmp_path, dtype="float32").publish({"w": np.array([1e300, 1.0])})


def test_integers_and_wider_dtypes_are_not_looked_at(tmp_path: Path) -> None:
    state: dict[str, Any] = {"n": np.arange(3) + 10**6, "h": torch.tensor([6e4, math.inf]).half()}
    Publisher(tmp_path, dtype="float32").publish(state)
    found = received(tmp_path)
    assert found["h"].dtype == torch.float32
    assert found["n"].tolist() == state["n"].tolist()


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "int8", "complex64", "bool"])
def test_what_is_no_signed_float_is_no_dtype(tmp_path: Path, dtype: str) -> None:
    """float8_e8m0fnu has neither a sign nor a zero."""
    with pytest.raises(WeightsError, match="floats are published as one of bfloat16, float16"):
        Publisher(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16", torch.float16])
def test_a_dtype_may_be_of_numpy(tmp_path: Path, dtype: Any) -> None:
    Publisher(tmp_path, dtype=dtype).publish({"w": torch.ones(3)})
    assert received(tmp_path)["w"].dtype == torch.float16


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (np.int8, "dtype=int8: floats are published as one of"),
        (float, "dtype float is not supported; take one of"),
        (32, "dtype 32 is not supported; take one of"),
    ],
)
def test_another_dtype_is_refused_by_name(tmp_path: Path, dtype: Any, said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        Publisher(tmp_path, dtype=dtype)
