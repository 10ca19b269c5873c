"""Trainings with Ray Train in one Ray, whose results are printed as a line of JSON.

python ray_jobs.py FOLDER     FOLDER: for checkpoints
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from gradwire.contrib.ray import compress


def train(config: dict[str, Any]) -> None:
    rank, epochs = get_context().get_world_rank(), range(*config["epochs"])
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)
    batches = torch.arange(256)[rank::2].split(32)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    try:
        optimizer, way = compress(model, inner, "3lc:s=1.00,coder=rice", **config["options"])
    except (RuntimeError, TypeError) as error:
        Path(config["result"]).write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    if config["start"]:
        saved = torch.load(f"{config['start']}/model.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        way.restore([config["start"]])
    for _ in epochs:
        for batch in batches:
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        way.save(folder)
        if rank == 0:
            with way.agreed():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, f"{folder}/model.pt")
        way.finish()
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        found = {"digest": values.numpy().tobytes().hex()[-4000:], "stats": str(way.stats())}
        if rank == 0:
            Path(config["result"]).write_text(json.dumps(found))
        report({}, checkpoint=Checkpoint.from_directory(folder))


def run(folder: str, workers: int = 2, start: str = "", **config: Any) -> tuple[Any, str]:
    """What rank 0 found, and the checkpoint."""
    written = Path(folder) / "result.json"
    given = {"start": start, "options": {}, "epochs": [2], "result": str(written), **config}
    trainer = TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=folder),
    )
    result = trainer.fit()
    found = json.loads(written.read_text())
    written.unlink()
    return found, result.checkpoint.path if result.checkpoint else ""


def main(folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    found: dict[str, Any] = {}
    try:
        compress(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]))
    except RuntimeError as error:
        found["outside"] = str(error)
    found["alone"], _ = run(folder, workers=1)
    found["hook"], _ = run(folder, options={"start_iter": 0})
    local = {"every": 3}
    found["whole"], _ = run(folder, options=local, epochs=[4])
    _, half = run(folder, options=local, epochs=[2])
    found["files"] = sorted(path.name for path in Path(half).glob("*.pt"))
    found["resumed"], _ = run(folder, options=local, epochs=[2, 4], start=half)
    print("found", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
