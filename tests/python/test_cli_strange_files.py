"""Files that are rare, damaged or hostile: `compress`, `decompress` and `inspect` carry them, or
end with one sentence that names the file and the tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire
from cli_runner import run
from golden import container as spec_container
from golden import encoder, spec
from gradients import gradient
from gradwire.container import Tensor, TensorFile, serialize
from gradwire.tensor_dtypes import SAFETENSORS_BITS
from gradwire.tensor_files import read_safetensors, read_tensor_file, write_tensor_file

safetensors = pytest.importorskip("safetensors")

FRAME = gradwire.encode(np.ones(3, np.float32), "raw")
PACKET = encoder.encode_packet(spec.Packet(spec.PUSH, 1, 2, 3, (spec.parse_frame(FRAME),)))
IN_NO_SHELL = [sys.executable, "-c", "from gradwire.cli import main; main()"]


def packed(path: Path, *tensors: Tensor) -> Path:
    path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    return path


def safetensors_file(path: Path, header: object, data: bytes = b"") -> Path:
    """header: JSON, or its text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(*arguments: object) -> str:
    """The one line with which a command ends."""
    result = run(*arguments)
    assert result.code == 1, result.out
    assert result.out == ""
    assert result.err.startswith("gradwire: error: ")
    assert result.err.count("\n") == 1
    assert len(result.err) < 1000
    return result.err.removeprefix("gradwire: error: ").rstrip("\n")


# In the place of a frame: bytes, and what the error says.
WRONG_FRAMES = {
    "packet": (PACKET, "it does not start with 'GW'"),
    "cut": (FRAME[:-1], "are there"),
    "short": (FRAME[:31], "less than a header"),
    "nothing": (b"", "less than a header"),
    "short-packet": (b"GP", "less than a header"),
    "container": (spec_container.seal_container(b"{}" * 20, b""), "it does not start with 'GW'"),
    "other-dtype": (gradwire.encode(np.ones(3, np.float16), "raw"), "the frame holds float16"),
    "other-length": (gradwire.encode(np.ones(4, np.float32), "raw"), "needs 3"),
}


@pytest.mark.parametrize("name", WRONG_FRAMES)
@pytest.mark.parametrize("command", ["decompress", "inspect"])
def test_what_is_no_frame_is_refused_by_its_tensor(tmp_path: Path, command: str, name: str) -> None:
    data, reason = WRONG_FRAMES[name]
    good = Tensor("good", "F32", (3,), FRAME, "frame")
    path = packed(tmp_path / "x.gw", good, Tensor("bad", "F32", (3,), data, "frame"))
    error = refusal(command, path)
    assert error.startswith(f"{path}: tensor 'bad': ")
    assert reason in error
    assert list(tmp_path.iterdir()) == [path]


def test_content_that_only_decoding_shows_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    frame = bytearray(gradwire.encode(gradient(1000), "3lc:coder=none"))
    frame[-1] = 255
    damaged = encoder.seal_frame(16, 0, 0, 1000, bytes(frame[32:]))
    first = Tensor("a", "F32", (3,), FRAME, "frame")
    path = packed(tmp_path / "x.gw", first, Tensor("b", "F32", (1000,), damaged, "frame"))
    assert run("inspect", path).code == 0
    assert refusal("decompress", path).startswith(f"{path}: tensor 'b': 3lc: ")
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_of_the_metadata_is_refused(tmp_path: Path) -> None:
    """A .safetensors file with such a tensor could not be read."""
    path = packed(tmp_path / "x.gw", Tensor("__metadata__", "U8", (1,), b"1"))
    for command in ("decompress", "inspect"):
        error = refusal(command, path)
        assert error.startswith(f"{path}: ")
        assert "'__metadata__'" in error


def test_a_name_that_no_safetensors_file_can_hold(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.gw", Tensor("w\ud800", "U8", (1,), b"1"))
    assert run("inspect", path).code == 0
    assert refusal("decompress", path) == (
        f"{path}: cannot write .safetensors: 'w\\ud800' has half of a surrogate pair, which no "
        ".safetensors file can hold"
    )
    assert list(tmp_path.iterdir()) == [path]


EVERY_DTYPE = {
    "F4": ([3, 2], 3),
    "F6_E2M3": ([4], 3),
    "F6_E3M2": ([2, 4], 6),
    **{name: ([2], 2) for name in ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0")},
    **{name: ([1, 2], 2) for name in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    **{name: ([2], 4) for name in ("I16", "U16")},
    **{name: ([], 4) for name in ("I32", "U32")},
    **{name: ([1], 8) for name in ("C64", "F64", "I64", "U64")},
}


def test_every_dtype_of_safetensors_comes_back_byte_for_byte(tmp_path: Path) -> None:
    """Those of 4 and 6 bits, too; one of them refused the whole file."""
    header: dict[str, Any] = {"__metadata__": {"made by": "a täst", "": "\x7f\n"}}
    end = 0
    for dtype, (shape, size) in reversed(EVERY_DTYPE.items()):
        header[f"t {dtype}"] = entry(dtype, shape, end, end + size)
        end += size
    path = safetensors_file(tmp_path / "x.safetensors", header, os.urandom(end))
    before, metadata = read_safetensors(memoryview(path.read_bytes()))
    reasons = [r["reason"] for r in run("compress", path, "-c", "3lc", "--json").json["files"][0][
        "tensors"
    ]]  # fmt: skip
    assert sorted(reasons) == sorted(f"dtype {dtype}" for dtype in EVERY_DTYPE)
    assert run("decompress", f"{path}.gw", "-o", tmp_path / "y.safetensors").code == 0
    restored = (tmp_path / "y.safetensors").read_bytes()
    assert read_safetensors(memoryview(restored)) == (before, metadata)
    parts = dict(safetensors.deserialize(restored))
    assert {tensor.name: bytes(tensor.data) for tensor in before} == {
        name: bytes(part["data"]) for name, part in parts.items()
    }


# The names of dtypes in the package's writer; it has none for those of 6 bits.
WRITER_NAMES = {
    "BOOL": "bool",
    **{f"{letter}{bits}": f"{name}{bits}" for letter, name, widths in (
        ("U", "uint", (8, 16, 32, 64)), ("I", "int", (8, 16, 32, 64)), ("F", "float", (16, 32, 64))
    ) for bits in widths},
    "F4": "float4_e2m1fn_x2",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@pytest.mark.parametrize("metadata", [{}, {"key": "a\nvalue"}])
def test_the_bytes_are_those_of_the_package(tmp_path: Path, metadata: dict[str, str]) -> None:
    assert WRITER_NAMES.keys() == SAFETENSORS_BITS.keys() - {"F6_E2M3", "F6_E3M2"}
    data = np.arange(16, dtype=np.uint8)
    tensors, specs = [], {}
    for index, (dtype, writer_name) in enumerate(WRITER_NAMES.items()):
        values = 128 // SAFETENSORS_BITS[dtype]
        for name in (f"b{index}", f'a"{index}\u00fc'):
            tensors.append(Tensor(name, dtype, (1, values), data.tobytes()))
            specs[name] = safetensors.TensorSpec(
                dtype=writer_name,
                shape=[1, values // 2 if dtype == "F4" else values],  # "x2": pairs
                data_ptr=data.ctypes.data,
                data_len=data.nbytes,
            )
    with (tmp_path / "x").open("wb") as file:
        write_tensor_file(TensorFile("safetensors", tuple(tensors), metadata), file)
    assert (tmp_path / "x").read_bytes() == safetensors.serialize(specs, metadata or None)


WRONG_SAFETENSORS = {
    "empty": (None, b"", "cut off"),
    "cut": ("{}" + " " * 90, b"", "cut off"),
    "no-json": ("{", b"", "Expecting"),
    "array": ("[]", b"", "no JSON object"),
    "nan": ('{"a":NaN}', b"", "NaN is no JSON"),
    "deep": ('{"a":{"shape":[[]]}}', b"", "3 deep"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not an object of strings"),
    "twice": ('{"a":{},"\\u0061":{}}', b"", "a key occurs twice"),
    "unknown": ({"a": entry("F128", [1], 0, 16)}, bytes(16), "'a' has dtype F128, not supported"),
    "field": ({"a": entry("U8", [1], 0, 1) | {"x": 1}}, b"1", "'a' must have"),
    "missing": ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "'a' must have"),
    "shape": ({"a": entry("U8", [-1], 0, 1)}, b"1", "'a': shape"),
    "fraction": ('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"1", "'a': shape"),
    "true": ({"a": entry("U8", [True], 0, 1)}, b"1", "'a': shape"),
    "end": ({"a": entry("U8", [2], 0, 2)}, b"1", "'a': its data would end at byte 2 of 1"),
    "swapped": ({"a": entry("U8", [0], 1, 0)}, b"1", "'a': its data would end"),
    "size": ({"a": entry("F32", [1], 0, 2)}, b"12", "'a': 2 bytes are not those"),
    "half": ({"a": entry("F4", [3], 0, 2)}, b"12", "'a': 2 bytes are not those"),
    "overlap": (
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123",
        "'b': its data, from byte 1, overlaps",
    ),
    "gap": ({"a": entry("U8", [1], 1, 2)}, b"12", "'a': its data, from byte 1, leaves a gap"),
    "more": ({"a": entry("U8", [1], 0, 1)}, b"12", "1 bytes belong to no tensor"),
    "large": ({"a": entry("U8", [0, 2**41], 0, 0)}, b"", "('a'): more than 2^40 values"),
    "rank": ({"a": entry("U8", [1] * 65, 0, 1)}, b"1", "('a'): 65 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SAFETENSORS)
def test_a_wrong_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    header, data, reason = WRONG_SAFETENSORS[name]
    path = safetensors_file(tmp_path / "x.safetensors", header or {}, data)
    if header is None:
        path.write_bytes(data)
    elif name == "cut":
        path.write_bytes(path.read_bytes()[:50])
    error = refusal("compress", path, "-c", "raw")
    assert error.startswith(f"{path}: ")
    assert reason in error
    assert list(tmp_path.iterdir()) == [path]


def test_every_truncation_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    header = {"b": entry("U8", [1], 4, 5), "a": entry("F32", [1], 0, 4)}
    path = safetensors_file(tmp_path / "x.safetensors", header, bytes(5))
    whole = path.read_bytes()
    assert [t.name for t in read_tensor_file(path).tensors] == ["a", "b"]
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            read_safetensors(memoryview(whole[:size]))


def test_what_the_package_writes_is_read_and_what_it_refuses_is_refused(tmp_path: Path) -> None:
    """Damages a file at each place; where both read it, they read the same."""
    header = {"b": entry("U8", [1], 4, 5), "a": entry("F32", [1], 0, 4), "__metadata__": {"x": "y"}}
    whole = safetensors_file(tmp_path / "x", header, b"12345").read_bytes()
    read = 0
    for at in range(8 * len(whole)):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        try:
            tensors, _ = read_safetensors(memoryview(bytes(data)))
        except ValueError:
            continue
        parts = dict(safetensors.deserialize(bytes(data)))
        assert {t.name: (t.dtype, list(t.shape), bytes(t.data)) for t in tensors} == {
            name: (part["dtype"], part["shape"], bytes(part["data"]))
            for name, part in parts.items()
        }
        read += 1
    assert read > 40


NPY = {
    "big-endian": np.arange(5, dtype=">f8"),
    "scalar": np.array(2.5, np.float64),
    "empty": np.zeros((3, 0, 2), np.int16),
    "dates": np.array(["2020-01-01", "NaT"], "<M8[25s]"),
    "differences": np.array([1, 2], ">m8[us]"),
    "text": np.array(["ä", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "raw": np.zeros(3, "V5"),
    "complex": np.ones((2, 2), np.complex128),
    "long": np.ones(2, np.longdouble),
}


@pytest.mark.parametrize("name", NPY)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_dtype_of_numpy_comes_back(
    tmp_path: Path, name: str, version: tuple[int, int]
) -> None:
    x: NDArray[Any] = NPY[name]
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, x, version=version)
    assert run("compress", path, "-c", "3lc").code == 0
    assert run("decompress", f"{path}.gw", "-o", tmp_path / "y.npy").code == 0
    restored = np.load(tmp_path / "y.npy")
    assert (restored.dtype, restored.shape) == (x.dtype, x.shape)
    assert restored.tobytes() == x.tobytes()


def npy(descr: str, shape: str, data: bytes, version: bytes = b"\1\0") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")
    return b"\x93NUMPY" + version + size + text + data


def test_a_file_of_python_2_is_read_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy("'<f4'", "(2L,)", bytes(8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_tensor_file(tmp_path / "x.npy").tensors[0].shape == (2,)


WRONG_NPY = {
    "empty": (b"", "cannot read it"),
    "magic": (b"\x93NUMPX\1\0" + bytes(20), "magic"),
    "version": (npy("'<f4'", "(1,)", bytes(4), b"\4\0"), "version 4.0 is not known"),
    "cut-header": (npy("'<f4'", "(1,)", b"")[:20], "cannot read it"),
    "cut": (npy("'<f4'", "(2,)", bytes(7)), "it is cut off"),
    "claim": (npy("'<f4'", "(1099511627777,)", bytes(8)), "it is cut off"),
    "more": (npy("'<f4'", "(1,)", bytes(5)), "bytes follow the array"),
    "negative": (npy("'<f4'", "(-1,)", b""), "negative"),
    "objects": (npy("'|O'", "(1,)", bytes(8)), "records or objects"),
    "records": (npy("[('a', '<f4')]", "(1,)", bytes(4)), "records or objects"),
    "sub-array": (npy("('<f4', (2,))", "(1,)", bytes(8)), "records or objects"),
    "no-dtype": (npy("'zz'", "(1,)", bytes(4)), "cannot read it"),
    "code": (npy("__import__('os')", "(1,)", bytes(4)), "cannot read it"),
    "large": (npy("'<f4'", "(0, 2199023255552)", b""), "more than 2^40 values"),
    "header": (npy("'<f4'", f"(1,{' ' * 11000})", bytes(4)), "cannot read it"),
}


@pytest.mark.parametrize("name", WRONG_NPY)
def test_a_wrong_npy_file_is_refused(tmp_path: Path, name: str) -> None:
    data, reason = WRONG_NPY[name]
    path = tmp_path / "x.npy"
    path.write_bytes(data)
    error = refusal("compress", path, "-c", "raw")
    assert error.startswith(f"{path}: ")
    assert reason in error
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    for name in ("x.npy", "x.safetensors"):
        (tmp_path / name).mkdir()
        assert refusal("compress", tmp_path / name, "-c", "raw").endswith(": Is a directory")
    for command in ("decompress", "inspect"):
        assert refusal(command, tmp_path).endswith(": Is a directory")
        assert refusal(command, tmp_path / "none") == f"{tmp_path}/none: No such file or directory"
    # Endless, so it is looked at before it is read.
    assert "neither a frame" in refusal("inspect", "/dev/zero")
    if os.geteuid() != 0:
        (tmp_path / "x.gw").touch(0)
        assert refusal("inspect", tmp_path / "x.gw").endswith("Permission denied")
        (tmp_path / "y.npy").touch(0)
        assert refusal("compress", tmp_path / "y.npy", "-c", "raw").endswith("Permission denied")


def test_pipes_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(100))
    run("compress", tmp_path / "x.npy", "-c", "raw", "-o", tmp_path / "x.gw")
    for source, name, command in (
        ("x.npy", "pipe.npy", ["compress", "-c", "raw", "-o", tmp_path / "y.gw", "--force"]),
        ("x.gw", "pipe", ["decompress", "-o", tmp_path / "y.npy", "--force"]),
        ("x.gw", "pipe", ["inspect"]),
    ):
        pipe = tmp_path / name
        if not pipe.exists():
            os.mkfifo(pipe)
        with subprocess.Popen(["sh", "-c", 'cat "$0" > "$1"', tmp_path / source, pipe]) as writer:
            result = run(command[0], pipe, *command[1:])
            writer.wait(timeout=60)
        assert result.code == 0, result.err
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_a_file_that_goes_to_stdout_goes_there_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(100))
    run("compress", tmp_path / "x.npy", "-c", "raw")
    for arguments in ([], ["--json"]):
        command = ["compress", tmp_path / "x.npy", "-c", "raw", "-o", "/dev/stdout", "--force"]
        done = subprocess.run(
            [*IN_NO_SHELL, *map(str, command), *arguments], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == (tmp_path / "x.npy.gw").read_bytes()
        assert b"x.npy" in done.stderr


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", gradient(100))
    path = tmp_path / "x.npy"
    whole = path.read_bytes()
    for more in ((), ("--force",)):
        assert f"{path} is an input" in refusal("compress", path, "-c", "raw", "-o", path, *more)
        assert path.read_bytes() == whole


def test_names_are_never_paths(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/abs", "a\0b", "\x1b[2J", "", ".", "a\nb"]
    tensors = tuple(Tensor(name, "F32", (3,), FRAME, "frame") for name in names)
    path = tmp_path / "x.gw"
    path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    assert run("decompress", path).code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "x.gw",
        "x.gw.safetensors".replace(".gw", ""),
    ]
    restored = read_tensor_file(tmp_path / "x.safetensors")
    assert sorted(tensor.name for tensor in restored.tensors) == sorted(names)
    printed = run("inspect", path).out
    assert "\x1b" not in printed
    assert "\\x1b[2J" in printed


@pytest.mark.parametrize(("name", "dtype"), [("F32", "f4"), ("F16", "f2")])
@pytest.mark.parametrize("spaces", range(4))
def test_values_need_not_be_aligned_in_a_file(
    tmp_path: Path, name: str, dtype: str, spaces: int
) -> None:
    values = np.arange(6).astype(dtype)
    header = {"byte": entry("U8", [1], 0, 1), "values": entry(name, [6], 1, 1 + values.nbytes)}
    path = tmp_path / "a.safetensors"
    safetensors_file(path, json.dumps(header) + " " * spaces, b"7" + values.tobytes())
    assert run("compress", path, "-c", "raw").code == 0
    assert run("decompress", f"{path}.gw", "-o", tmp_path / "b.safetensors").code == 0
    restored = dict(safetensors.deserialize((tmp_path / "b.safetensors").read_bytes()))
    assert bytes(restored["values"]["data"]) == values.tobytes()
    assert bytes(restored["byte"]["data"]) == b"7"
