"""The examples of docs/exchanges.md run exactly as they are written there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

from cluster import Cluster
from training import batch, digest, make_model

PAGE = Path(__file__).parents[2] / "docs" / "exchanges.md"


def run_examples(text: str, folder: str) -> list[str]:
    """Runs the blocks and returns the model's digest after each. Trainings get a new model."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ports = [store.port]
    dist.broadcast_object_list(ports)
    names = {"torch": torch, "functional": functional, "rank": rank, "folder": folder}
    names |= {"host": "127.0.0.1", "port": ports[0], "steps": 5}
    digests = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "batches" in block:
            batches = [batch(rank, step) for step in range(5)]
            once = iter(batches) if "next(batches)" in block else batches
            names |= {"model": make_model(), "batches": once}
            names |= {"make_model": make_model, "make_batches": lambda batches=batches: batches}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, PAGE.name, "exec"), names)
        assert "print" not in block or "pushed" in printed.getvalue()
        digests.append(digest(names["model"]))  # type: ignore[arg-type]
    return digests


def test_the_examples_train_equal_models(cluster: Cluster, tmp_path: Path) -> None:
    ranks = cluster.run(2, run_examples, PAGE.read_text(encoding="utf-8"), str(tmp_path))
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 8
    assert len(set(ranks[0])) == 7, "the checkpoint's example changes nothing"
    assert {file.name for file in tmp_path.iterdir()} == {"rank0.pt", "rank1.pt"}
