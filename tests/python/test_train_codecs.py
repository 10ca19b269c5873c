"""`gradwire train` with every codec of the registry."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from small_data import write_fashion_mnist

pytest.importorskip("torch")

CODECS = [
    *(codec["name"] for codec in gradwire.codecs()),
    "3lc:coder=rice",
    "terngrad:pack=trits5,coder=rice",
    "qsgd:bits=2,coder=elias",
]


def test_every_codec_trains(tmp_path: Path) -> None:
    folder = write_fashion_mnist(tmp_path / "data", 200, 100)
    command = [str(Path(sys.executable).with_name("gradwire")), "train", "--workers", "2"]
    options = ["--batch", "8", "--steps", "2", "--eval-every", "2", "--bandwidth", "none"]
    options += ["--data-dir", str(folder), "--json", "-"]
    options += [word for codec in CODECS for word in ("--codec", codec)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    results = {result["codec"]: result for result in json.loads(done.stdout)["results"]}
    assert list(results) == CODECS
    for codec, result in results.items():
        assert result["replicas_identical"], codec
        assert all(map(math.isfinite, result["loss"])), codec
