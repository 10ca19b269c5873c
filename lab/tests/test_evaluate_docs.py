"""What docs/ says of the evaluations is what the committed runs say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from gradwire_lab.cli.evaluate import _EVALUATIONS
from gradwire_lab.evaluate import diloco, page, runner
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
        r"^\| `3lc:s=1.00,coder=rice` \(the hook\) \| 3 \| ([\d., ]+) \| (\S+)% ±",
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
        (base,) = re.findall(r"^\| (?:uncompressed|ddp) \| 3 \| 32, 32 \| (\S+) ±", table, re.M)
        ((pushed, pulled, coded),) = re.findall(
            r"^\| `3lc:s=1.00,coder=rice` \| 3 \| (\S+), (\S+) \| (\S+) ±", table, re.M
        )
        *accuracies, bits = (cell.strip() for cell in cells.split("|"))
        assert [a.replace(" ", "") for a in accuracies] == [f"{base}(3)", f"{coded}(3)"], model
        assert float(bits) == pytest.approx((float(pushed) + float(pulled)) / 2, abs=0.0051), model


def test_the_readme_and_the_guide_quote_the_pages() -> None:
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    ((to_ddp, ddp, to_raw),) = re.findall(
        r"ends (\S+ ± \S+) above the loss of DDP, (\S+), and (\S+ ± \S+) above the same way", readme
    )
    table = _table("frontier", "Transformer with AdamW")
    small = table["`3lc:s=1.00,coder=rice`"]
    for quoted, cell in [
        (to_ddp, small["difference"]),
        (ddp, table["DDP"]["held-out loss"].split(" ± ")[0]),
        (to_raw, small["to uncompressed changes"]),
    ]:
        assert [f"{float(part):.3f}" for part in cell.split(" ± ")] == quoted.split(" ± ")
    adam = " ".join((DOCS / "guides" / "adam.md").read_text().split())
    quoted = re.findall(
        r"DDP ends at a loss of (\S+), `\S+` at (\S+) with .* bits a value, and at (\S+) with",
        adam,
    )
    rows = ("DDP", "`3lc:s=1.00,coder=rice`", "`every=2`, `3lc:s=1.00,coder=rice`")
    assert quoted == [tuple(table[row]["held-out loss"].split(" ± ")[0] for row in rows)]
    ((larger, share),) = re.findall(r"ends \[(.+?)\]\S+ from DDP with a (\d+)th of", readme)
    table = _table("larger", "Transformer of 10 million values")
    difference, interval = map(float, table["`small`"]["difference"].split(" ± "))
    assert larger == f"{difference:+.3f} ± {interval:.3f}"
    sent, alone = (float(table[way]["MB"].replace(",", "")) for way in ("`small`", "DDP"))
    assert share == f"{alone / sent:.0f}"


def _table(name: str, title: str) -> dict[str, dict[str, str]]:
    """The first table below a heading of a page: the cells by row and column."""
    _, _, section = (PAGES / f"{name}.md").read_text().partition(f"## {title}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_megabytes_are_those_that_real_ranks_send() -> None:
    """DDP's were those of a server's worker, a third more than its ring has; SparseLoCo's counted
    both directions."""
    evaluation = _EVALUATIONS["diloco"]
    found, _, _ = runner.read(evaluation.arms(), Store(PAGES / "runs", Setup()))
    lines = map(json.loads, (DOCS / "results" / "rivals.jsonl").read_text().splitlines())
    links = {line["way"]: line for line in lines if line["kind"] == "link"}
    steps, every = 600, 30
    for way, one, exchanges in [
        ("DDP", diloco._DDP["adamw", 4], steps),
        ("DiLoCo, raw", diloco._ADAMW["32 bits", every], steps / every),
        ("SparseLoCo", diloco._ADAMW[diloco._SPARSE, every], steps / every),
    ]:
        measured = links[way]["step_bytes"] * links[way]["settings"].get("every", 1)
        assert 1e6 * (diloco.megabytes(found, one) or 0) / exchanges == pytest.approx(
            measured, rel=0.06
        )
