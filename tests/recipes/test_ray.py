"""gradwire.contrib.ray in TorchTrainers: both ways, a checkpoint, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="scripts/test.sh recipes installs it")

from torchrun import run_program


def ratio_of(metrics: dict[str, str]) -> float:
    found = re.search(r"([\d.]+) x less than raw", metrics["stats"])
    assert found is not None, metrics
    return float(found[1])


def test_trainings_with_ray(tmp_path: Path) -> None:
    job = Path(__file__).with_name("ray_jobs.py")
    printed, _ = run_program(job, seconds=500, arguments=[str(tmp_path)])
    found = json.loads(printed.rpartition("found ")[2].splitlines()[0])
    assert "in the function that a TorchTrainer runs" in found["outside"]
    assert "has 1 worker, which sends nothing" in found["alone"]["error"]
    assert ratio_of(found["hook"]) > 5
    assert ratio_of(found["whole"]) > 10
    assert found["files"] == ["gradwire_0.pt", "gradwire_1.pt", "model.pt"]
    assert found["resumed"]["digest"] == found["whole"]["digest"]
