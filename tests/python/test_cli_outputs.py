"""Where `compress` and `decompress` write, and what they print of the names in a file."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import gradwire
from cli_runner import run
from gradients import gradient
from gradwire.container import Tensor, TensorFile, serialize

IN_NO_SHELL = [sys.executable, "-c", "from gradwire.cli import main; main()"]


def saved(folder: Path, values: int = 100) -> Path:
    np.save(folder / "x.npy", gradient(values))
    return folder / "x.npy"


def packed(path: Path, *names: str, values: int = 4) -> Path:
    """A compressed file with a tensor of ones for each name."""
    frame = gradwire.encode(np.ones(values, np.float32), "raw")
    tensors = tuple(Tensor(name, "F32", (values,), frame, "frame") for name in names)
    path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    return path


def test_the_limit_of_values_counts_all_tensors_of_a_file(tmp_path: Path) -> None:
    """Small files with thousands of tensors, each below the limit, asked for a terabyte."""
    zeros = gradwire.encode(np.zeros(1000, np.float32), "3lc")
    tensors = tuple(Tensor(str(i), "F32", (1000,), zeros, "frame") for i in range(20))
    path = tmp_path / "x.gw"
    path.write_bytes(b"".join(serialize(TensorFile("safetensors", tensors))))
    result = run("decompress", path, "--max-values", 19_999)
    assert (result.code, result.out) == (1, "")
    assert "20000 values in all; --max-values allows 19999" in result.err
    assert run("decompress", path, "--max-values", 20_000).code == 0


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a device")
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
    try:
        device.write_bytes(b"")
    except OSError:
        pytest.skip("the folder allows no devices")
    report = run("compress", saved(tmp_path), "-c", "raw", "-o", device, "--force", "--json").json
    assert stat.S_ISCHR(device.stat().st_mode)
    assert report["files"][0]["stored_bytes"] > 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["null", "x.npy"]


def test_a_pipe_gets_the_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = saved(tmp_path)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert run("compress", path, "-c", "raw", "-o", pipe, "--force").code == 0
        read, _ = reader.communicate(timeout=60)
    run("compress", path, "-c", "raw")
    assert read == (tmp_path / "x.npy.gw").read_bytes()


def test_a_file_without_a_name_gets_the_file(tmp_path: Path) -> None:
    """Such as the stdout that another program has opened: "x (deleted)" was written beside it."""
    path = saved(tmp_path)
    run("compress", path, "-c", "raw")
    files = sorted(tmp_path.iterdir())
    with tempfile.TemporaryFile(dir=tmp_path) as nameless:
        command = ["compress", str(path), "-c", "raw", "-o", "/dev/stdout", "--force"]
        subprocess.run([*IN_NO_SHELL, *command], stdout=nameless, check=True, timeout=60)
        nameless.seek(0)
        assert nameless.read() == Path(f"{path}.gw").read_bytes()
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("closed", [[1], [0, 1, 2]])
def test_a_command_needs_no_open_streams(tmp_path: Path, closed: list[int]) -> None:
    """Without a stdout it wrote the file, and said "Bad file descriptor" and 1."""
    path, again = saved(tmp_path), tmp_path / "y.npy"

    def close() -> None:
        for one in closed:
            os.close(one)

    for given in (f"compress {path} -c raw", f"decompress {path}.gw -o {again}"):
        ended = subprocess.run(
            [*IN_NO_SHELL, *given.split()],
            capture_output=True,
            timeout=60,
            check=False,
            preexec_fn=close,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert again.read_bytes() == path.read_bytes()


def test_links_stay_and_need_force(tmp_path: Path) -> None:
    path = saved(tmp_path)
    link, file = tmp_path / "link.gw", tmp_path / "file.gw"
    link.symlink_to(file)
    result = run("compress", path, "-c", "raw", "-o", link)
    assert result.code == 1
    assert f"{link} is a symbolic link to {file}; --force writes" in result.err
    for _ in range(2):  # the second time, the file exists
        assert run("compress", path, "-c", "raw", "-o", link, "--force").code == 0
        assert link.is_symlink()
        assert file.stat().st_size > 400
    assert f"{link} exists; --force" in run("compress", path, "-c", "raw", "-o", link).err


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    path, target = saved(tmp_path, 10_000), tmp_path / "y.gw"
    ended = subprocess.run(
        [*IN_NO_SHELL, "compress", path, "-c", "raw", "-o", target],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert ended.returncode == 1
    assert ended.stderr == f"gradwire: error: {target}: File too large\n"
    if Path("/dev/full").exists():
        result = run("compress", path, "-c", "raw", "-o", "/dev/full", "--force")
        assert result.err == "gradwire: error: /dev/full: No space left on device\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy"]


STOPS = """
import os, signal, sys, threading
from pathlib import Path
from gradwire.files import replace_file

# A shell starts what runs in its background with the first ignored, and nohup with the second.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with replace_file(Path(sys.argv[1])) as file:
    file.write(b"a part")
    print("begun", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STOPS, str(tmp_path / "x")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(list(tmp_path.iterdir())) == 1
        time.sleep(0.1)  # until it pauses
        process.send_signal(number)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -number
    assert list(tmp_path.iterdir()) == []


EVIL = "w\x1b]0;owned\x07\u202e\n\ud800"
SHOWN = "w\\x1b]0;owned\\x07\\u202e\\n\\ud800"


def test_names_in_a_file_are_printed_with_escapes(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.gw", EVIL)
    for arguments in (["inspect", path], ["decompress", path, "--max-values", 4]):
        ended = subprocess.run(
            [*IN_NO_SHELL, *map(str, arguments)], capture_output=True, timeout=60, check=False
        )
        printed = ended.stdout + ended.stderr
        assert b"Traceback" not in printed, printed
        assert not set(b"\x1b\x07") & set(printed)
        assert b"\\ud800" in printed
    assert SHOWN in run("inspect", path).out
    assert run("inspect", path, "--json").json["tensors"][0]["name"] == EVIL


def test_a_name_beyond_the_terminals_encoding_is_printed_with_escapes(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.gw", "größe")
    ended = subprocess.run(
        [*IN_NO_SHELL, "inspect", str(path)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert b"gr\\xf6\\xdfe" in ended.stdout
