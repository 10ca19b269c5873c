"""What docs/ says of the evaluations is what the committed runs say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gradwire_lab.cli.evaluate import _EVALUATIONS
from gradwire_lab.evaluate import page, runner
from gradwire_lab.evaluate.arms import Setup
from gradwire_lab.evaluate.evaluation import Experiment
from gradwire_lab.evaluate.found import Found
from gradwire_lab.evaluate.store import Store

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "results" / "evaluation"


@pytest.mark.parametrize("name", _EVALUATIONS)
def test_the_page_is_made_of_the_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(experiment: Experiment, found: Found, path: Path) -> list[tuple[Path, str]]:
        folder, figures = path.with_suffix(""), experiment.figures
        return [(folder / f"{figure}.png", text) for figure, (text, _) in figures.items()]

    monkeypatch.setattr(page, "_draw", draw)
    evaluation = _EVALUATIONS[name]
    found, documents, unusable = runner.read(evaluation.arms(), Store(PAGES / "runs", Setup()))
    assert unusable == []
    (tmp_path / name).mkdir()
    for text in (page.FINDINGS, page.REFEREE):
        if (PAGES / name / text).exists():
            shutil.copy(PAGES / name / text, tmp_path / name)
    made, command = (
        tmp_path / f"{name}.md",
        f"gradwire evaluate {name} --out docs/results/evaluation",
    )
    page.write(evaluation, found, page.describe_machines(documents), command, made)
    assert made.read_text() == (PAGES / made.name).read_text()


def test_the_results_quote_the_page() -> None:
    page_text = (PAGES / "frontier.md").read_text()
    _, _, text = (DOCS / "results" / "trainings.md").read_text().partition("## In short")
    short = text.partition("\n## ")[0]
    rows = re.findall(r"^\| (\w\S*), (\w+), .*, `(\w+)`: \w+ \|(.*)\|$", short, re.M)
    assert len(rows) == 5
    ((bits_of_hook, hook),) = re.findall(
        r"^\| `3lc:s=1.00,coder=rice` \(the hook\) \| ([\d., ]+) \| (\S+)% ±",
        page_text,
        re.M,
    )
    mean = sum(map(float, bits_of_hook.split(", "))) / 2
    assert f"With the hook LeNet ends with {hook} % (3), at {mean:.2f} bits" in short
    for model, optimizer, way, cells in rows:
        _, _, section = page_text.lower().partition(f"## {model} with {optimizer}".lower())
        table = section.partition("\n## ")[0]
        above = table.partition("here: ")[0]
        if "as the resnet" in above:
            _, _, above = page_text.lower().partition("## resnet-8 with sgd")
        assert f"`{way.lower()}`" in above.partition("here: ")[0], model
        (base,) = re.findall(r"^\| (?:uncompressed|ddp) \| 32, 32 \| (\S+) ±", table, re.M)
        ((pushed, pulled, coded),) = re.findall(
            r"^\| `3lc:s=1.00,coder=rice` \| (\S+), (\S+) \| (\S+) ±", table, re.M
        )
        *accuracies, bits = (cell.strip() for cell in cells.split("|"))
        assert [a.replace(" ", "") for a in accuracies] == [f"{base}(3)", f"{coded}(3)"], model
        assert float(bits) == pytest.approx((float(pushed) + float(pulled)) / 2, abs=0.0051), model
