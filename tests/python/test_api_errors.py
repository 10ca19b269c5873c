"""The Python API's errors for wrong codecs, NaN and Inf, and damaged frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire
from gradients import CODECS, FLT_MAX, NAMES, floats, gradient, has_code, same_bits

pytestmark = pytest.mark.filterwarnings("error")


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
        properties = {"error_feedback", "lossless", "draws", "shares_scales", "carries_non_finite"}
        assert codec.keys() == {"name", "summary", "source", "parameters"} | properties
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
    assert before is not None
    assert compressor.residual is not None
    if "bucket=" in codec:  # groups that were already encoded are restored up to one rounding
        rounding = 2.0**-23 * (np.abs(before) + np.abs(gradient(numel, 2)))
        assert (np.abs(compressor.residual - before) <= rounding).all()
        return
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


# Damaged frames


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


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("3lc,s=1", "3lc:s=1"),
        ("3lc s=1", "3lc:s=1"),
        ("3LC:s=1", "3lc:s=1"),
        ("3lc:S=1", "3lc:s=1"),
        ("3lc:s:1", "3lc:s=1"),
        ("3lc: s = 1", "3lc:s=1"),
        ("3lc(s=1)", "3lc:s=1"),
        ("3lc:s=1;coder=rice", "3lc:s=1,coder=rice"),
        ("3lc:s=1:coder=rice", "3lc:s=1,coder=rice"),
        ("3lc,s=1.75, coder=rice", "3lc:s=1.75,coder=rice"),
        ("QSGD bits 4, norm l2", "qsgd:bits=4,norm=l2"),
        ("qsgd,coder=elias-dense", "qsgd:coder=elias-dense"),
        (" raw", "raw"),
        ("3lc:", "3lc"),
        ("auto,bits=1", "auto:bits=1"),
        ("3lc,s=9", "3lc:s=9"),
    ],
)
def test_other_punctuation_gets_a_hint(text: str, meant: str) -> None:
    with pytest.raises(gradwire.GradwireError) as raised:
        gradwire.max_encoded_size(text, 1)
    assert str(raised.value).endswith(f". Did you mean '{meant}'?")


@pytest.mark.parametrize("text", ["zip,s=1", "3lc:s=9", "3lc:s", "3lc:t=1", "", ",,", "s=1,3lc"])
def test_what_would_not_help_is_no_hint(text: str) -> None:
    with pytest.raises(gradwire.GradwireError) as raised:
        gradwire.max_encoded_size(text, 1)
    assert "Did you mean" not in str(raised.value)


def test_an_exchange_with_other_punctuation_gets_a_hint() -> None:
    for text, meant in (
        ("hierarchical,ranks=2", "hierarchical:ranks=2"),
        ("Ring", "ring"),
        ("hierarchical:between:ring;ranks:2", "hierarchical:between=ring,ranks=2"),
    ):
        with pytest.raises(gradwire.GradwireError) as raised:
            gradwire.parse_exchange(text)
        assert str(raised.value).endswith(f". Did you mean '{meant}'?")
    with pytest.raises(gradwire.GradwireError) as raised:
        gradwire.parse_exchange("star,ranks=2")
    assert "Did you mean" not in str(raised.value)
