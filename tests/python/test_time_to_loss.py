"""bench/time_to_loss.py: the arithmetic of time to a loss, and the page that it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rivals import page, results
from rivals.arithmetic import steps_to, total
from rivals.ways import CHANGES, DDP, LINKS, POWER_SGD, RAW, STEPS, TARGETS, TORCHFT, WAYS

EVALUATIONS = [[30, 1.0, 3.0], [60, 2.0, 2.5], [90, 3.0, 2.6], [120, 4.0, 2.0]]


@pytest.mark.parametrize(
    ("target", "steps"),
    [(3.5, 30), (3.0, 30), (2.75, 45), (2.5, 60), (2.3, 105), (2.0, 120), (1.9, None)],
)
def test_steps_to_a_loss_lie_between_evaluations(target: float, steps: float | None) -> None:
    assert steps_to(EVALUATIONS, target) == pytest.approx(steps)


@pytest.mark.parametrize(("steps", "cost"), [(4, 40.0), (10, 100.0), (25, 115.0)])
def test_first_steps_cost_what_plain_ones_do(steps: float, cost: float) -> None:
    assert total(steps, step=1.0, plain=10.0, plain_steps=10) == cost


def measured(way: str, step_seconds: float, loss: float) -> list[dict[str, Any]]:
    about = {"build": {"commit": "abc"}, "machine": {"cores": 2, "cpu": "a CPU"}}
    train = {"kind": "train", "way": way, "rate": 0.01, "seed": 0, "replicas_agree": True, **about}
    train["evaluations"] = [[100, 1.0, 3.0], [200, 2.0, loss]]
    steps = {"step_seconds": step_seconds, "step_bytes": 2e6, "alone_seconds": 0.5, **about}
    return [train, *({"kind": "link", "way": way, "bandwidth": b, **steps} for b in LINKS)]


def test_page_names_who_is_first_and_what_is_not_reached() -> None:
    easy, hard = TARGETS
    lines = measured(DDP, 2.0, 2.0) + measured(CHANGES, 1.0, easy)
    # DDP's loss falls from 3 to 2 in a hundred steps.
    steps, more = (round(200 - 100 * (target - 2.0)) for target in TARGETS)
    text = page.text(lines)
    assert f"| {DDP} | 2 | {steps} | {more} | {2 * steps} | {2 * more} | {2 * STEPS:,} |" in text
    assert "Seeds of each way: 1." in text
    assert f"| **{CHANGES}** | {easy} | 200 | - | 400 | - | {2 * STEPS:,} |" in text
    assert f"| **{CHANGES}** | 1,000 | 200 | - |" in text
    assert f"To {easy} gradwire is first: {CHANGES} takes 200 s" in text
    assert f"To {hard} " not in text  # nobody to compare with
    lost = page.text(measured(DDP, 0.5, 2.0) + measured(CHANGES, 1.0, easy))
    assert f"To {easy} gradwire loses: {DDP} takes {steps / 2:.0f} s" in lost


def test_the_best_learning_rate_is_looked_for_on_both_sides_and_shown() -> None:
    def tried(losses: dict[float, float]) -> list[dict[str, Any]]:
        return [measured(DDP, 1.0, v)[0] | {"rate": rate} for rate, v in losses.items()]

    losses = {0.01: 2.2}
    for rate, loss in ((0.005, 2.1), (0.0025, 2.3)):
        assert results.next_rate(results.rates(tried(losses), DDP)) == rate
        losses[rate] = loss
    assert results.next_rate(losses) is None
    seed = {"rate": 0.01, "seed": 1}
    found = page.Measured([*tried(losses), measured(DDP, 1.0, 1.0)[0] | seed])
    assert found.losses(DDP) == [2.1], "of no other rate"


def test_power_sgd_begins_as_ddp() -> None:
    found = page.Measured(measured(DDP, 2.0, 2.0) + measured(POWER_SGD, 1.0, 2.0))
    plain = WAYS[POWER_SGD].plain_steps
    assert found.cost(POWER_SGD, LINKS[0], "step_seconds", 2.0) == 2.0 * plain + (200 - plain)


def test_an_exchange_is_what_steps_take_beyond_computing() -> None:
    lines = measured(DDP, 2.0, 2.0) + measured(RAW, 0.5, 2.0) + measured(TORCHFT, 0.6, 2.0)
    text = page.text(lines)
    assert f"| {DDP} | 2 | 1,500 | 1,500 | 1,500 |" in text
    assert f"| {TORCHFT} | 60 | 3,000 | 3,000 | 3,000 |" in text  # of 30 steps


def test_page_is_that_of_the_file() -> None:
    drawn = page.text(results.read())
    assert results.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == drawn
    widest = max(len(line) for line in drawn.splitlines() if line.startswith("|"))
    assert widest <= 80


@pytest.mark.parametrize("quoting", page.QUOTES, ids=lambda path: path.stem)
def test_pages_quote_the_file(quoting: Path) -> None:
    table = page.quoted(page.Measured(results.read()), page.QUOTES[quoting])
    assert f"\n{table}\n" in quoting.read_text(encoding="utf-8")


def test_rivals_take_longer_as_the_readme_says() -> None:
    found = page.Measured(results.read())
    for target in TARGETS:
        own = found.cost(f"{CHANGES}, every=2", LINKS[1], "step_seconds", target)
        theirs = found.fastest(LINKS[1], target, ours=False)
        assert own is not None
        assert theirs is not None
        assert own < theirs[1]
    reach = {name for name in found.ways if found.steps(name, TARGETS[-1]) and not WAYS[name].ours}
    assert {name.partition(",")[0] for name in reach} == {DDP, "PowerSGD", "Flower", "hivemind"}


def test_picture_is_drawn(tmp_path: Path) -> None:
    page.draw(page.Measured(measured(DDP, 2.0, 2.0)), tmp_path / "rivals.svg")
    assert "svg" in (tmp_path / "rivals.svg").read_text(encoding="utf-8")
