"""The Python API: encode, decode, decode_into, inspect, codecs, Compressor."""

from __future__ import annotations

import array
import ctypes
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire

Floats = NDArray[np.float32]

NAMES = [codec["name"] for codec in gradwire.codecs()]
# Every codec as it comes, and the parameters that change bytes or residual.
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
# Around the five values of a byte, the 40960 of a chunk, and the lanes of every SIMD target.
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


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# What a codec keeps, computed again in NumPy


class PlainThreeLc:
    """3LC (Lim, Andersen, Kaminsky 2019, section 3.1) in float32, with its residual."""

    def __init__(self, numel: int, s: float, bucket: int | None = None) -> None:
        self.s = np.float32(s)
        self.bucket = bucket or max(numel, 1)
        self.residual = np.zeros(numel, np.float32)

    def step(self, x: Floats) -> Floats:
        """Returns what is decoded and keeps the rest."""
        total = x + self.residual
        decoded = np.zeros_like(total)
        for start in range(0, total.size, self.bucket):
            part = total[start : start + self.bucket]
            m = self.s * np.abs(part).max()
            half = m * np.float32(0.5)
            decoded[start : start + self.bucket] = np.sign(part) * (
                np.abs(part) > half
            ) * m + np.float32(0)
        self.residual = total - decoded
        return decoded


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("codec", "s", "bucket"),
    [
        ("3lc:s=1.00", 1.0, None),
        ("3lc:s=1.75", 1.75, None),
        ("3lc:s=1.3,coder=none", 1.3, None),
        ("3lc:s=1.1,bucket=1000", 1.1, 1000),
        ("3lc:bucket=5,coder=none", 1.0, 5),
    ],
)
def test_3lc_is_what_the_paper_says(codec: str, s: float, bucket: int | None, numel: int) -> None:
    plain = PlainThreeLc(numel, s, bucket)
    compressor = gradwire.Compressor(codec, numel)
    for step in range(4):
        x = gradient(numel, step)
        decoded = gradwire.decode(compressor.encode(x, step))
        assert same_bits(decoded, plain.step(x)), step
        assert same_bits(compressor.residual, plain.residual), step


def test_3lc_sends_ties_as_zero() -> None:
    x = floats([1, 0.5, -0.5, 0.50000006, -1, 0.0, -0.0])
    decoded = gradwire.decode(gradwire.encode(x, "3lc"))
    assert same_bits(decoded, floats([1, 0, 0, 1, -1, 0, 0]))


def test_3lc_scale_does_not_overflow() -> None:
    x = floats([FLT_MAX, -FLT_MAX, 1, FLT_MAX / 4])
    decoded = gradwire.decode(gradwire.encode(x, "3lc:s=1.9"))
    assert same_bits(decoded, floats([FLT_MAX, -FLT_MAX, 0, 0]))


def test_3lc_keeps_denormals() -> None:
    tiny = 2.0**-149
    x = floats([tiny, -3 * tiny, 0])
    assert same_bits(gradwire.decode(gradwire.encode(x, "3lc")), floats([0, -3 * tiny, 0]))


def test_3lc_counts_to_the_byte() -> None:
    # Header 32, scale 4, and 100 zero bytes after the first: seven runs of 14 and one of 2.
    x = np.zeros(505, np.float32)
    x[0] = 3
    assert len(gradwire.encode(x, "3lc")) == 32 + 4 + 1 + 8
    assert len(gradwire.encode(x, "3lc:coder=none")) == 32 + 4 + 101


@pytest.mark.parametrize("numel", SIZES)
def test_raw_keeps_every_bit(numel: int) -> None:
    x = gradient(numel)
    assert same_bits(gradwire.decode(gradwire.encode(x, "raw")), x)
    assert gradwire.encode(x, "raw")[32:] == x.tobytes()


def test_raw_and_bf16_carry_nan_and_inf() -> None:
    x = floats([np.nan, np.inf, -np.inf, -0.0])
    assert same_bits(gradwire.decode(gradwire.encode(x, "raw")), x)
    assert same_bits(gradwire.decode(gradwire.encode(x, "bf16")), x)


def test_bf16_rounds_half_to_even() -> None:
    x = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x00000001, 0x80000000], np.uint32
    )
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0xBF800000, 0, 0x80000000], np.uint32)
    decoded = gradwire.decode(gradwire.encode(x.view(np.float32), "bf16"))
    assert decoded.view(np.uint32).tolist() == expected.tolist()


# What holds for every codec


@pytest.mark.parametrize("codec", WITH_RESIDUAL)
def test_what_is_not_decoded_is_kept(codec: str) -> None:
    compressor = gradwire.Compressor(codec, 20_001)
    for step in range(5):
        x = gradient(20_001, step)
        before = compressor.residual
        decoded = gradwire.decode(compressor.encode(x, step))
        assert before is not None
        left = (x + before) - decoded
        if "residual=bf16" in codec:
            left = gradwire.decode(gradwire.encode(left, "bf16"))
        assert same_bits(compressor.residual, left), step


@pytest.mark.parametrize("codec", CODECS)
def test_targets_and_threads_give_the_same_bytes(codec: str) -> None:
    numel = 100_003
    frames: dict[Any, list[bytes]] = {}
    for target in [*gradwire.simd_targets(), "auto"]:
        for threads in range(1, 5):
            compressor = gradwire.Compressor(codec, numel, target=target, threads=threads)
            made = []
            for step in range(3):
                x = gradient(numel, step)
                frame = compressor.encode(x, step)
                total = gradient(numel, 99)
                gradwire.decode_into(frame, total, accumulate=True, target=target, threads=threads)
                decoded = gradwire.decode(frame, target=target, threads=threads)
                made += [frame, decoded.tobytes(), total.tobytes()]
            residual = compressor.residual
            made.append(b"" if residual is None else residual.tobytes())
            frames[target, threads] = made
    expected = frames["scalar", 1]
    assert [key for key, made in frames.items() if made != expected] == []


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", SIZES)
def test_encode_is_a_compressor_without_a_past(codec: str, numel: int) -> None:
    x = gradient(numel)
    frame = gradwire.encode(x, codec)
    compressor = gradwire.Compressor(codec, numel)
    assert compressor.encode(x) == frame
    assert len(frame) <= gradwire.max_encoded_size(codec, numel) == compressor.max_encoded_size
    assert gradwire.decode(frame).shape == (numel,)
    assert gradwire.encode(x, codec, seed=1, step=2, stream=3) == frame  # all are deterministic
    assert same_bits(x, gradient(numel)), "the input is left alone"


@pytest.mark.parametrize("codec", CODECS)
def test_decode_into_stores_or_adds(codec: str) -> None:
    x = gradient(5000)
    frame = gradwire.encode(x, codec)
    decoded = gradwire.decode(frame)
    out = gradient(5000, 1)
    gradwire.decode_into(frame, out)
    assert same_bits(out, decoded)
    out = gradient(5000, 1)
    gradwire.decode_into(frame, out, True)
    assert same_bits(out, gradient(5000, 1) + decoded)


def test_adding_leaves_what_was_not_sent_untouched() -> None:
    out = floats([-0.0, -0.0, np.nan])
    gradwire.decode_into(gradwire.encode(floats([2, 0, 0]), "3lc"), out, accumulate=True)
    assert out[0] == 2
    assert np.signbit(out[1])
    assert np.isnan(out[2])


@pytest.mark.parametrize("codec", CODECS)
def test_encode_into_writes_the_frame_and_nothing_else(codec: str) -> None:
    numel = 1234
    x = gradient(numel)
    compressor = gradwire.Compressor(codec, numel)
    out = np.full(compressor.max_encoded_size + 7, 0xA5, np.uint8)
    size = compressor.encode_into(x, out)
    assert out[:size].tobytes() == gradwire.encode(x, codec)
    assert (out[compressor.max_encoded_size :] == 0xA5).all()
    with pytest.raises(gradwire.GradwireError) as error:
        compressor.encode_into(x, out[: compressor.max_encoded_size - 1])
    assert has_code(error, "buffer_too_small")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [0, 1, 1003])
def test_all_zero(codec: str, numel: int) -> None:
    x = np.zeros(numel, np.float32)
    frame = gradwire.encode(x, codec)
    assert same_bits(gradwire.decode(frame), x)
    if codec.startswith("3lc"):
        assert len(frame) == 32


def test_minus_zero_alone_is_zero_in_3lc() -> None:
    frame = gradwire.encode(floats([-0.0] * 9), "3lc")
    assert len(frame) == 32
    assert same_bits(gradwire.decode(frame), np.zeros(9, np.float32))


# What is an array


class DlpackOnly:
    """Speaks DLPack and nothing else."""

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


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "int32", "uint8", "bool", "complex64", ">f4"]
)
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


# Codec strings


@pytest.mark.parametrize(
    "s", ["0.99", "2", "2.0", "1.99999999", "-1", "nan", "inf", "", "one", "1.5x"]
)
def test_s_outside_its_range_is_refused(s: str) -> None:
    for call in (
        lambda: gradwire.encode(gradient(5), f"3lc:s={s}"),
        lambda: gradwire.Compressor(f"3lc:s={s}", 5),
        lambda: gradwire.max_encoded_size(f"3lc:s={s}", 5),
    ):
        with pytest.raises(gradwire.GradwireError, match=r"\[1, 2\)") as error:
            call()
        assert has_code(error, "bad_parameter")


def test_unknown_keys_list_the_valid_ones() -> None:
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.encode(gradient(5), "3lc:sparsity=1.5")
    assert has_code(error, "bad_parameter")
    assert "'sparsity'" in str(error.value)
    listed = next(codec for codec in gradwire.codecs() if codec["name"] == "3lc")
    keys = [parameter["name"] for parameter in listed["parameters"]]
    assert keys
    for key in [*keys, "ef", "residual"]:
        assert f"{key}=" in str(error.value)


def test_unknown_codecs_list_the_valid_ones() -> None:
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.encode(gradient(5), "4lc")
    assert has_code(error, "unknown_codec")
    for name in ["4lc", *NAMES]:
        assert name in str(error.value)


@pytest.mark.parametrize(
    "codec",
    [
        "3lc:coder=zip",
        "3lc:bucket=7",
        "3lc:bucket=-5",
        "3lc:s",
        "3lc:s=1,s=1.5",
        "3lc:ef=yes",
        "3lc:residual=f64",
        "raw:s=1",
        "raw:ef=on",
        "bf16:residual=f32",
    ],
)
def test_other_wrong_parameters_are_refused(codec: str) -> None:
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.encode(gradient(5), codec)
    assert has_code(error, "bad_parameter")


def test_the_list_of_codecs_is_complete() -> None:
    assert NAMES[:2] == ["raw", "bf16"]
    assert "3lc" in NAMES
    for codec in gradwire.codecs():
        assert codec.keys() == {"name", "summary", "source", "error_feedback", "parameters"}
        assert codec["summary"]
        assert codec["source"]
        for parameter in codec["parameters"]:
            assert parameter.keys() == {"name", "default", "values", "help"}
        residual = gradwire.Compressor(codec["name"], 3).residual
        assert (residual is not None) == codec["error_feedback"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_compressors_codec_is_canonical_text(codec: str) -> None:
    text = gradwire.Compressor(codec, 5).codec
    assert gradwire.Compressor(text, 5).codec == text
    x = gradient(5000)
    assert gradwire.encode(x, text) == gradwire.encode(x, codec)


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": -1}, {"threads": 257}])
def test_a_wrong_thread_count_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gradwire.GradwireError, match="thread") as error:
        gradwire.encode(gradient(5), "3lc", **options)
    assert has_code(error, "invalid_argument")


def test_an_unknown_target_lists_the_valid_ones() -> None:
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.Compressor("3lc", 5, target="mmx")
    assert has_code(error, "invalid_argument")
    for name in gradwire.simd_targets():
        assert name in str(error.value)


# NaN and Inf


@pytest.mark.parametrize(
    "codec", ["3lc:s=1.00", "3lc:bucket=1000", "3lc:residual=bf16", "bf16:ef=on"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 40_961, 99_999])
@pytest.mark.parametrize("threads", [1, 3])
def test_non_finite_input_is_named_marked_and_forgotten(
    codec: str, value: float, place: int, threads: int
) -> None:
    numel = 100_000
    compressor = gradwire.Compressor(codec, numel, threads=threads)
    other = gradwire.Compressor(codec, numel)
    compressor.encode(gradient(numel, 1))
    other.encode(gradient(numel, 1))
    before = compressor.residual
    x = gradient(numel, 2)
    x[place] = value
    x[-1] = np.nan
    with pytest.warns(gradwire.NonFiniteWarning, match=rf"\b{place}\b"):
        frame = compressor.encode(x)
    assert len(frame) == 32
    assert gradwire.inspect(frame)["non_finite"] is True
    assert np.isnan(gradwire.decode(frame)).all()
    assert same_bits(compressor.residual, before)
    assert compressor.encode(gradient(numel, 3)) == other.encode(gradient(numel, 3))


def test_non_finite_input_to_the_plain_function_warns_too() -> None:
    with pytest.warns(gradwire.NonFiniteWarning, match=r"\b2\b"):
        frame = gradwire.encode(floats([1, 2, np.inf]), "3lc")
    total = np.zeros(3, np.float32)
    gradwire.decode_into(frame, total, accumulate=True)
    assert np.isnan(total).all()
    out = np.zeros(100, np.uint8)
    compressor = gradwire.Compressor("3lc", 3)
    with pytest.warns(gradwire.NonFiniteWarning, match=r"\b2\b"):
        size = compressor.encode_into(floats([1, 2, np.nan]), out)
    assert size == 32


def test_an_overflow_with_the_residual_is_named() -> None:
    compressor = gradwire.Compressor("3lc:s=1.9", 3)
    big = floats([FLT_MAX, FLT_MAX * 0.9 / 2, 0])
    compressor.encode(big)
    before = compressor.residual
    assert before is not None
    assert before[1] > 0
    with pytest.warns(gradwire.NonFiniteWarning, match=r"\b1\b.*residual"):
        compressor.encode(floats([0, FLT_MAX, 0]))
    assert same_bits(compressor.residual, before)


def test_bf16_marks_what_it_would_round_to_infinity() -> None:
    compressor = gradwire.Compressor("bf16:ef=on", 2)
    compressor.encode(floats([1.001, 0]))
    before = compressor.residual
    with pytest.warns(gradwire.NonFiniteWarning, match=r"\b1\b"):
        compressor.encode(floats([0, FLT_MAX]))
    assert same_bits(compressor.residual, before)


def test_a_warning_made_an_error_loses_nothing() -> None:
    compressor = gradwire.Compressor("3lc", 3)
    compressor.encode(floats([3, 1, -1]))
    before = compressor.residual
    with pytest.raises(gradwire.NonFiniteWarning):  # the filter of this module
        compressor.encode(floats([np.nan, 0, 0]))
    assert same_bits(compressor.residual, before)


# Residuals


def test_an_input_that_cancels_the_residual_clears_it() -> None:
    compressor = gradwire.Compressor("3lc:s=1.9", 3)
    compressor.encode(floats([1, 0.5, -0.25]))
    residual = compressor.residual
    assert residual is not None
    assert residual.any()
    frame = compressor.encode(-residual)
    assert len(frame) == 32
    assert same_bits(compressor.residual, floats([0, 0, 0]))


@pytest.mark.parametrize("codec", WITH_RESIDUAL)
def test_a_compressor_resumes_from_its_state(codec: str) -> None:
    numel = 5000
    first = gradwire.Compressor(codec, numel)
    for step in range(3):
        first.encode(gradient(numel, step), step)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = gradwire.Compressor(codec, numel)
    second.load_state_dict(state)
    assert same_bits(second.residual, first.residual)
    for step in range(3, 6):
        x = gradient(numel, step)
        assert second.encode(x, step) == first.encode(x, step)
    assert same_bits(second.residual, first.residual)


def test_a_state_is_a_copy() -> None:
    compressor = gradwire.Compressor("3lc", 50)
    compressor.encode(gradient(50))
    state, residual = compressor.state_dict(), compressor.residual
    kept = pickle.dumps(state)
    assert residual is not None
    copy = residual.copy()
    residual[:] = 7
    compressor.encode(gradient(50, 1))
    assert pickle.dumps(state) == kept
    compressor.load_state_dict(state)
    assert same_bits(compressor.residual, copy)


def test_a_state_of_another_compressor_is_refused() -> None:
    state = gradwire.Compressor("3lc", 50).state_dict()
    for other in (
        gradwire.Compressor("3lc", 51),
        gradwire.Compressor("raw", 50),
        gradwire.Compressor("3lc:ef=off", 50),
    ):
        with pytest.raises(gradwire.GradwireError):
            other.load_state_dict(state)
    compressor = gradwire.Compressor("3lc", 50)
    for wrong in ({}, {"numel": 50}):
        with pytest.raises((gradwire.GradwireError, KeyError, TypeError)):
            compressor.load_state_dict(wrong)


def test_a_codec_without_error_feedback_has_no_residual() -> None:
    for codec in ("raw", "bf16", "3lc:ef=off"):
        compressor = gradwire.Compressor(codec, 50)
        x = gradient(50)
        assert compressor.encode(x) == compressor.encode(x)
        assert compressor.residual is None
        compressor.load_state_dict(compressor.state_dict())


# Frames that are not what they should be


def test_inspect_tells_what_a_frame_is() -> None:
    x = gradient(1000)
    frame = gradwire.encode(x, "3lc:s=1.75")
    found = gradwire.inspect(frame)
    checksum = found.pop("checksum")
    assert int.from_bytes(frame[20:24], "little") == (
        int(checksum, 16) if isinstance(checksum, str) else checksum
    )
    assert found == {
        "kind": "frame",
        "version": 1,
        "codec": "3lc:s=1.75",
        "dtype": "float32",
        "numel": 1000,
        "payload_bytes": len(frame) - 32,
        "frame_bytes": len(frame),
        "bits_per_value": 8 * len(frame) / 1000,
        "non_finite": False,
    }
    assert gradwire.inspect(gradwire.encode(np.zeros(0, np.float32), "raw"))["bits_per_value"] == 0


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_and_every_trailing_byte_is_refused(codec: str) -> None:
    frame = gradwire.encode(gradient(60), codec)
    for size in range(len(frame)):
        with pytest.raises(gradwire.GradwireError) as error:
            gradwire.decode(frame[:size])
        assert has_code(error, "truncated")
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.decode(frame + b"\0")
    assert has_code(error, "trailing_bytes")


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_is_refused(codec: str) -> None:
    frame = gradwire.encode(gradient(60), codec)
    for position in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[position // 8] ^= 1 << position % 8
        out = np.zeros(60, np.float32)
        for call in (
            lambda data=damaged: gradwire.decode(data),
            lambda data=damaged, out=out: gradwire.decode_into(data, out, accumulate=True),
            lambda data=damaged: gradwire.inspect(data),
        ):
            with pytest.raises(gradwire.GradwireError):
                call()
        assert not out.any()


def test_more_values_than_asked_for_are_refused() -> None:
    frame = gradwire.encode(np.zeros(1000, np.float32), "3lc")
    assert gradwire.decode(frame, max_numel=1000).size == 1000
    with pytest.raises(gradwire.GradwireError, match="1000") as error:
        gradwire.decode(frame, max_numel=999)
    assert has_code(error, "limit_exceeded")


def test_an_error_is_a_value_error_with_a_code() -> None:
    assert issubclass(gradwire.GradwireError, ValueError)
    with pytest.raises(gradwire.GradwireError) as error:
        gradwire.decode(b"PK" + bytes(40))
    assert has_code(error, "bad_magic")
    assert issubclass(gradwire.NonFiniteWarning, Warning)
