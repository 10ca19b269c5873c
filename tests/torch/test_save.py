"""`gradwire.torch.save`: a file is whole or as it was."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradwire.torch
from gradwire import files

BEFORE: dict[str, Any] = {
    "model": torch.arange(1000.0),
    "gradwire": {"residuals": [], "codec": "3lc:s=1"},
}
AFTER: dict[str, Any] = {
    "model": torch.arange(5000.0),
    "gradwire": {"residuals": [], "codec": "3lc:s=1.5"},
}


def load(path: Path) -> int:
    """The number of values of the model in the file."""
    state = torch.load(path, weights_only=True)
    assert torch.equal(state["model"], torch.arange(float(state["model"].numel())))
    return int(state["model"].numel())


def save_and_die(path: Path, at_byte: int) -> None:
    """Saves AFTER in a child that is killed when so many bytes are written. Returns when it is."""
    child = os.fork()
    if child == 0:
        write = files.OutputFile.write

        def killing(self: files.OutputFile, data: bytes | memoryview) -> int:
            left = at_byte - self.size
            if left > memoryview(data).nbytes:
                return write(self, data)
            write(self, memoryview(data).cast("B")[:left])
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        with mock.patch.object(files.OutputFile, "write", killing):
            gradwire.torch.save(path, AFTER)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_a_kill_at_any_byte_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt"
    gradwire.torch.save(path, AFTER)
    size = path.stat().st_size
    gradwire.torch.save(path, BEFORE)
    draw = random.Random(0)
    for at_byte in [0, 1, size, *(draw.randrange(size) for _ in range(50))]:
        save_and_die(path, at_byte)
        assert load(path) == BEFORE["model"].numel()
        assert len(list(tmp_path.iterdir())) == 2, "the next save removes what the last one left"
    gradwire.torch.save(path, AFTER)
    assert load(path) == AFTER["model"].numel()
    assert list(tmp_path.iterdir()) == [path]


def test_two_that_save_at_once_spare_each_other(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with files.replace_file(path) as first:
        first.write(b"first")
        with files.replace_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_another_name_is_no_rest(tmp_path: Path) -> None:
    others = [tmp_path / name for name in (".other.pt.01234567", ".model.pt.0123456", ".model.pt")]
    for other in others:
        other.touch()
    gradwire.torch.save(tmp_path / "model.pt", BEFORE)
    assert all(other.exists() for other in others)


def test_a_kill_before_the_first_file_leaves_none(tmp_path: Path) -> None:
    save_and_die(tmp_path / "rank0.pt", 100)
    assert not (tmp_path / "rank0.pt").exists()


def test_bytes_are_on_the_disk_before_they_have_the_name(tmp_path: Path) -> None:
    calls: list[str] = []
    with (
        mock.patch.object(os, "fsync", side_effect=lambda *_: calls.append("fsync")),
        mock.patch.object(Path, "replace", side_effect=lambda *_: calls.append("replace")),
    ):
        gradwire.torch.save(tmp_path / "rank0.pt", BEFORE)
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("room", [0, 100, 700, 5000, 12000])
def test_a_full_disk_leaves_the_file_and_is_named(tmp_path: Path, room: int) -> None:
    path = tmp_path / "rank0.pt"
    gradwire.torch.save(path, BEFORE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # of every file of this process
    try:
        with pytest.raises(OSError, match=r"rank0\.pt") as raised:
            gradwire.torch.save(path, AFTER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert load(path) == BEFORE["model"].numel()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank0.pt"]
