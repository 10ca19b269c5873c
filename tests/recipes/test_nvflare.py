"""gradwire.contrib.nvflare in FLARE's simulator, with two clients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="scripts/test.sh recipes installs it")

from torchrun import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "recipes" / "nvflare_fedavg.py"


def test_two_clients_learn_from_each_other() -> None:
    printed, said = run_program(EXAMPLE, seconds=300)
    text = printed + said
    for client in ("site-1", "site-2"):
        losses = [float(loss) for loss in re.findall(rf"{client}, round \d: loss ([\d.]+)", text)]
        assert len(losses) == 8, text
        assert losses[-1] < 0.25 * losses[0]
        print(f"nvflare_fedavg: {client}: loss {losses[0]} to {losses[-1]}")
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+) x less than raw", text)]
    assert len(ratios) == 2 * 2 * 8, "each way, each client, each round"
    models, changes = sorted(ratios)[:16], sorted(ratios)[16:]
    print(f"nvflare_fedavg: models {models}, changes {changes} x less than raw")
    assert min(models) > 3.4
    assert min(changes) > 3 * max(models)
