"""Data sets in memory: images, and batches of them, sharded by rank, seeded, cropped and flipped.
text.py has the text.

A batch depends on nothing but seed, world size, rank and step: all codecs see the same images.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradwire_lab.train import text
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import ACCURACY, IMAGES

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
Floats = NDArray[np.float32]

FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")

# Pixels added on each side before the random crop. CIFAR-10: He et al. 2015, section 4.2. The
# clothes of Fashion-MNIST fill their 28 pixels, so 4 would cut off much (after 400 steps the
# accuracy of lenet is 4 points lower than with 2).
CROP_PADDING = {"cifar10": 4, "fashion-mnist": 2}

_TEST_BATCH = 250


@dataclass(frozen=True)
class ImageSet:
    """images: uint8 (n, channels, side, side); labels: int64 (n,)."""

    images: Bytes
    labels: Labels


@dataclass(frozen=True)
class Images:
    """mean, std: float32 (channels,), of the training images scaled to 0..1. augments: whether
    those of a batch are cropped and flipped."""

    name: str
    train: ImageSet
    test: ImageSet
    mean: Floats
    std: Floats
    augments: bool = True

    metric = ACCURACY

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, side, classes."""
        _, channels, side, _ = self.train.images.shape
        return channels, side, 10

    def describe(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            digest.update(np.ascontiguousarray(part.images))
            digest.update(np.ascontiguousarray(part.labels))
        counts = f"{len(self.train.labels):,} images, {len(self.test.labels):,} test images"
        return f"{counts} (SHA-256 {digest.hexdigest()[:16]})"

    def batches(self, batch: int, world: int, rank: int, seed: int) -> Batches:
        return Batches(self, batch, world, rank, seed)

    def test_batches(self) -> Iterator[tuple[Floats, Labels]]:
        for start in range(0, len(self.test.labels), _TEST_BATCH):
            part = slice(start, start + _TEST_BATCH)
            yield self.normalise(self.test.images[part]), self.test.labels[part]

    def normalise(self, images: Bytes) -> Floats:
        """uint8 (b, channels, side, side) -> float32 of the same shape, mean 0, deviation 1."""
        scale = (1.0 / (255.0 * self.std)).astype(np.float32)[None, :, None, None]
        shift = (self.mean / self.std).astype(np.float32)[None, :, None, None]
        normalised: Floats = images * scale - shift
        return normalised


Data = Images | text.Text


def load(name: str, data_dir: Path | None) -> Data:
    """A data set of recipes.METRICS. Raises TrainError."""
    return load_images(name, data_dir) if name in IMAGES else text.load(name, data_dir)


def load_images(name: str, data_dir: Path | None) -> Images:
    """`fashion-mnist` or `cifar10`. Raises TrainError."""
    if name == "cifar10":
        folder = _locate_cifar10(data_dir)
        train, test = _cifar_set(folder, _CIFAR_TRAIN), _cifar_set(folder, [_CIFAR_TEST])
    else:
        folder = _locate_fashion_mnist(data_dir)
        train, test = _idx_set(folder, "train"), _idx_set(folder, "t10k")
    # Histograms of bytes are exact, so all ranks get the same mean and deviation.
    planes = np.moveaxis(train.images, 1, 0)
    shares = [np.bincount(plane.ravel(), minlength=256) / plane.size for plane in planes]
    levels = np.arange(256) / 255.0
    mean = np.array([share @ levels for share in shares], np.float32)
    variances = [share @ (levels - m) ** 2 for share, m in zip(shares, mean, strict=True)]
    return Images(name, train, test, mean, np.sqrt(variances).astype(np.float32))


# Fashion-MNIST: the IDX format of MNIST, gzipped.


def _locate_fashion_mnist(data_dir: Path | None) -> Path:
    folder = data_dir or FASHION_MNIST_DIR
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        if not (folder / f"{part}-ubyte.gz").is_file():
            raise TrainError(
                f"Fashion-MNIST is not in {folder}: no {part}-ubyte.gz. On Debian and Ubuntu: "
                "apt-get install dataset-fashion-mnist. Elsewhere: put its four *-ubyte.gz files "
                "in a folder and name it with --data-dir"
            )
    return folder


def _idx_set(folder: Path, part: str) -> ImageSet:
    images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", dimensions=3)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", dimensions=1)
    if len(images) != len(labels):
        raise TrainError(f"{folder}: {len(images)} {part} images but {len(labels)} labels")
    return ImageSet(images[:, None], labels.astype(np.int64))


def _read_idx(path: Path, dimensions: int) -> Bytes:
    """Header: two zero bytes, 8 (unsigned byte), the number of dimensions, each big-endian u32."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise TrainError(f"cannot read {path}: {error}") from error
    head = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < head:
        raise TrainError(f"{path} is not an IDX file of bytes in {dimensions} dimensions")
    shape = [int(d) for d in np.frombuffer(content, ">u4", dimensions, offset=4)]
    if len(content) - head != math.prod(shape):
        raise TrainError(f"{path} holds {len(content) - head} bytes; its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


# CIFAR-10: the "binary" version of its authors, unpacked. Their "python" version is pickles, which
# can run code, and is not read.

_CIFAR_TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
_CIFAR_TEST = "test_batch.bin"
_CIFAR_ROW = 1 + 3 * 32 * 32  # a label, and the red, the green, the blue plane
_CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def _locate_cifar10(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise TrainError(
            f"CIFAR-10 needs --data-dir: the folder where {_CIFAR_SOURCE} was unpacked"
        )
    for folder in (data_dir, data_dir / "cifar-10-batches-bin"):
        if (folder / _CIFAR_TEST).is_file():
            return folder
    for folder in (data_dir, data_dir / "cifar-10-batches-py"):
        if (folder / "test_batch").is_file():
            raise TrainError(
                f"{folder} has CIFAR-10's python version, whose files are pickles and could run "
                f"code: take the binary version, {_CIFAR_SOURCE}, which has the same images"
            )
    raise TrainError(
        f"no CIFAR-10 in {data_dir}: neither it nor cifar-10-batches-bin below it has {_CIFAR_TEST}"
    )


def _cifar_set(folder: Path, names: list[str]) -> ImageSet:
    rows = np.concatenate([_read_cifar(folder / name) for name in names])
    return ImageSet(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64))


def _read_cifar(path: Path) -> Bytes:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error}") from error
    if content.size == 0 or content.size % _CIFAR_ROW:
        raise TrainError(f"{path}: {content.size} bytes are not whole rows of {_CIFAR_ROW}")
    return content.reshape(-1, _CIFAR_ROW)


# Batches


class Batches:
    """The training batches of one rank.

    Every epoch is one permutation of all images. Its step k uses the k-th run of world * batch
    images, and rank r the r-th part of that run. The last images, which do not fill a run, are left
    out of that epoch.
    """

    def __init__(self, data: Images, batch: int, world: int, rank: int, seed: int) -> None:
        count = len(data.train.labels)
        if batch * world > count:
            raise TrainError(
                f"{world} workers x {batch} images do not fit in the {count} images of {data.name}"
            )
        pad = CROP_PADDING[data.name] if data.augments else 0
        self._data = data
        self._padded = np.pad(data.train.images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        self._batch, self._world, self._rank, self._seed = batch, world, rank, seed
        self.steps_per_epoch = count // (batch * world)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def indices(self, step: int) -> Labels:
        """The indices of the step's training images, int64 (batch,)."""
        epoch, k = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order = rng.permutation(len(self._data.train.labels))
            self._epoch = epoch
        start = (k * self._world + self._rank) * self._batch
        return self._order[start : start + self._batch]

    def at(self, step: int) -> tuple[Floats, Labels]:
        """Images float32 (batch, channels, side, side), normalised and, where the data set says
        so, augmented; labels."""
        chosen = self.indices(step)
        if not self._data.augments:
            return self._data.normalise(self._padded[chosen]), self._data.train.labels[chosen]
        rng = np.random.default_rng([self._seed, step, self._rank, 1])
        images = crop_and_flip(self._padded, chosen, self._data.shape[1], rng)
        return self._data.normalise(images), self._data.train.labels[chosen]


def crop_and_flip(padded: Bytes, chosen: Labels, side: int, rng: np.random.Generator) -> Bytes:
    """A random side x side window of each chosen padded image, mirrored with probability 1/2.

    padded: uint8 (n, channels, side + 2p, side + 2p) -> uint8 (len(chosen), channels, side, side).
    """
    count, places = len(chosen), padded.shape[2] - side + 1
    window = np.arange(side)
    rows = rng.integers(places, size=(count, 1)) + window
    mirrored = rng.random((count, 1)) < 0.5
    columns = rng.integers(places, size=(count, 1)) + np.where(mirrored, window[::-1], window)
    images: Bytes = padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
