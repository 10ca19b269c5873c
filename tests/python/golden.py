"""The golden files and the plain Python reference, for the tests that compare with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT / "spec"))

import common  # noqa: E402
import container  # noqa: E402
import delta  # noqa: E402
import payloads  # noqa: E402
import reference as spec  # noqa: E402
import reference_encoder as encoder  # noqa: E402

__all__ = [
    "FOLDER",
    "ROOT",
    "Case",
    "array",
    "cases",
    "common",
    "container",
    "delta",
    "encoder",
    "payloads",
    "read",
    "read_values",
    "spec",
]

Case = dict[str, Any]


def cases(kind: str) -> list[Case]:
    """The cases of "encode", "decode", "deltas" or "errors" in the index."""
    index: dict[str, list[Case]] = json.loads((FOLDER / "index.json").read_text())
    return index[kind]


def read(name: str) -> bytes:
    """A golden file."""
    return (FOLDER / name).read_bytes()


def read_values(name: str, n: int) -> bytes:
    """The bytes of n float32: the file's values, repeated as often as needed."""
    values = read(name)
    return (values * (4 * n // len(values) + 1))[: 4 * n] if n else b""


def array(tensor: bytes) -> npt.NDArray[np.float32]:
    """A writable float32 array of its own memory."""
    return np.frombuffer(tensor, "<f4").astype(np.float32, copy=True)
