"""Every way to train ends with the bits, and sends the bytes, that are on record.

After a change that is meant: .venv/bin/python tests/torch/frozen.py --write
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

import frozen

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="PyTorch has other kernels")


def train(*options: str) -> dict[str, str]:
    """In a process of its own, because PyTorch chooses its kernels once."""
    command = [sys.executable, frozen.__file__, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: result for line in lines for name, result in json.loads(line).items()}


def on_record(cases: list[frozen.Case]) -> dict[str, str]:
    whole = json.loads(frozen.FILE.read_text())
    return {name: whole[name] for name in map(frozen.name_of, cases)}


def test_one_case_of_every_way() -> None:
    assert train("--quick") == on_record(frozen.quick_cases())


@pytest.mark.long
def test_every_case() -> None:
    assert train() == on_record(frozen.every_case())
    assert len(json.loads(frozen.FILE.read_text())) == len(frozen.every_case())
