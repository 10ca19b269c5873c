"""gradwire.contrib.sglang against a receiver that does what SGLang's description of the format says
(pull request 30366: python/sglang/srt, /pull_weights)."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import zstandard

from gradwire.contrib.sglang import WeightFolders
from gradwire.files import OutputFile
from gradwire.weights import Shard, WeightsError
from states import assert_same, state_of


def pull(local: Path, folders: Path, version: int) -> int:
    """Brings the checkpoint in the file `local` to a version from the one before; how many tensors
    have changed."""
    folder = folders / f"weight_v{version:06d}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    meta = index["metadata"]
    assert (int(meta["version"]), int(meta["base_version"])) == (version, version - 1)
    ways = meta["delta_encoding"], meta["compression_format"], meta["checksum_format"]
    assert ways == ("xor", "zstd", "adler32")
    tensors = safetensors.torch.load_file(local)
    seen: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            checksums = opened.metadata()
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                packed = opened.get_tensor(name)
                assert packed.dtype == np.uint8
                seen[name] = file.name
                region = tensors[name].reshape(-1).view(torch.uint8).numpy()
                region ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8)
                assert f"{zlib.adler32(region):08x}" == checksums[name]
    assert index["weight_map"] == seen
    safetensors.torch.save_file(tensors, local)
    return len(seen)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    safetensors.torch.save_file(state_of(0), tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def test_a_receiver_follows(tmp_path: Path, base: Path) -> None:
    folders = WeightFolders(tmp_path / "out", base)
    local = tmp_path / "local.safetensors"
    local.write_bytes((base / "model.safetensors").read_bytes())
    for version in range(1, 4):
        assert folders.publish(state_of(version)) == version == folders.version
        assert pull(local, tmp_path / "out", version) == 3
        assert_same(safetensors.torch.load_file(local), state_of(version))
    folders.publish(state_of(3))
    assert pull(local, tmp_path / "out", 4) == 0
    assert len(list((tmp_path / "out" / "weight_v000004").iterdir())) == 1


def test_what_another_thread_writes_is_read_once(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that mixes two steps is followed, too, and so is the next."""
    folders = WeightFolders(tmp_path / "out", base)
    local = tmp_path / "local.safetensors"
    local.write_bytes((base / "model.safetensors").read_bytes())
    state, write = state_of(1), WeightFolders._write

    def step_before_writing(*given: Any) -> None:
        for values in state.values():
            values.copy_(values.flip(0))
        write(*given)

    monkeypatch.setattr(WeightFolders, "_write", step_before_writing)
    folders.publish(state)
    monkeypatch.undo()
    folders.publish(state)
    for version in (1, 2):
        pull(local, tmp_path / "out", version)
    assert_same(safetensors.torch.load_file(local), state)


def test_dtype_names_and_tied_tensors(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    safetensors.torch.save_file({"model.embed": torch.zeros(40, dtype=torch.bfloat16)}, base)
    folders = WeightFolders(
        tmp_path / "out", base, dtype="bfloat16", rename=lambda name: f"model.{name}"
    )
    embed = torch.linspace(0, 1, 40)
    folders.publish({"embed": embed, "head": embed})
    local = tmp_path / "local.safetensors"
    local.write_bytes(base.read_bytes())
    pull(local, tmp_path / "out", 1)
    assert_same(safetensors.torch.load_file(local), {"model.embed": embed.bfloat16()})


@pytest.mark.parametrize("kept", ["embed", "head", "tail"])
def test_the_checkpoint_may_have_any_name_of_tied_tensors(tmp_path: Path, kept: str) -> None:
    """It was refused unless it had the first one; safetensors' save_model() keeps another."""
    base, embed = tmp_path / "base.safetensors", torch.linspace(0, 1, 40)
    safetensors.torch.save_file({kept: torch.zeros(40)}, base)
    WeightFolders(tmp_path / "out", base).publish({"embed": embed, "head": embed, "tail": embed})
    pull(base, tmp_path / "out", 1)
    assert_same(safetensors.torch.load_file(base), {kept: embed})


def test_what_these_folders_cannot_say_is_refused(tmp_path: Path, base: Path) -> None:
    folders = WeightFolders(tmp_path / "out", base)
    with pytest.raises(WeightsError, match=r"'new' is F32 \[2\]; the checkpoint lacks it"):
        folders.publish(state_of(1) | {"new": torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"'bias' is F32 \[8\]; the checkpoint has F32 \[7\]"):
        folders.publish({"bias": torch.zeros(8)})
    with pytest.raises(WeightsError, match=r"'bias' is F64 \[7\]; the checkpoint has F32 \[7\]"):
        folders.publish({"bias": torch.zeros(7, dtype=torch.float64)})
    with pytest.raises(WeightsError, match=r"a part of \[7\]"):
        folders.publish({"bias": Shard(torch.zeros(3), (2,), (7,))})
    with pytest.raises(WeightsError, match=r"the state lacks 'step', 'weight' of the checkpoint"):
        folders.publish({"bias": torch.zeros(7)})
    assert folders.version == 0
    folders.publish(state_of(1))
    with pytest.raises(WeightsError, match=r"weight_v000001 is of an earlier start"):
        WeightFolders(tmp_path / "out", base)
    with pytest.raises(WeightsError, match=r"no \.safetensors files"):
        WeightFolders(tmp_path / "other", tmp_path / "nothing")


def test_what_an_error_leaves_is_not_published(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines took the file of a version that had no index, though nothing had changed then."""
    folders, write = WeightFolders(tmp_path / "out", base), OutputFile.write

    def fill(self: OutputFile, data: bytes) -> int:
        if b"base_version" in bytes(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFile, "write", fill)
        with pytest.raises(OSError, match="No space left"):
            folders.publish(state_of(1))
    local = tmp_path / "local.safetensors"
    local.write_bytes((base / "model.safetensors").read_bytes())
    for version, time in ((1, 0), (2, 5)):
        assert folders.publish(state_of(time)) == version
        pull(local, tmp_path / "out", version)
        assert_same(safetensors.torch.load_file(local), state_of(time))


def test_a_version_that_was_interrupted_is_not_written_twice(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ones were made for tensors that no engine had."""
    folders, write = WeightFolders(tmp_path / "out", base), WeightFolders._write
    folders.publish(state_of(1))

    def interrupt(*given: Any) -> None:
        write(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WeightFolders, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folders.publish(state_of(2))
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"weight_v000002 is there.*take an empty folder"):
            folders.publish(state_of(3))
