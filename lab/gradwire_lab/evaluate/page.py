"""The page of an evaluation: Markdown with tables and pictures, from the runs that are there."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from gradwire.files import write_text
from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.evaluate.evaluation import Evaluation, Experiment
from gradwire_lab.evaluate.found import DIVERGED, STOPPED, Found
from gradwire_lab.evaluate.pictures import draw
from gradwire_lab.evaluate.quotes import fill
from gradwire_lab.evaluate.store import Line
from gradwire_lab.train import plots

# Texts that people write, in the folder of a page, and the sections that they become. They quote
# the tables (quotes.py).
FINDINGS, REFEREE = "findings.md", "referee.md"
_HEADS = {
    FINDINGS: "What was found",
    REFEREE: "What a referee would still say",
}
_COLUMNS = 100
_DIRTY = "*dirty*: with changes that were not committed. "
# What stands in place of a result.
_WORDS = {
    STOPPED: "the run ended with an error, as one of `auto` does whose budget can't be kept",
    DIVERGED: "the loss became NaN or infinite",
}


def write(
    evaluation: Evaluation, found: Found, machines: str, command: str, path: Path
) -> list[Path]:
    """Writes the page and its pictures, into a folder beside it; returns their paths. If that
    folder has texts FINDINGS and REFEREE, written by people, they are the first and the last
    section of the page. Raises ValueError for a quote of a cell that is not there."""
    folder, written = path.parent, []
    parts: list[str] = []
    made = dict.fromkeys((experiment.title for experiment in evaluation.experiments), "")
    for experiment in evaluation.experiments:
        there = sum(min(len(found.runs(one)), one.seeds) for one in experiment.arms)
        wanted = sum(one.seeds for one in experiment.arms)
        text = f"{experiment.about} {_describe(experiment.arms, found)}"
        if there < wanted:
            text += _missing(wanted, there, found.hours_left(experiment.arms))
        parts += [f"## {experiment.title}", _filled(text)]
        if not there:
            continue
        if experiment.tables is not None:
            made[experiment.title] = experiment.tables(found)
            parts.append(made[experiment.title])
        for picture, text in _draw(experiment, found, path):
            written.append(picture)
            parts.append(f"![{text}]({picture.relative_to(folder)})")
    tables = "".join(parts)
    parts += [f"*{word}*: {why}." for word, why in _WORDS.items() if f" {word} |" in tables]
    about = [f"# {evaluation.title}", _filled(evaluation.about), _filled(machines)]
    first, last = (_own_text(path.with_suffix("") / name, made) for name in (FINDINGS, REFEREE))
    parts = [*about, *first, *parts, *last, f"```console\n$ {command}\n```"]
    write_text(path, "\n\n".join(part for part in parts if part))
    return [path, *written]


def _missing(wanted: int, there: int, hours: float | None) -> str:
    time = "" if hours is None else f"; the others take some {hours:.2g} h of a core"
    return f" **Of {wanted} runs, {there or 'none'} are there{time}.**"


def _own_text(path: Path, tables: Mapping[str, str]) -> list[str]:
    """Head and text of a section that people wrote; nothing where there is no such file."""
    if not path.exists():
        return []
    text = fill(path.read_text(encoding="utf-8").strip(), tables, _COLUMNS)
    return [f"## {_HEADS[path.name]}", text]


def _describe(arms: Sequence[Arm], found: Found) -> str:
    settings = [found.settings[one] for one in arms]
    models = ", ".join(sorted({f"{one.model} on {one.data}" for one in settings}))
    workers = _span([one.workers for one in settings])
    batch, steps = (_span([getattr(one, name) for one in settings]) for name in ("batch", "steps"))
    seeds = _span([one.seeds for one in arms])
    return (
        f"Here: {models}, {workers} workers x {batch}, {steps} steps, {seeds} "
        f"seed{'' if seeds == '1' else 's'}."
    )


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _draw(experiment: Experiment, found: Found, page: Path) -> Iterable[tuple[Path, str]]:
    """The pictures of which there is something to draw, in a folder of the page's name."""
    folder = page.with_suffix("")
    for name, (text, chart_of) in experiment.figures.items():
        for path in plots.save({f"{name}.png": partial(draw, chart_of(found))}, folder):
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
            yield path, text


def _filled(text: str) -> str:
    return "\n".join(
        textwrap.wrap(text.strip(), _COLUMNS, break_long_words=False, break_on_hyphens=False)
    )


def describe_machines(lines: Iterable[Line]) -> str:
    """Where the runs were made, with which commits, and how long they took."""
    listed = list(lines)
    seen = [line.machine for line in listed]
    if not seen:
        return "No run is there yet."
    hours = sum(line.result.measured_seconds for line in listed) / 3600
    commits = sorted({_short(machine.gradwire.commit) for machine in seen})
    cpus = sorted({f"{m.cpu}, {m.cores} core{'s' if m.cores > 1 else ''}" for m in seen})
    unsaved = any(commit.endswith("-dirty") for commit in commits)
    torch = sorted({machine.torch for machine in seen})
    return (
        f"Runs made: {len(seen)}, in {hours:.1f} hours, on {'; '.join(cpus)}; gradwire "
        f"{', '.join(commits)}; PyTorch {', '.join(torch)}. {_DIRTY if unsaved else ''}Bits are "
        "those of a value in a step, of pushes and of pulls. Several seeds: the mean and its 95 % "
        "interval (Student's t, which is wide for two seeds). A difference compares equal seeds, "
        "so that of a row with fewer seeds than the first is not to the mean in that row. "
        "Bands and bars of the pictures reach from the lowest to the highest seed."
    )


def _short(commit: str) -> str:
    """Seven letters, and "-dirty" where files differed from the commit."""
    letters, dash, dirty = commit.partition("-")
    return f"{letters[:7]}{dash}{dirty}"
