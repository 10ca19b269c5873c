"""bench/perftest_over_links.py gives each rank a link of limited bandwidth."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_lab.train import network

SCRIPT = Path(__file__).parents[2] / "bench" / "perftest_over_links.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.skipif(network.why_not_shaped() is not None, reason="no right to shape networks")
def test_every_rank_is_behind_a_link_of_its_own() -> None:
    # mpirun also starts a program without MPI.
    result = run(
        "/bin/sh", "--rate", "10M", "--ranks", "3", "--", "-c", "hostname; ip -4 -o address"
    )
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert f"rank{rank}\n" in result.stdout
        assert f"inet {network.address(rank)}/16" in result.stdout
    assert "10.77.0.4/16" not in result.stdout  # mpirun's own
    assert result.stdout.count("scope global eth0") == 3


def test_a_rate_that_is_none_is_refused() -> None:
    result = run("/bin/true", "--rate", "fast")
    assert result.returncode == 2
    assert "'fast' is neither a rate as 10M nor 'unshaped'" in result.stderr
