"""examples/grpo.py: processes that generate follow the trainer, and the policy learns the task."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


def test_the_policy_learns_while_the_workers_follow() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    said = r"step (\d+): reward ([\d.]+), answers (\d+) .* has (\d+) bytes of (\d+)"
    lines = [list(map(float, found)) for found in re.findall(said, ended.stdout)]
    assert [line[0] for line in lines] == [10, 20, 30, 40]
    assert lines[0][1] < 0.6  # chance gives 0.1
    assert lines[-1][1] > 0.8
    assert all(behind < 10 for _, _, behind, _, _ in lines)
    assert all(0 < sent < whole / 2 for _, _, _, sent, whole in lines)
