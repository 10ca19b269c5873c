"""`gradwire compress` and `decompress` on float16 and bfloat16 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradients
import gradwire
from cli_runner import run
from gradients import NAMES, same_bits
from gradwire.container import Tensor, TensorFile, serialize
from gradwire.tensor_files import read_tensor_file, widen, write_tensor_file

pytest.importorskip("safetensors")

DTYPES = {"F16": "float16", "BF16": "bfloat16"}
EVERY_BITS = np.arange(2**16, dtype=np.uint16)
EXACT = {"F16": ["raw", "fp16"], "BF16": ["raw", "bf16"]}

Bits = NDArray[np.uint16]


def narrow(values: NDArray[np.float32], dtype: str) -> Bits:
    """Rounds values, which must be finite and in range, ties to even."""
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen_bits(bits: Bits, dtype: str) -> NDArray[np.float32]:
    return widen(bits.view(np.float16) if dtype == "F16" else bits)


def finite_bits(dtype: str) -> Bits:
    return EVERY_BITS[np.isfinite(widen_bits(EVERY_BITS, dtype))]


def gradient(dtype: str, *shape: int) -> Bits:
    return narrow(gradients.gradient(int(np.prod(shape))), dtype).reshape(shape)


def save(path: Path, dtype: str, bits: Bits) -> None:
    tensor = Tensor("t", dtype, bits.shape, bits.tobytes())
    with path.open("wb") as file:
        write_tensor_file(TensorFile("safetensors", (tensor,)), file)


def load(path: Path, dtype: str) -> Bits:
    (tensor,) = read_tensor_file(path).tensors
    assert tensor.dtype == dtype
    return np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [*NAMES, "3lc:s=1.75,coder=rice", "qsgd:coder=elias"])
def test_a_tensor_comes_back_in_its_dtype(tmp_path: Path, dtype: str, codec: str) -> None:
    bits = gradient(dtype, 30, 70)
    path, back = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save(path, dtype, bits)
    report = run("compress", path, "--codec", codec, "--json").json["files"][0]
    assert run("decompress", f"{path}.gw", "-o", back).code == 0
    restored = load(back, dtype)
    x = widen_bits(bits.ravel(), dtype)
    expected = narrow(gradwire.decode(gradwire.encode(x, codec)), dtype)
    assert np.array_equal(restored.ravel(), expected)
    assert restored.shape == bits.shape
    error = x.astype(float) - widen_bits(restored.ravel(), dtype)
    (row,) = report["tensors"]
    assert (row["dtype"], row["reason"], row["bytes"]) == (dtype, "", bits.nbytes)
    assert row["bits_per_value"] == 8 * row["stored_bytes"] / bits.size
    assert row["max_error"] == np.abs(error).max()
    expected_error = np.linalg.norm(error) / np.linalg.norm(x.astype(float))
    assert row["relative_error"] == pytest.approx(expected_error, rel=1e-12)
    if codec in EXACT[dtype]:
        assert row["max_error"] == 0
        assert np.array_equal(restored, bits)
        assert row["stored_bytes"] == bits.nbytes + 32
    (entry,) = run("inspect", f"{path}.gw", "--json").json["tensors"]
    assert (entry["dtype"], entry["storage"]) == (dtype, "frame")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_survives_an_exact_codec(tmp_path: Path, dtype: str) -> None:
    """raw keeps all bits of a NaN; the other exact codec keeps numbers and infinities."""
    path, back = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save(path, dtype, EVERY_BITS)
    for codec in EXACT[dtype]:
        report = run("compress", path, "-c", codec, "-f", "--json").json["files"][0]
        assert report["max_error"] == report["relative_error"] == 0
        run("decompress", f"{path}.gw", "-o", back, "-f")
        restored = load(back, dtype)
        if codec == "raw":
            assert np.array_equal(restored, EVERY_BITS)
        is_nan = np.isnan(widen_bits(EVERY_BITS, dtype))
        assert np.array_equal(restored[~is_nan], EVERY_BITS[~is_nan])
        assert np.isnan(widen_bits(restored[is_nan], dtype)).all()


def test_float16_npy(tmp_path: Path) -> None:
    x = gradients.gradient(5000).astype(np.float16).reshape(50, 100)
    path = tmp_path / "x.npy"
    np.save(path, x)
    report = run("compress", path, "-c", "raw", "--json").json["files"][0]
    assert report["tensors"][0]["bits_per_value"] == 16 + 8 * 32 / 5000
    run("decompress", f"{path}.gw", "-f")
    assert np.load(path).tobytes() == x.tobytes()
    assert np.load(path).dtype == np.float16
    swapped = x.astype(">f2")
    np.save(path, swapped)
    assert "stored as they are (dtype >f2)" in run("compress", path, "-c", "raw", "-f").err
    run("decompress", f"{path}.gw", "-f")
    assert np.load(path).tobytes() == swapped.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_becomes_infinite_is_an_error(tmp_path: Path, dtype: str) -> None:
    """3LC decodes to 1.75 times the largest value, or to the largest float32."""
    path = tmp_path / "x.safetensors"
    save(path, dtype, finite_bits(dtype))
    result = run("compress", path, "-c", "3lc:s=1.75")
    assert result.code == 1
    assert f"makes finite values infinite in {DTYPES[dtype]}" in result.err
    assert "--plain 't' stores it as it is" in result.err
    assert not Path(f"{path}.gw").exists()
    assert run("compress", path, "-c", "3lc:s=1.75", "--plain", "t").code == 0
    run("decompress", f"{path}.gw", "-f")
    assert np.array_equal(load(path, dtype), finite_bits(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_named_and_plain_keeps_it(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    bits = gradient(dtype, 20, 10)
    bits[3, 7] = 0x7F81 if dtype == "BF16" else 0x7C01
    save(path, dtype, bits)
    result = run("compress", path, "-c", "3lc")
    assert result.code == 1
    assert "37" in result.err
    assert "--plain 't'" in result.err
    run("compress", path, "-c", "3lc", "--plain", "t")
    run("decompress", f"{path}.gw", "-f")
    assert np.array_equal(load(path, dtype), bits)


def test_empty_and_scalar(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    shapes: list[tuple[int, ...]] = [(), (0, 4)]
    for shape in shapes:
        bits = np.full(shape, 0x3F80, np.uint16)
        save(path, "BF16", bits)
        assert run("compress", path, "-c", "3lc", "-f").code == 0
        assert run("decompress", f"{path}.gw", "-f").code == 0
        assert np.array_equal(load(path, "BF16"), bits)


def test_the_frame_must_hold_the_tensors_dtype(tmp_path: Path) -> None:
    frame = gradwire.encode(np.ones(6, np.float16), "raw")
    cases: list[tuple[Any, str, str]] = [
        ("npy", "<f4", "its dtype is '<f4', the frame holds float16"),
        ("npy", "<f8", "valid ones for a frame: <f4, <f2"),
        ("npy", "F16", "valid ones for a frame: <f4, <f2"),
        ("safetensors", "BF16", "its dtype is 'BF16', the frame holds float16"),
        ("safetensors", "<f2", "valid ones for a frame: F32, F16, BF16"),
    ]
    for kind, dtype, said in cases:
        content = TensorFile(kind, (Tensor("", dtype, (6,), frame, "frame"),))
        (tmp_path / "x.gw").write_bytes(b"".join(serialize(content)))
        for command in ("decompress", "inspect"):
            result = run(command, tmp_path / "x.gw")
            assert result.code == 1
            assert said in result.err


# encode and decode with dtype=


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_encoded_as_their_dtype(dtype: str) -> None:
    bits = gradient(dtype, 5000)
    frame = gradwire.encode(bits, "raw", dtype=DTYPES[dtype])
    assert gradwire.inspect(frame)["dtype"] == DTYPES[dtype]
    assert len(frame) == 32 + bits.nbytes
    if dtype == "F16":
        assert frame == gradwire.encode(bits.view(np.float16), "raw")
    decoded = gradwire.decode(frame, dtype=DTYPES[dtype])
    assert decoded.dtype == (np.float16 if dtype == "F16" else np.uint16)
    assert decoded.tobytes() == bits.tobytes()
    assert same_bits(gradwire.decode(frame), widen_bits(bits, dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("target", gradwire.simd_targets())
def test_ties_go_to_even_and_large_values_to_infinity(threads: int, target: str) -> None:
    x = np.tile(np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 65519, 65520, np.nan], np.float32), 20_000)
    frame = gradwire.encode(x, "raw")
    halves = gradwire.decode(frame, dtype="float16", threads=threads, target=target)
    with np.errstate(over="ignore"):
        assert halves.tobytes() == x.astype(np.float16).tobytes()
    upper = gradwire.decode(frame, dtype="bfloat16", threads=threads, target=target)
    assert upper[:6].tolist() == [0x3F80, 0x3F80, 0x3F82, 0x4780, 0x4780, 0x7FC0]
    assert np.array_equal(upper, np.tile(upper[:6], 20_000))


def test_a_marker_is_nan_in_every_dtype() -> None:
    with pytest.warns(gradwire.NonFiniteWarning):
        frame = gradwire.encode(np.array([np.inf, 1], np.float16), "3lc")
    assert np.isnan(gradwire.decode(frame, dtype="float16")).all()
    assert gradwire.decode(frame, dtype="bfloat16").tolist() == [0x7FC0] * 2


def test_wrong_dtypes_are_named() -> None:
    bits = np.zeros(3, np.uint16)
    with pytest.raises(gradwire.GradwireError, match="valid ones are: float32, bfloat16, float16"):
        gradwire.encode(bits, "raw", dtype="half")
    with pytest.raises(gradwire.GradwireError, match="expected a uint16 array, as dtype= says"):
        gradwire.encode(np.zeros(3, np.float32), "raw", dtype="bfloat16")
    with pytest.raises(gradwire.GradwireError, match="got dtype uint16"):
        gradwire.encode(bits, "raw")
    with pytest.raises(gradwire.GradwireError, match="valid ones are"):
        gradwire.decode(gradwire.encode(bits, "raw", dtype="float16"), dtype="float64")
