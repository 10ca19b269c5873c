"""The Python API accepts some objects as arrays and refuses others."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire
from gradients import gradient, has_code, same_bits
from gradwire import _core

pytestmark = pytest.mark.filterwarnings("error")


class DlpackOnly:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, x: NDArray[Any]) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: array.array("f", x.tolist()),
        lambda x: memoryview(x),
        lambda x: memoryview(array.array("f", x.tolist())),
        lambda x: (ctypes.c_float * x.size)(*x.tolist()),
        DlpackOnly,
        lambda x: x.reshape(3, 4, 5),
        lambda x: np.asfortranarray(x.reshape(60, 1)),
    ],
    ids=["array", "memoryview", "memoryview-of-array", "ctypes", "dlpack", "3-d", "column"],
)
def test_anything_that_speaks_buffer_or_dlpack_is_an_array(wrap: Any) -> None:
    x = gradient(60)
    frame = gradwire.encode(x, "3lc")
    assert gradwire.encode(wrap(x), "3lc") == frame
    assert gradwire.Compressor("3lc", 60).encode(wrap(x)) == frame


def test_an_output_in_the_memory_of_the_input_is_refused() -> None:
    n = 64
    compressor = gradwire.Compressor("bf16", n)
    memory = np.zeros(compressor.max_encoded_size + 4 * n, np.uint8)
    frame = gradwire.encode(gradient(n), "bf16")
    memory[: len(frame)] = np.frombuffer(frame, np.uint8)
    delta = np.zeros(_core.max_delta_size(n, 4), np.uint8)
    size = _encode_delta(np.zeros(4 * n, np.uint8), np.ones(4 * n, np.uint8), delta)["size"]
    whole = np.zeros(8 * delta.size, np.uint8)
    whole[:size] = delta[:size]
    for call in (
        lambda: gradwire.decode_into(memory[: len(frame)], memory[32 : 32 + 4 * n].view("<f4")),
        lambda: compressor.encode_into(memory[4 * n - 4 : 8 * n - 4].view("<f4"), memory[: 4 * n]),
        lambda: _core.apply_delta(whole[:size], whole[: 4 * n]),
        lambda: _core.DecodedDelta(whole[:size]).apply(whole[: 4 * n]),
        lambda: _core.fold_deltas(whole[:size], delta[:size], whole),
        lambda: _encode_delta(whole[: 4 * n], np.zeros(4 * n, np.uint8), whole[8:]),
        lambda: _encode_delta(np.zeros(4 * n, np.uint8), whole[: 4 * n], whole[8:]),
    ):
        with pytest.raises(gradwire.GradwireError, match="lie in the same memory"):
            call()
    apart = memory[-4 * n :].view("<f4")
    gradwire.decode_into(memory[: len(frame)], apart)
    assert same_bits(apart, gradwire.decode(frame))


def _encode_delta(base: Any, result: Any, delta: Any) -> dict[str, Any]:
    return _core.encode_delta(base, result, delta, width=4, is_float=True, follow=False)


def test_a_read_only_array_can_be_encoded() -> None:
    x = gradient(60)
    frame = gradwire.encode(x, "3lc")
    x.flags.writeable = False
    assert gradwire.encode(x, "3lc") == frame
    with pytest.raises(gradwire.GradwireError, match="contiguous"):
        gradwire.encode(np.broadcast_to(np.float32(1), (30,)), "3lc")


@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, memoryview, lambda f: np.frombuffer(f, np.uint8)]
)
def test_a_frame_is_any_buffer_of_bytes(wrap: Any) -> None:
    x = gradient(60)
    frame = gradwire.encode(x, "raw")
    assert same_bits(gradwire.decode(wrap(frame)), x)
    assert gradwire.inspect(wrap(frame)) == gradwire.inspect(frame)
    out = np.zeros(60, np.float32)
    gradwire.decode_into(wrap(frame), out)
    assert same_bits(out, x)


@pytest.mark.parametrize("make", [lambda n: array.array("f", [0] * n), lambda n: bytearray(4 * n)])
def test_decode_into_takes_any_writable_floats(make: Any) -> None:
    x = gradient(60)
    out = make(60)
    if isinstance(out, bytearray):
        out = memoryview(out).cast("f")
    gradwire.decode_into(gradwire.encode(x, "raw"), out)
    assert bytes(memoryview(out).cast("B")) == x.tobytes()


def _calls(x: Any) -> list[Any]:
    frame = gradwire.encode(np.zeros(np.size(x), np.float32), "raw")
    return [
        lambda: gradwire.encode(x, "3lc"),
        lambda: gradwire.Compressor("3lc", np.size(x)).encode(x),
        lambda: gradwire.Compressor("3lc", np.size(x)).encode_into(x, np.zeros(9999, np.uint8)),
        lambda: gradwire.decode_into(frame, x),
    ]


@pytest.mark.parametrize(
    "x",
    [
        gradient(60)[::2],
        gradient(60)[::-1],
        gradient(60).reshape(6, 10).T,
        gradient(60).reshape(6, 10)[:, :5],
    ],
    ids=["every-other", "backwards", "transposed", "columns"],
)
def test_an_array_that_is_not_contiguous_is_refused(x: Any) -> None:
    for call in _calls(x):
        with pytest.raises(gradwire.GradwireError, match="contiguous") as error:
            call()
        assert has_code(error, "invalid_argument")


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "bool", "complex64", ">f4"])
def test_another_dtype_is_refused_by_name(dtype: str) -> None:
    x = np.ones(30, dtype)
    for call in _calls(x):
        with pytest.raises(gradwire.GradwireError, match=dtype) as error:
            call()
        assert has_code(error, "unsupported_dtype")
        assert "float32" in str(error.value)


@pytest.mark.parametrize("x", [None, 1.0, "text", [1.0, 2.0], {"a": 1}])
def test_what_is_no_array_is_refused_by_name(x: Any) -> None:
    name = type(x).__name__
    with pytest.raises((gradwire.GradwireError, TypeError), match=name):
        gradwire.encode(x, "3lc")
    with pytest.raises((gradwire.GradwireError, TypeError), match=name):
        gradwire.decode_into(gradwire.encode(np.zeros(1, np.float32), "raw"), x)


def test_what_lies_behind_a_mask_is_not_sent() -> None:
    masked = np.ma.masked_array(np.zeros(4, np.float32), np.array([False, True, False, True]))
    for use in (
        lambda: gradwire.encode(masked, "raw"),
        lambda: gradwire.Compressor("3lc", 4).encode(masked),
        lambda: gradwire.decode_into(gradwire.encode(np.zeros(4, np.float32), "raw"), masked),
    ):
        with pytest.raises(gradwire.GradwireError, match="mask of this MaskedArray"):
            use()


def test_decode_into_a_read_only_array_is_refused() -> None:
    frame = gradwire.encode(gradient(5), "raw")
    out = np.zeros(5, np.float32)
    out.flags.writeable = False
    with pytest.raises((gradwire.GradwireError, TypeError), match=r"read-only|writ"):
        gradwire.decode_into(frame, out)
    assert not out.any()


@pytest.mark.parametrize("numel", [0, 4, 6])
def test_another_length_is_refused(numel: int) -> None:
    frame = gradwire.encode(gradient(5), "raw")
    with pytest.raises(gradwire.GradwireError, match="5") as error:
        gradwire.decode_into(frame, np.zeros(numel, np.float32))
    assert has_code(error, "length_mismatch")
    with pytest.raises(gradwire.GradwireError, match="5") as error:
        gradwire.Compressor("3lc", 5).encode(gradient(numel))
    assert has_code(error, "length_mismatch")
