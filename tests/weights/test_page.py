"""docs/weights.md: its programs run as they are written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from gradwire.torch import loopback
from gradwire.weights import Publisher, Subscriber

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_first_program_is_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "weights.py"
    assert PROGRAMS[0] == example.read_text(encoding="utf-8")
    runpy.run_path(str(example))
    sizes = [int(size) for size in re.findall(r"(\d+) bytes", capsys.readouterr().out)]
    assert len(sizes) == 5
    assert 520_000 < sizes[0] < 535_000
    assert all(9_000 < size < 20_000 for size in sizes[1:])


def test_the_second_program_runs() -> None:
    def run(rank: int) -> None:
        names = {"group": None, "Publisher": Publisher, "Subscriber": Subscriber}
        exec(compile(PROGRAMS[1], "page", "exec"), names)

    loopback.run(2, run)


def test_the_third_program_runs() -> None:
    names = {"old": {"x": torch.zeros(5)}, "new": {"x": torch.ones(5)}}
    exec(compile(PROGRAMS[2], "page", "exec"), names)
    assert torch.equal(names["old"]["x"], torch.ones(5))
