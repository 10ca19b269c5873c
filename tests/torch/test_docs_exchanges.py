"""The examples of the pages run exactly as they are written there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch
from cluster import Cluster
from training import batch, digest, make_model, make_optimizer

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run_examples(text: str) -> list[str]:
    """Runs the blocks and returns the model's digest after each. Trainings get a new model."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = torch.tensor(store.port)
    dist.broadcast(port, 0)
    names = {"torch": torch, "functional": functional, "rank": rank}
    names |= {"host": "127.0.0.1", "port": int(port), "steps": 5}
    digests = []
    for block in BLOCK.findall(text):
        if block.startswith('"""'):  # a whole program, which another test runs
            continue
        if "batches" in block:
            batches = [batch(rank, step) for step in range(5)]
            once = iter(batches) if "next(batches)" in block else batches
            names |= {"model": make_model(), "batches": once}
            names |= {"make_model": make_model, "make_batches": lambda batches=batches: batches}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, "exchanges.md", "exec"), names)
        assert "print" not in block or "pushed" in printed.getvalue()
        digests.append(digest(names["model"]))  # type: ignore[arg-type]
    return digests


def run_checkpoint_examples(blocks: list[str], folder: str) -> tuple[list[str], int]:
    """Runs them one after the other between steps of a DDP training. Returns the digests of the
    model before and after the blocks, and how many values the rank owes at last."""
    model = DistributedDataParallel(make_model())
    state = gradwire.torch.GradwireState("3lc:s=1", start_iter=0)
    model.register_comm_hook(state, gradwire.torch.gradwire_hook)
    names = {"torch": torch, "gradwire": gradwire, "rank": dist.get_rank(), "folder": "dcp"}
    names |= {"model": model, "state": state}
    step = make_optimizer(model)
    digests = []
    for block in blocks:
        inputs, labels = batch(dist.get_rank(), 0)
        functional.cross_entropy(model(inputs), labels).backward()
        step.step()
        digests.append(digest(model))
        with contextlib.chdir(folder):
            exec(compile(block, "checkpoints.md", "exec"), names)
        digests.append(digest(model))
    owed = sum(int(entry["values"].count_nonzero()) for entry in state.state_dict()["residuals"])
    return digests, owed


@pytest.mark.parametrize(
    ("page", "trained"),
    [("reference/exchanges", 3), ("reference/local_steps", 5), ("guides/far_apart", 1)],
)
def test_the_examples_train_equal_models(cluster: Cluster, page: str, trained: int) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    ranks = cluster.run(2, run_examples, text)
    assert ranks[0] == ranks[1]
    assert len(set(ranks[0])) == trained, "leaving changes no parameter"


def test_the_examples_of_checkpoints_move_what_is_owed(cluster: Cluster, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / "reference" / "checkpoints.md").read_text(encoding="utf-8"))
    assert len(blocks) == 3
    for digests, owed in cluster.run(4, run_checkpoint_examples, blocks[:2], str(tmp_path)):
        assert digests[0] == digests[1]
        assert digests[2] == digests[3]
        assert owed > 0
    assert {path.name for path in tmp_path.iterdir()} == {"dcp", *(f"rank{r}.pt" for r in range(4))}
    for _, owed in cluster.run(3, run_checkpoint_examples, blocks[2:], str(tmp_path)):
        assert owed > 0
