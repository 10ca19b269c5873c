"""Texts, byte by byte: the sources of Python's standard library, which every machine has, and a
dictionary, which is longer and of which Debian keeps one version.

Python versions differ, and so do their texts; `Text.describe` tells which one it is.
"""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import LOSS, TEXT

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]

DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
CONTEXT = 64
_LONG_CONTEXT = 256
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
_HELD_OUT_EVERY = 20  # files, or blocks of the dictionary
_BLOCK = 1 << 18
_TEST_BYTES = 768 * 64  # that an evaluation predicts
_TEST_BATCH_BYTES = 64 * 64


@dataclass(frozen=True)
class Text:
    """source: its name. train, test: bytes of whole files or blocks, one after the other. context:
    bytes of a sequence."""

    source: str
    train: Bytes
    test: Bytes
    context: int

    metric = LOSS

    @property
    def shape(self) -> tuple[int, int]:
        """Vocabulary, context."""
        return 256, self.context

    def describe(self) -> str:
        digest = hashlib.sha256(self.train.tobytes() + self.test.tobytes()).hexdigest()[:16]
        return (
            f"{self.source}, {self.train.size:,} bytes, {self.test.size:,} bytes held out (SHA-256 "
            f"{digest})"
        )

    def batches(self, batch: int, world: int, rank: int, seed: int) -> Windows:
        return Windows(self.train, self.context, batch, world, rank, seed)

    def test_batches(self) -> Iterator[tuple[Tokens, Tokens]]:
        """The same windows in every evaluation, at equal distances."""
        last, count = self.test.size - self.context - 1, _TEST_BYTES // self.context
        starts = np.linspace(0, last, count).astype(np.int64)
        batch = _TEST_BATCH_BYTES // self.context
        for first in range(0, count, batch):
            yield windows(self.test, self.context, starts[first : first + batch])


class Windows:
    """The training batches of one rank: windows at random places, which depend on nothing but seed,
    world size, rank and step."""

    def __init__(
        self, text: Bytes, context: int, batch: int, world: int, rank: int, seed: int
    ) -> None:
        self._text, self._context, self._batch = text, context, batch
        self._draw = (seed, world, rank)

    def at(self, step: int) -> tuple[Tokens, Tokens]:
        """Bytes int64 (batch, context), and the byte after each, (batch * context,)."""
        rng = np.random.default_rng([*self._draw, step])
        starts = rng.integers(self._text.size - self._context, size=self._batch)
        return windows(self._text, self._context, starts)


def windows(text: Bytes, context: int, starts: Tokens) -> tuple[Tokens, Tokens]:
    """As Windows.at, of the windows that begin at `starts`."""
    places = starts[:, None] + np.arange(context + 1)
    chosen = text[places].astype(np.int64)
    return chosen[:, :-1], chosen[:, 1:].ravel()


def load(name: str, folder: Path | None) -> Text:
    """`text`: the sources below `folder`, by default those of the Python that runs; or `gcide`, the
    dictionary, whose file lies in `folder`. Raises TrainError."""
    if name == TEXT:
        return _load_sources(folder)
    return _load_dictionary(folder / DICTIONARY.name if folder else DICTIONARY)


def _load_sources(given: Path | None) -> Text:
    folder = given or Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    files = [folder / path for path in found if not _LEFT_OUT & set(path.parts)]
    try:
        parts = [path.read_bytes() for path in files]
    except OSError as error:
        raise TrainError(f"cannot read the text: {error}") from error
    source = "Python sources" if given else "Python's standard library"
    text = _split(source, parts, CONTEXT)
    if min(text.train.size, text.test.size) <= CONTEXT:
        raise TrainError(f"{folder} holds too few Python sources: {len(files)} files")
    return text


def _load_dictionary(path: Path) -> Text:
    try:
        whole = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise TrainError(
            f"the dictionary is not there: no {path}. On Debian and Ubuntu: apt-get install "
            "dict-gcide. Elsewhere: name the folder of this file with --data-dir"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise TrainError(f"cannot read {path}: {error}") from error
    blocks = [whole[start : start + _BLOCK] for start in range(0, len(whole), _BLOCK)]
    text = _split("the dictionary GCIDE", blocks, _LONG_CONTEXT)
    if min(text.train.size, text.test.size) <= _LONG_CONTEXT:
        raise TrainError(f"{path} is too short: {len(whole):,} bytes")
    return text


def _split(source: str, parts: list[bytes], context: int) -> Text:
    held_out = slice(_HELD_OUT_EVERY // 2, None, _HELD_OUT_EVERY)
    test = b"".join(parts[held_out])
    del parts[held_out]
    train = b"".join(parts)
    return Text(source, np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), context)
