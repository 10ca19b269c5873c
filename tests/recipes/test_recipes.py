"""The programs of docs/reference/frameworks.md learn, and send fewer bytes, in their frameworks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from torchrun import run_program

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: scripts/test.sh recipes installs it")


@pytest.mark.parametrize(
    ("package", "example", "ranks", "ratios"),
    [
        ("lightning", "lightning_adamw", 0, [20.0]),
        ("accelerate", "accelerate_adamw", 2, [20.0]),
        ("transformers", "transformers_trainer", 2, [30.0, 15.0]),
        ("flwr", "flower_fedavg", 0, [3.7, 25.0]),
        ("ray", "ray_adamw", 0, [20.0]),
    ],
)
def test_the_recipe_learns_and_compresses(
    package: str, example: str, ranks: int, ratios: list[float]
) -> None:
    """`ratios`: the least of each line that tells one."""
    require(package)
    printed, _ = run_program(EXAMPLES / f"{example}.py", ranks)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.5 * losses[0], printed
    found = [float(ratio) for ratio in re.findall(r"([\d.]+) x less than raw", printed)]
    print(f"{example}: loss {losses[0]} to {losses[-1]}, {found} x less than raw")
    assert len(found) == len(ratios), printed
    assert all(ratio > least for ratio, least in zip(found, ratios, strict=True)), printed


@pytest.mark.parametrize(
    ("package", "example"),
    [("accelerate", "accelerate_adamw"), ("transformers", "transformers_trainer")],
)
def test_a_rank_alone_trains(package: str, example: str) -> None:
    require(package)
    printed, _ = run_program(EXAMPLES / f"{example}.py", 1)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.5 * losses[0], printed
    assert "nothing sent" in printed


def test_a_process_that_generates_follows_trl() -> None:
    """Each step has answers of the version before it, and the policy learns the task."""
    require("trl")
    printed, _ = run_program(EXAMPLES / "trl_grpo.py")
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", printed)]
    assert rewards[0] < 0.5, printed  # chance gives 0.1
    assert rewards[-1] > 0.7, printed
    version = re.search(r"version 61: (\d+) bytes, (\d+)% of the weights changed", printed)
    assert version is not None, printed
    print(f"trl_grpo: reward {rewards[0]} to {rewards[-1]}, {version.group()}")


def test_a_replica_of_torchft_dies_and_comes_back() -> None:
    """The other one goes on alone, and both end with the same model."""
    require("torchft")
    printed, said = run_program(EXAMPLES / "torchft_ddp.py")
    lines = re.findall(r"step (\d+), (\d) of 2 replicas: loss ([\d.]+)", printed)
    assert [count for _, count, _ in lines] == ["2", "2", "1", "2", "2", "2"], printed
    assert float(lines[-1][2]) < 0.5 * float(lines[0][2]), printed
    models = dict(re.findall(r"replica (\d) ends with model (\w+)", printed))
    assert models["0"] == models["1"], printed
    ratio = re.search(r"([\d.]+) x less than raw", printed)
    assert ratio is not None, printed
    print(f"torchft_ddp: loss {lines[0][2]} to {lines[-1][2]}, {ratio.group()}")
    assert float(ratio.group(1)) > 20
    assert "residuals of this replica are dropped, 18,696 values" in said
