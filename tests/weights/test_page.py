"""docs/weights.md: its programs run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gradwire.torch import loopback
from gradwire.weights import Publisher, Subscriber

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "weights.py"
PAGE = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_first_program_is_the_example() -> None:
    assert PROGRAMS[0] == EXAMPLE.read_text(encoding="utf-8")


def test_a_second_process_follows_the_example(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(EXAMPLE)]
    store = str(tmp_path / "policy")
    follower = subprocess.Popen([*command, "follow", store], stdout=subprocess.PIPE, text=True)
    try:
        trained = subprocess.run(
            [*command, "train", store], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        published = dict(re.findall(r"version (\d+): .* sum (-?\d+)\n", trained))
        assert list(map(int, published)) == list(range(1, 21))
        assert follower.stdout is not None
        followed: dict[str, str] = {}
        while "20" not in followed:
            (found,) = re.findall(
                r"version (\d+) is in use: .* sum (-?\d+)\n", next(follower.stdout)
            )
            followed |= [found]
    finally:
        follower.kill()
        follower.communicate()
    assert len(set(published.values())) == 20
    assert followed.items() <= published.items()
    sizes = [int(size) for size in re.findall(r"(\d+) bytes", trained)]
    assert 520_000 < sizes[0] < 535_000
    assert all(size < 60_000 for size in sizes[1:])


def run(program: str, **names: Any) -> dict[str, Any]:
    exec(compile(program, "page", "exec"), names)
    return names


def test_the_program_for_a_group_runs() -> None:
    def run_rank(rank: int) -> None:
        run(PROGRAMS[1], group=None, Publisher=Publisher, Subscriber=Subscriber)

    loopback.run(2, run_rank)


def test_the_program_with_bytes_runs() -> None:
    names = run(PROGRAMS[2], old={"x": torch.zeros(5)}, new={"x": torch.ones(5)})
    assert torch.equal(names["old"]["x"], torch.ones(5))


def test_the_program_for_checkpoints_runs(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    program = PROGRAMS[3].replace('"run/"', repr(str(tmp_path)))
    assert program != PROGRAMS[3]
    names = run(program, model=model, optimizer=optimizer, step=100)
    assert names["checkpoint"]["step"] == 100
