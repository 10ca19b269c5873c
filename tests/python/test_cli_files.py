"""`gradwire compress` and `decompress`, and the files that they read and write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradients
import gradwire
from cli_runner import run
from gradients import Floats, floats
from gradwire.container import Tensor, TensorFile, serialize

safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")


def gradient(*shape: int, seed: int = 0) -> Floats:
    return gradients.gradient(math.prod(shape), seed).reshape(shape)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("codec", ["raw", "bf16", "3lc:s=1.00", "3lc:s=1.75,coder=none"])
def test_npy_comes_back_as_the_codec_keeps_it(tmp_path: Path, codec: str) -> None:
    x = gradient(30, 7, 11)
    np.save(tmp_path / "x.npy", x)
    report = run("compress", tmp_path / "x.npy", "--codec", codec, "--json").json["files"][0]
    assert report["output"] == str(tmp_path / "x.npy.gw")
    (tmp_path / "x.npy").unlink()
    run("decompress", tmp_path / "x.npy.gw")
    restored = np.load(tmp_path / "x.npy")
    assert same_bits(restored, gradwire.decode(gradwire.encode(x, codec)).reshape(x.shape))
    error = np.linalg.norm(x.astype(float) - restored) / np.linalg.norm(x.astype(float))
    assert report["relative_error"] == pytest.approx(error, rel=1e-12)
    assert report["max_error"] == np.abs(x.astype(float) - restored).max()
    assert report["tensors"][0]["reason"] == ""
    assert report["ratio"] == (x.nbytes + 128) / (tmp_path / "x.npy.gw").stat().st_size


def test_safetensors_keeps_names_shapes_dtypes_and_metadata(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "layer.weight": gradient(64, 32),
        "layer.bias": gradient(32, seed=1),
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 5), np.float32),
        "zeros": np.zeros((4, 4), np.float32),
        "steps": np.arange(6).reshape(2, 3),
        "half": np.array([1, 2, 3], np.float16),
        "mask": np.array([True, False]),
    }
    safetensors_numpy.save_file(tensors, tmp_path / "m.safetensors", {"step": "7"})
    result = run(
        "compress", tmp_path / "m.safetensors", "-c", "3lc:s=1.50", "-o", tmp_path / "m.gw"
    )
    assert result.code == 0
    assert "2 of 8 tensors stored as they are (dtype BOOL, dtype I64)" in result.err
    back = tmp_path / "back.safetensors"
    report = run("decompress", tmp_path / "m.gw", "-o", back, "--json").json
    assert report == {
        "files": [
            {
                "input": str(tmp_path / "m.gw"),
                "output": str(back),
                "bytes": back.stat().st_size,
                "tensors": 8,
            }
        ]
    }
    with safetensors.safe_open(tmp_path / "back.safetensors", framework="np") as file:
        assert file.metadata() == {"step": "7"}
    restored = safetensors_numpy.load_file(tmp_path / "back.safetensors")
    assert set(restored) == set(tensors)
    for name, x in tensors.items():
        if x.dtype in (np.float32, np.float16):
            decoded = gradwire.decode(gradwire.encode(x.ravel(), "3lc:s=1.50"))
            x = decoded.reshape(x.shape).astype(x.dtype)
        assert same_bits(restored[name], x), name


def test_a_dtype_numpy_does_not_know_passes_through(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.uint8)
    spec = safetensors.TensorSpec(
        dtype="float8_e4m3fn", shape=[2, 2], data_ptr=values.ctypes.data, data_len=values.nbytes
    )
    original = bytes(safetensors.serialize({"b": spec}))
    (tmp_path / "b.safetensors").write_bytes(original)
    assert run("compress", "-c", "3lc", tmp_path / "b.safetensors").code == 0
    assert run("decompress", tmp_path / "b.safetensors.gw", "--force").code == 0
    assert (tmp_path / "b.safetensors").read_bytes() == original


@pytest.mark.parametrize(
    "x",
    [
        np.arange(10),
        np.arange(5, dtype=">f4"),
        np.array(["a", "bcd"]),
        np.zeros((0, 3), np.float64),
        np.array(5, np.int8),
        np.array([1 + 2j, 3]),
    ],
)
def test_other_npy_dtypes_come_back_byte_for_byte(tmp_path: Path, x: Any) -> None:
    np.save(tmp_path / "x.npy", x)
    original = (tmp_path / "x.npy").read_bytes()
    result = run("compress", "-c", "3lc", tmp_path / "x.npy")
    assert f"1 of 1 tensors stored as they are (dtype {x.dtype.str})" in result.err
    assert run("decompress", tmp_path / "x.npy.gw", "-f").code == 0
    assert (tmp_path / "x.npy").read_bytes() == original


def test_zeros_have_no_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100, np.float32))
    report = run("compress", "-c", "3lc", tmp_path / "x.npy", "--json").json["files"][0]
    assert report["relative_error"] == report["tensors"][0]["relative_error"] == 0


def test_a_large_error_is_said_aloud(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(1000))
    assert "energy is lost" in run("compress", tmp_path / "x.npy", "-c", "3lc").err
    assert run("compress", tmp_path / "x.npy", "-c", "bf16", "-f").err == ""


def test_a_codec_must_be_chosen(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(10))
    result = run("compress", tmp_path / "x.npy")
    assert result.code == 2
    assert "--codec" in result.err


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(10))
    result = run("compress", tmp_path / "x.npy", "-c", "raw", "-o", tmp_path / "no" / "x.gw")
    assert result.err == f"gradwire: error: {tmp_path / 'no'}: no such directory\n"


def test_fortran_order_keeps_values_at_their_places(tmp_path: Path) -> None:
    x = np.asfortranarray(gradient(5, 9))
    np.save(tmp_path / "x.npy", x)
    run("compress", tmp_path / "x.npy", "-c", "raw")
    run("decompress", tmp_path / "x.npy.gw", "-o", tmp_path / "y.npy")
    assert np.array_equal(np.load(tmp_path / "y.npy"), x)


def test_threads_do_not_change_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(100_003))
    for threads in (1, 2, 3):
        out = tmp_path / f"{threads}.gw"
        assert (
            run("compress", "-c", "3lc", tmp_path / "x.npy", "--threads", threads, "-o", out).code
            == 0
        )
    assert len({(tmp_path / f"{threads}.gw").read_bytes() for threads in (1, 2, 3)}) == 1


def test_verbose_reports_each_tensor(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "a.weight": gradient(40, 50),
        "a.bias": gradient(50),
        "steps": np.arange(3),
    }
    safetensors_numpy.save_file(tensors, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    out = run("compress", path, "-v", "--plain", "*.bias", "-c", "3lc:s=1.25").out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "3lc:s=1.25" in lines["a.weight"]
    assert "40x50" in lines["a.weight"]
    assert "is (--plain *.bias)" in lines["a.bias"]
    assert "is (dtype I64)" in lines["steps"]
    report = run("compress", "-c", "3lc", path, "-f", "--plain", "*.bias", "--json").json["files"][
        0
    ]
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["a.bias"]["storage"] == "plain"
    assert rows["a.bias"]["stored_bytes"] == 200
    frame = gradwire.encode(tensors["a.weight"].ravel(), "3lc:s=1.00")
    assert rows["a.weight"]["stored_bytes"] == len(frame)
    assert rows["a.weight"]["bits_per_value"] == 8 * len(frame) / 2000


def test_a_plain_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """Of several files one must have such a tensor."""
    for name in ("a", "b"):
        safetensors_numpy.save_file({name: gradient(20)}, tmp_path / f"{name}.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    refused = run("compress", a, "-c", "3lc", "--plain", "a", "--plain", "*.bais")
    assert refused.code == 1
    assert refused.err.endswith(f"{a}: no tensor matches --plain '*.bais'\n")
    assert not (tmp_path / "a.safetensors.gw").exists()
    assert run("compress", a, b, "-c", "3lc", "--plain", "a", "--plain", "*.bais").code == 1
    assert not (tmp_path / "b.safetensors.gw").exists()
    assert run("compress", a, b, "-f", "-c", "3lc", "--plain", "a", "--plain", "b").code == 0


def test_several_files_go_into_a_directory(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", gradient(20))
    (tmp_path / "out").mkdir()
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert run("compress", "-c", "3lc", *files, "-o", tmp_path / "out").code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.npy.gw", "b.npy.gw"]
    result = run("compress", "-c", "3lc", *files, "-o", tmp_path / "one.gw")
    assert result.code == 1
    assert "must be a directory" in result.err
    assert not (tmp_path / "one.gw").exists()


def test_no_result_overwrites_another(tmp_path: Path) -> None:
    files = [tmp_path / folder / "x.npy" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        np.save(file, gradient(20))
    (tmp_path / "out").mkdir()
    result = run("compress", "-c", "3lc", *files, "-o", tmp_path / "out", "--force")
    assert result.code == 1
    assert f"{files[0]} and {files[1]} would both be written to" in result.err


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(20))
    (tmp_path / "x.npy.gw").write_bytes(b"mine")
    result = run("compress", "-c", "3lc", tmp_path / "x.npy")
    assert result.code == 1
    assert "x.npy.gw exists; --force overwrites it" in result.err
    assert (tmp_path / "x.npy.gw").read_bytes() == b"mine"
    assert run("compress", "-c", "3lc", tmp_path / "x.npy", "--force").code == 0
    assert (tmp_path / "x.npy.gw").read_bytes() != b"mine"
    assert "exists" in run("decompress", tmp_path / "x.npy.gw").err


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_an_error_that_names_the_element(tmp_path: Path, value: float) -> None:
    x = gradient(50, 20)
    x[13, 7] = x[40, 1] = value
    safetensors_numpy.save_file({"fine": gradient(9), "head.bias": x}, tmp_path / "m.safetensors")
    result = run("compress", "-c", "3lc", tmp_path / "m.safetensors")
    assert result.code == 1
    assert "'head.bias'" in result.err
    assert "267" in result.err
    assert not (tmp_path / "m.safetensors.gw").exists()
    assert "--plain 'head.bias'" in result.err
    assert (
        run("compress", "-c", "3lc", tmp_path / "m.safetensors", "--plain", "head.bias").code == 0
    )
    run("decompress", tmp_path / "m.safetensors.gw", "-o", tmp_path / "y.safetensors")
    assert same_bits(safetensors_numpy.load_file(tmp_path / "y.safetensors")["head.bias"], x)


def test_raw_keeps_nan_and_inf(tmp_path: Path) -> None:
    x = floats([1, np.nan, -np.inf, 2])
    np.save(tmp_path / "x.npy", x)
    assert "--codec raw" in run("compress", "-c", "3lc", tmp_path / "x.npy").err
    report = run("compress", tmp_path / "x.npy", "-c", "raw", "--json").json["files"][0]
    assert report["relative_error"] == report["max_error"] == 0
    run("decompress", tmp_path / "x.npy.gw", "-f")
    assert same_bits(np.load(tmp_path / "x.npy"), x)


def test_input_files_that_cannot_be_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(100))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(whole[:-1])
    (tmp_path / "long.npy").write_bytes(whole + b"\0")
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "text.safetensors").write_text("1 2 3 4 5 6 7 8 9")
    (tmp_path / "x.bin").write_bytes(whole)
    np.savez(tmp_path / "x.npz", x=gradient(3))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "records.npy", np.zeros(3, dtype=[("a", "<f4")]))
    for name, message in {
        "short.npy": "cannot read it as .npy",
        "long.npy": "bytes follow the array",
        "text.npy": "cannot read it as .npy",
        "text.safetensors": "cannot read it as .safetensors",
        "x.bin": "not a .npy or .safetensors file",
        "x.npz": "save each array as .npy",
        "object.npy": "cannot read it as .npy",
        "records.npy": "not supported",
        "missing.npy": "No such file",
    }.items():
        result = run("compress", "-c", "3lc", tmp_path / name)
        assert result.code == 1, name
        assert result.err.startswith(f"gradwire: error: {tmp_path / name}: "), name
        assert message in result.err, name
        assert len(result.err.splitlines()) == 1, name


def test_a_wrong_codec_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    result = run("compress", tmp_path / "missing.npy", "-c", "3lc:s=2")
    assert result.code == 2
    assert "[1, 2)" in result.err


def test_a_damaged_file_leaves_nothing_behind(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(1000))
    run("compress", "-c", "3lc", tmp_path / "x.npy")
    (tmp_path / "x.npy").unlink()
    data = bytearray((tmp_path / "x.npy.gw").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x.npy.gw").write_bytes(data)
    for command in ("decompress", "inspect"):
        result = run(command, tmp_path / "x.npy.gw")
        assert result.code == 1
        assert "checksum" in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy.gw"]


def test_shape_and_frame_must_agree(tmp_path: Path) -> None:
    frame = gradwire.encode(gradient(7), "raw")
    content = TensorFile("npy", (Tensor("", "<f4", (2, 4), frame, "frame"),))
    (tmp_path / "x.gw").write_bytes(b"".join(serialize(content)))
    for command in ("decompress", "inspect"):
        result = run(command, tmp_path / "x.gw")
        assert result.code == 1
        assert "7 values, the shape [2, 4] needs 8" in result.err


def test_a_plain_tensor_must_have_the_bytes_of_its_shape(tmp_path: Path) -> None:
    for dtype in ("<i8", "|O", "no such type"):
        content = TensorFile("npy", (Tensor("", dtype, (2,), bytes(15)),))
        (tmp_path / "x.gw").write_bytes(b"".join(serialize(content)))
        result = run("decompress", tmp_path / "x.gw")
        assert result.code == 1
        assert repr(dtype) in result.err
    content_st = TensorFile("safetensors", (Tensor("t", "I64", (2,), bytes(15)),))
    (tmp_path / "x.gw").write_bytes(b"".join(serialize(content_st)))
    assert "tensor 0 ('t'): 15 bytes" in run("decompress", tmp_path / "x.gw").err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.gw"]


def test_many_zeros_are_refused_above_a_limit(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(10_000, np.float32))
    run("compress", "-c", "3lc", tmp_path / "x.npy")
    result = run("decompress", tmp_path / "x.npy.gw", "-f", "--max-values", "9999")
    assert result.code == 1
    assert "10000 values in all; --max-values allows 9999" in result.err
    assert run("decompress", tmp_path / "x.npy.gw", "-f", "--max-values", "10000").code == 0


def test_decompress_restores_the_kind_it_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(10))
    run("compress", "-c", "3lc", tmp_path / "x.npy", "-o", tmp_path / "any.name")
    result = run("decompress", tmp_path / "any.name", "-o", tmp_path / "y.safetensors")
    assert result.code == 1
    assert "holds a .npy file, not .safetensors" in result.err
    assert run("decompress", tmp_path / "any.name").code == 0
    assert (tmp_path / "any.name.npy").exists()
    assert "does not begin with 'GC'" in run("decompress", tmp_path / "x.npy").err
