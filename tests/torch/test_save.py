"""`gradwire.torch.save`: a file is whole or as it was."""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable
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
            gradwire.torch.save(AFTER, path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_a_kill_at_any_byte_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt"
    gradwire.torch.save(AFTER, path)
    size = path.stat().st_size
    gradwire.torch.save(BEFORE, path)
    draw = random.Random(0)
    for at_byte in [0, 1, size, *(draw.randrange(size) for _ in range(50))]:
        save_and_die(path, at_byte)
        assert load(path) == BEFORE["model"].numel()
        assert len(list(tmp_path.iterdir())) == 2, "the next save removes what the last one left"
    gradwire.torch.save(AFTER, path)
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
    gradwire.torch.save(BEFORE, tmp_path / "model.pt")
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
        gradwire.torch.save(BEFORE, tmp_path / "rank0.pt")
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("room", [0, 100, 700, 5000, 12000])
def test_a_full_disk_leaves_the_file_and_is_named(tmp_path: Path, room: int) -> None:
    path = tmp_path / "rank0.pt"
    gradwire.torch.save(BEFORE, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # of every file of this process
    try:
        with pytest.raises(OSError, match=r"rank0\.pt") as raised:
            gradwire.torch.save(AFTER, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert load(path) == BEFORE["model"].numel()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank0.pt"]


@pytest.mark.parametrize(
    ("call", "warns"),
    [
        (lambda path: gradwire.torch.save(BEFORE, path), False),
        (lambda path: gradwire.torch.save(BEFORE, str(path)), False),
        (lambda path: gradwire.torch.save(BEFORE, f=path), False),
        (lambda path: gradwire.torch.save(obj=BEFORE, f=path), False),
        (lambda path: gradwire.torch.save(path, BEFORE), True),
        (lambda path: gradwire.torch.save(str(path), BEFORE), True),
        (lambda path: gradwire.torch.save(path, state=BEFORE), True),
        (lambda path: gradwire.torch.save(path=path, state=BEFORE), True),
    ],
)
def test_the_order_is_that_of_torch_and_the_old_one_warns(
    tmp_path: Path, call: Callable[[Path], None], warns: bool
) -> None:
    path = tmp_path / "model.pt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(path)
    assert load(path) == 1000
    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)] * warns


def test_texts_are_saved_and_open_files_refused(tmp_path: Path) -> None:
    gradwire.torch.save("a text", str(tmp_path / "text.pt"))
    assert torch.load(tmp_path / "text.pt", weights_only=True) == "a text"
    for given in ((BEFORE, io.BytesIO()), (io.BytesIO(), BEFORE)):
        with pytest.raises(TypeError, match="needs a path"):
            gradwire.torch.save(*given)
    with (
        pytest.warns(match="ends with 0.3"),
        pytest.raises(TypeError, match="missing 1 required pos"),
    ):
        gradwire.torch.save(path=tmp_path / "model.pt")
