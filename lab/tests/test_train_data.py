"""Data sets from files, and batches of them."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradwire_lab.train import data
from gradwire_lab.train.errors import TrainError
from small_data import write_fashion_mnist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_fashion_mnist(tmp_path / "fashion-mnist", train=96, test=20)


def test_fashion_mnist(folder: Path) -> None:
    loaded = data.load_images("fashion-mnist", folder)
    assert loaded.train.images.shape == (96, 1, 28, 28)
    assert loaded.test.images.shape == (20, 1, 28, 28)
    assert loaded.shape == (1, 28, 10)
    normalised = loaded.normalise(loaded.train.images)
    assert normalised.dtype == np.float32
    assert abs(float(normalised.mean(dtype=np.float64))) < 1e-5
    assert abs(float(normalised.std(dtype=np.float64)) - 1) < 1e-5


def test_a_description_tells_images_from_others(folder: Path) -> None:
    loaded = data.load_images("fashion-mnist", folder)
    text = loaded.describe()
    assert re.fullmatch(r"96 images, 20 test images \(SHA-256 [0-9a-f]{16}\)", text)
    assert data.load_images("fashion-mnist", folder).describe() == text
    inverted = replace(loaded.test, images=255 - loaded.test.images)
    assert replace(loaded, test=inverted).describe() != text


def test_a_missing_data_set_names_package_and_path(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"dataset-fashion-mnist.*--data-dir") as caught:
        data.load_images("fashion-mnist", tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(TrainError, match="--data-dir"):
        data.load_images("cifar10", None)
    with pytest.raises(TrainError, match=r"test_batch") as caught:
        data.load_images("cifar10", tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "train-labels-idx1-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    for content in (
        b"not gzip",
        gzip.compress(whole)[:-9],
        gzip.compress(whole[:-1]),
        gzip.compress(whole + b"\0"),
        gzip.compress(b"\0\0\x0d" + whole[3:]),
        gzip.compress(whole[:6]),
        gzip.compress(b""),
    ):
        path.write_bytes(content)
        with pytest.raises(TrainError, match=r"train-labels-idx1-ubyte\.gz"):
            data.load_images("fashion-mnist", folder)


def test_cifar10(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    images = rng.integers(256, size=(6, 4, 3072), dtype=np.uint8)
    labels = rng.integers(10, size=(6, 4), dtype=np.uint8)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name, one, of_one in zip(names, images, labels, strict=True):
        rows = np.concatenate([of_one[:, None], one], axis=1)
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
    loaded = data.load_images("cifar10", tmp_path)
    assert len(loaded.mean) == 3
    np.testing.assert_array_equal(loaded.train.images, images[:5].reshape(20, 3, 32, 32))
    np.testing.assert_array_equal(loaded.train.labels, labels[:5].reshape(20))
    np.testing.assert_array_equal(loaded.test.images, images[5].reshape(4, 3, 32, 32))
    np.testing.assert_array_equal(loaded.test.labels, labels[5])


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_the_pickles_of_cifar10_are_not_read(tmp_path: Path, below: str) -> None:
    """A pickle can run code. The error names the archive that has none."""
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / "test_batch").write_bytes(b"cos\nmkdir\n(S'ran'\ntR.")
    with pytest.raises(TrainError, match=r"pickles .*cifar-10-binary\.tar\.gz"):
        data.load_images("cifar10", tmp_path)


def test_ranks_share_an_epoch_without_overlap(folder: Path) -> None:
    loaded = data.load_images("fashion-mnist", folder)
    ranks = [data.Batches(loaded, batch=5, world=3, rank=rank, seed=7) for rank in range(3)]
    steps = ranks[0].steps_per_epoch
    assert steps == 96 // 15
    for epoch in range(2):
        taken = np.concatenate(
            [r.indices(epoch * steps + step) for step in range(steps) for r in ranks]
        )
        assert len(set(taken.tolist())) == steps * 15
    first = [r.indices(0) for r in ranks]
    later = [r.indices(steps) for r in ranks]
    assert not np.array_equal(first, later)


def test_batches_depend_on_seed_rank_and_step_alone(folder: Path) -> None:
    loaded = data.load_images("fashion-mnist", folder)

    def batch(rank: int, seed: int, step: int, before: int | None = None) -> tuple[bytes, bytes]:
        batches = data.Batches(loaded, batch=8, world=2, rank=rank, seed=seed)
        if before is not None:
            batches.at(before)
        images, labels = batches.at(step)
        assert images.shape == (8, 1, 28, 28)
        return images.tobytes(), labels.tobytes()

    assert batch(0, 1, 3) == batch(0, 1, 3, before=40)
    assert len({batch(0, 1, 3), batch(1, 1, 3), batch(0, 2, 3), batch(0, 1, 4)}) == 4


def test_without_augmentation_a_batch_has_the_images_as_they_are(folder: Path) -> None:
    loaded = replace(data.load_images("fashion-mnist", folder), augments=False)
    batches = loaded.batches(8, 2, 1, 1)
    images, labels = batches.at(3)
    chosen = batches.indices(3)
    assert np.array_equal(images, loaded.normalise(loaded.train.images[chosen]))
    assert np.array_equal(labels, loaded.train.labels[chosen])
    augmented = replace(loaded, augments=True).batches(8, 2, 1, 1).at(3)[0]
    assert not np.array_equal(images, augmented)


def test_too_few_images(folder: Path) -> None:
    loaded = data.load_images("fashion-mnist", folder)
    data.Batches(loaded, batch=24, world=4, rank=0, seed=0)
    with pytest.raises(TrainError, match="96 images"):
        data.Batches(loaded, batch=25, world=4, rank=0, seed=0)


def test_crop_and_flip_takes_windows_of_the_padded_images() -> None:
    rng = np.random.default_rng(1)
    padded = rng.integers(256, size=(6, 2, 9, 9), dtype=np.uint8)
    chosen = rng.integers(6, size=300)
    images = data.crop_and_flip(padded, chosen, side=6, rng=rng)
    assert images.shape == (300, 2, 6, 6)
    seen = set()
    for image, index in zip(images, chosen, strict=True):
        windows = {
            (row, column, mirrored): padded[index, :, row : row + 6, column : column + 6][
                :, :, :: -1 if mirrored else 1
            ]
            for row in range(4)
            for column in range(4)
            for mirrored in (False, True)
        }
        places = [place for place, window in windows.items() if np.array_equal(image, window)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 32  # every place, mirrored and not
