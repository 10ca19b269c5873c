"""Text that every machine has: the sources of Python's standard library, byte by byte.

Python versions differ, and so do their texts; `Text.describe` tells which one it is.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.recipes import LOSS

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]

CONTEXT = 64
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
_HELD_OUT_EVERY = 20  # files
_TEST_WINDOWS = 768
_TEST_BATCH = 64


@dataclass(frozen=True)
class Text:
    """train, test: bytes of whole files, one after the other."""

    train: Bytes
    test: Bytes

    metric = LOSS
    shape = (256, CONTEXT)  # vocabulary, context

    def describe(self) -> str:
        digest = hashlib.sha256(self.train.tobytes() + self.test.tobytes()).hexdigest()[:16]
        return (
            f"Python's standard library, {self.train.size:,} bytes, {self.test.size:,} bytes held "
            f"out (SHA-256 {digest})"
        )

    def batches(self, batch: int, world: int, rank: int, seed: int) -> Windows:
        return Windows(self.train, batch, world, rank, seed)

    def test_batches(self) -> Iterator[tuple[Tokens, Tokens]]:
        """The same windows in every evaluation, at equal distances."""
        starts = np.linspace(0, self.test.size - CONTEXT - 1, _TEST_WINDOWS).astype(np.int64)
        for first in range(0, _TEST_WINDOWS, _TEST_BATCH):
            yield windows(self.test, starts[first : first + _TEST_BATCH])


class Windows:
    """The training batches of one rank: windows at random places, which depend on nothing but seed,
    world size, rank and step."""

    def __init__(self, text: Bytes, batch: int, world: int, rank: int, seed: int) -> None:
        self._text, self._batch = text, batch
        self._draw = (seed, world, rank)

    def at(self, step: int) -> tuple[Tokens, Tokens]:
        """Bytes int64 (batch, CONTEXT), and the byte after each, (batch * CONTEXT,)."""
        rng = np.random.default_rng([*self._draw, step])
        return windows(self._text, rng.integers(self._text.size - CONTEXT, size=self._batch))


def windows(text: Bytes, starts: Tokens) -> tuple[Tokens, Tokens]:
    """As Windows.at, of the windows that begin at `starts`."""
    places = starts[:, None] + np.arange(CONTEXT + 1)
    chosen = text[places].astype(np.int64)
    return chosen[:, :-1], chosen[:, 1:].ravel()


def load(folder: Path | None) -> Text:
    """The sources below `folder`, by default those of the Python that runs. Raises TrainError."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    files = [folder / path for path in found if not _LEFT_OUT & set(path.parts)]
    held_out = files[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    parts = [_read([f for f in files if f not in set(held_out)]), _read(held_out)]
    if min(part.size for part in parts) <= CONTEXT:
        raise TrainError(f"{folder} holds too few Python sources: {len(files)} files")
    return Text(*parts)


def _read(files: list[Path]) -> Bytes:
    try:
        return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    except OSError as error:
        raise TrainError(f"cannot read the text: {error}") from error
