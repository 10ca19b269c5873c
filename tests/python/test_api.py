"""encode, decode and Compressor compute the paper's values, with the same bits everywhere."""

from __future__ import annotations

import copy
import pickle  # pickle: its own states, which users pickle
import threading
from typing import Any

import numpy as np
import pytest

import gradwire
from gradients import (
    CODECS,
    FLT_MAX,
    SIZES,
    STOCHASTIC,
    WITH_RESIDUAL,
    Floats,
    floats,
    gradient,
    has_code,
    same_bits,
)

pytestmark = pytest.mark.filterwarnings("error")


# 3LC and its residual, computed again in NumPy


class PlainThreeLc:
    """3LC (Lim, Andersen, Kaminsky 2019, section 3.1) in float32, with its residual."""

    def __init__(self, numel: int, s: float, bucket: int | None = None) -> None:
        self.s = np.float32(s)
        self.bucket = bucket or max(numel, 1)
        self.residual = np.zeros(numel, np.float32)

    def step(self, x: Floats) -> Floats:
        """Returns the decoded values and keeps the rest as the residual."""
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


# Properties of every codec


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
    draws = codec.partition(":")[0] in STOCHASTIC
    if not draws or numel > 100:
        for seed, step, stream in ((1, 0, 0), (0, 2, 0), (0, 0, 3)):
            other = gradwire.encode(x, codec, seed=seed, step=step, stream=stream)
            assert (other == frame) != draws
    compressor = gradwire.Compressor(codec, numel, seed=1, stream=3)
    drawn = gradwire.encode(x, codec, seed=1, step=2, stream=3)
    assert compressor.encode(x, step=2) == drawn
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


def test_arrays_of_ml_dtypes_are_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = gradient(1003).astype(ml_dtypes.bfloat16)
    x.flags.writeable = False
    for codec in CODECS:
        frame = gradwire.encode(x, codec)
        assert frame == gradwire.encode(x.view(np.uint16), codec, dtype="bfloat16")
        assert frame == gradwire.Compressor(codec, x.size).encode(x)
    with pytest.raises(gradwire.GradwireError, match="not C-contiguous"):
        gradwire.encode(x[::2], "raw")


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


@pytest.mark.parametrize("codec", CODECS)
def test_every_call_of_a_compressor_is_a_step(codec: str) -> None:
    numel = 1003
    counted, told = (gradwire.Compressor(codec, numel) for _ in range(2))
    out = np.empty(counted.max_encoded_size, np.uint8)
    for step in range(2):
        x = gradient(numel, step)
        assert counted.encode(x) == told.encode(x, step)
    with pytest.raises(gradwire.GradwireError):
        counted.encode(gradient(numel + 1))
    x = gradient(numel)
    assert out[: counted.encode_into(x, out)].tobytes() == told.encode(x, 2)
    state = counted.state_dict()
    assert state["next_step"] == 3
    assert counted.encode(x, 9) == told.encode(x, 9)
    assert counted.encode(x) == told.encode(x, 10)
    counted.load_state_dict({key: state[key] for key in ("codec", "numel", "residual")})
    assert counted.state_dict()["next_step"] == 0, "states of before it was kept"


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


@pytest.mark.parametrize("codec", CODECS)
def test_a_copied_compressor_goes_on_alike(codec: str) -> None:
    first = gradwire.Compressor(codec, 500, seed=3, stream=7, threads=2, target="scalar")
    first.encode(gradient(500))
    copies = [copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    frame = first.encode(gradient(500, 1))
    for each in copies:
        assert each.encode(gradient(500, 1)) == frame
        assert same_bits(each.residual, first.residual)


def test_a_pickled_state_of_a_compressor_is_checked() -> None:
    state = gradwire.Compressor("3lc", 50).__getstate__()
    for wrong in (state | {"residual": bytes(201)}, state | {"threads": 0}, {"codec": "3lc"}):
        with pytest.raises(gradwire.GradwireError):
            gradwire.Compressor.__new__(gradwire.Compressor).__setstate__(wrong)


def test_a_state_is_a_copy() -> None:
    compressor = gradwire.Compressor("3lc", 50)
    compressor.encode(gradient(50))
    state, residual = compressor.state_dict(), compressor.residual
    kept = pickle.dumps(state)
    assert residual is not None
    before = residual.copy()
    residual[:] = 7
    compressor.encode(gradient(50, 1))
    assert pickle.dumps(state) == kept
    compressor.load_state_dict(state)
    assert same_bits(compressor.residual, before)


def test_a_state_is_of_one_step_while_another_thread_encodes() -> None:
    compressor = gradwire.Compressor("3lc", 1 << 20)
    x = np.full(compressor.numel, 0.3, np.float32)  # equal values have equal residuals
    x[0] = 1

    def encode() -> None:
        for _ in range(200):
            compressor.encode(x)

    thread = threading.Thread(target=encode)
    thread.start()
    mixed = 0
    while thread.is_alive():
        residual = np.frombuffer(compressor.state_dict()["residual"], np.float32)[1:]
        mixed += int(residual.min() != residual.max())
    thread.join()
    assert mixed == 0


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
    with pytest.raises(gradwire.GradwireError, match=r"residual is None, but .* keeps a residual"):
        compressor.load_state_dict(state | {"residual": None})  # it kept the old one
    raw = gradwire.Compressor("raw", 50)
    with pytest.raises(gradwire.GradwireError, match=r"has a residual, but .* keeps none"):
        raw.load_state_dict(raw.state_dict() | {"residual": gradient(50)})


def test_a_dictionary_that_is_no_state_of_a_compressor_is_refused() -> None:
    compressor = gradwire.Compressor("3lc", 50)
    compressor.encode(gradient(50))
    state, kept = compressor.state_dict(), compressor.residual

    def check(wrong: dict[str, Any], error: str, code: str = "invalid_argument") -> None:
        with pytest.raises(gradwire.GradwireError, match=error) as raised:
            compressor.load_state_dict(wrong)
        assert raised.value.code == code
        assert same_bits(compressor.residual, kept)

    check({}, "^not a state of a Compressor: it lacks 'codec'$")
    for key in ("codec", "numel", "residual"):
        lacking = {name: value for name, value in state.items() if name != key}
        check(lacking, f"^not a state of a Compressor: it lacks '{key}'$")
    check(state | {"codec": 3}, "^not a state of a Compressor: its 'codec' is 3, expected a text$")
    for numel in ("50", -1, 2**64, None, 50.5):
        check(state | {"numel": numel}, f"its 'numel' is {numel!r}, expected a number of values$")
    check(state | {"next_step": -1}, "its 'next_step' is -1, expected a number$")
    check(state | {"residual": bytes(201)}, "201 bytes, which are no whole", "length_mismatch")
    check(state | {"residual": bytes(196)}, "has 49 values, expected 50", "length_mismatch")
    check(state | {"residual": "none"}, "str")
    check(state | {"residual": [0.0] * 50}, "list")


def test_a_codec_without_error_feedback_has_no_residual() -> None:
    for codec in ("raw", "bf16", "3lc:ef=off"):
        compressor = gradwire.Compressor(codec, 50)
        x = gradient(50)
        assert compressor.encode(x) == compressor.encode(x)
        assert compressor.residual is None
        compressor.load_state_dict(compressor.state_dict())
