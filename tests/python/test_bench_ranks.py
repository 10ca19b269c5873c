"""bench/ranks.py: ranks that wait for ever are ended, with the processes that they started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ranks import run_ranks

RANK = """
import subprocess, sys, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def test_ranks_that_take_too_long_end_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    monkeypatch.setattr(sys, "argv", [str(script)])
    notes = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(SystemExit, match="more than 5 s"):
        run_ranks(lambda rank: [str(notes[rank])], 2, None, most_seconds=5.0)
    for note in notes:
        status = Path(f"/proc/{note.read_text()}/stat")
        until = time.monotonic() + 60.0
        while is_running(status):
            assert time.monotonic() < until
            time.sleep(0.05)


def is_running(status: Path) -> bool:
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
