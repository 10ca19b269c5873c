"""The text, its windows, and the models that predict its bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from gradwire_lab.train import data, text
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.text import CONTEXT, Windows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test").mkdir()
    for number in range(20):
        (tmp_path / f"part{number:02}.py").write_bytes(bytes([number]) * 100)
    (tmp_path / "test" / "part.py").write_bytes(b"left out")
    return tmp_path


def test_files_are_read_in_order_and_some_held_out(folder: Path) -> None:
    loaded = text.load("text", folder)
    assert loaded.test.tolist() == [10] * 100
    assert loaded.train.tolist() == [n for n in range(20) if n != 10 for _ in range(100)]
    said = "Python sources, 1,900 bytes, 100 bytes held out (SHA-256 "
    assert loaded.describe().startswith(said)


def test_a_folder_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=f"{tmp_path} holds too few Python sources: 0 files"):
        data.load("text", tmp_path)


def test_the_dictionary_is_held_out_by_blocks(tmp_path: Path) -> None:
    block = 1 << 18
    path = tmp_path / "gcide.dict.dz"
    path.write_bytes(gzip.compress(b"".join(bytes([n]) * block for n in range(12)), 1))
    loaded = text.load("gcide", tmp_path)
    assert set(loaded.test.tolist()) == {10}
    assert loaded.test.size == block
    assert set(loaded.train.tolist()) == {*range(10), 11}
    assert loaded.shape == (256, 256)
    inputs, targets = loaded.batches(2, 1, 0, 0).at(0)
    assert inputs.shape == (2, 256)
    assert targets.shape == (512,)


def test_a_dictionary_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gcide.dict.dz"
    with pytest.raises(TrainError, match=f"no {path}. On Debian and Ubuntu: apt-get install dict-"):
        data.load("gcide", tmp_path)
    path.write_bytes(b"no gzip")
    with pytest.raises(TrainError, match=f"cannot read {path}: Not a gzipped file"):
        data.load("gcide", tmp_path)
    path.write_bytes(gzip.compress(b"short"))
    with pytest.raises(TrainError, match=f"{path} is too short: 5 bytes"):
        data.load("gcide", tmp_path)


def test_every_machine_has_the_text() -> None:
    loaded = data.load("text", None)
    assert loaded.shape == (256, CONTEXT)
    inputs, targets = next(iter(loaded.test_batches()))
    assert inputs.shape[1] == CONTEXT
    assert targets.shape == (inputs.size,)


def test_windows_depend_on_seed_world_rank_and_step_alone() -> None:
    source = np.random.default_rng(0).integers(256, size=5000).astype(np.uint8)

    def at(step: int, **other: int) -> list[int]:
        place = {"batch": 3, "world": 2, "rank": 0, "seed": 1}
        return Windows(source, CONTEXT, **place | other).at(step)[0].ravel().tolist()

    assert at(4) == at(4)
    different = [at(4), at(5), at(4, rank=1), at(4, seed=2), at(4, world=3)]
    assert len({tuple(one) for one in different}) == len(different)


def test_the_target_is_the_next_byte() -> None:
    source = np.arange(200, dtype=np.uint8)
    inputs, targets = Windows(source, CONTEXT, batch=4, world=1, rank=0, seed=0).at(0)
    np.testing.assert_array_equal(inputs.ravel() + 1, targets)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt", 664_448), ("gpt10m", 10_020_160), ("lstm", 411_904)]
)
def test_models(name: str, parameters: int) -> None:
    torch = pytest.importorskip("torch")
    from gradwire_lab.train import models

    model = models.build(name, 256, CONTEXT, seed=0)
    assert models.parameter_count(model) == parameters
    short = torch.randint(256, (2, 8))
    logits = model(short)
    assert logits.shape == (16, 256)
    changed = short.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    after = model(changed)
    assert torch.allclose(after[:5], logits[:5], atol=1e-6)  # a byte is predicted from the earlier
    assert not torch.allclose(after[5:8], logits[5:8], atol=1e-6)
    assert torch.allclose(after[8:], logits[8:], atol=1e-6)
