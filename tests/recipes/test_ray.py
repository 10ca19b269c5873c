"""gradwire.contrib.ray in TorchTrainers: both ways, a checkpoint, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("ray", reason="scripts/test.sh recipes installs it")

from gradwire.contrib.ray import compress
from torchrun import run_program


def ratio_of(metrics: dict[str, str]) -> float:
    found = re.search(r"([\d.]+) x less than raw", metrics["stats"])
    assert found is not None, metrics
    return float(found[1])


def test_trainings_with_ray(tmp_path: Path) -> None:
    job = Path(__file__).with_name("ray_jobs.py")
    printed, _ = run_program(job, seconds=900, arguments=[str(tmp_path)])
    found = json.loads(printed.rpartition("found ")[2].splitlines()[0])
    assert "in the function that a TorchTrainer runs" in found["outside"]
    assert "has 1 worker, which sends nothing" in found["alone"]["error"]
    assert ratio_of(found["hook"]) > 5
    assert ratio_of(found["whole"]) > 10
    assert found["files"] == ["gradwire_0.pt", "gradwire_1.pt", "model.pt"]
    assert found["resumed"]["digest"] == found["whole"]["digest"]


def test_a_compiled_model_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.contrib.ray._count_workers", lambda: 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        model: Any = torch.compile(DistributedDataParallel(torch.nn.Linear(8, 8)))
        optimizer, way = compress(model, torch.optim.AdamW(model.parameters()), every=2)
        assert optimizer is way.exchange
        way.detach()
        model = DistributedDataParallel(torch.nn.Linear(8, 8), static_graph=True)
        with pytest.raises(ValueError, match="leave static_graph=True out"):
            compress(model, torch.optim.AdamW(model.parameters()), every=2)
    finally:
        dist.destroy_process_group()
