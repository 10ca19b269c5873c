"""Writes the page: a section for each report, its pictures and its numbers, and Plotly.js."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from html import escape as escape_markup
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradwire.errors import missing
from gradwire.files import write_text
from gradwire.printable import printable
from gradwire_lab.train import describe
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.page import costs, layers, progress
from gradwire_lab.train.page.figure import Figure
from gradwire_lab.train.report import Report
from gradwire_lab.train.report_table import columns, footnotes
from gradwire_lab.train.settings import format_bandwidth
from gradwire_lab.train.verdict import verdict

# A browser then takes nothing from outside, whatever the file holds.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_LONGEST_TABLE = 60  # rows; a longer one is thinned evenly, and says so


def check(path: Path) -> None:
    """Raises TrainError if the page could not be written there later."""
    if importlib.util.find_spec("plotly") is None:
        raise TrainError(missing("plotly", "'./lab[report]'"))
    if not path.parent.is_dir():
        raise TrainError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise TrainError(f"{path} is a folder; the page needs the name of a file")


def write(reports: Sequence[Report], machines: Iterable[dict[str, Any]], path: Path) -> None:
    """The whole page or nothing. machines: as in the JSON, of the machines that measured."""
    from plotly.offline import get_plotlyjs

    drawn = [draw(report) for report in reports]
    figures = [figure for of_report in drawn for figure in of_report]
    plots = [{"traces": figure.traces, "layout": figure.layout} for figure in figures]
    numbers = iter(range(len(figures)))
    sections = "\n".join(
        _section(report, of_report, [next(numbers) for _ in of_report], len(reports) > 1)
        for report, of_report in zip(reports, drawn, strict=True)
    )
    title = f"gradwire: {', '.join(dict.fromkeys(_task(report) for report in reports))}"
    used = "".join(f"<p>{_escape(_describe(m))}</p>" for m in _different(machines))
    write_text(
        path,
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>{_escape(title)}</title>
<style>{_part("page.css")}</style>
</head>
<body>
<main>
<h1>{_escape(title)}</h1>
<p class="hint">Drag over a picture to zoom in, double-click to zoom out. Click a name in a legend
to hide it.</p>
{sections}
<footer>{used}</footer>
</main>
<script type="application/json" id="figures">{_in_script(plots)}</script>
<script id="plotly">{get_plotlyjs()}</script>
<script>{_part("page.js")}</script>
</body>
</html>""",
    )


def draw(report: Report) -> list[Figure]:
    """The pictures that this report has numbers for."""
    found = [
        progress.draw_metric(report),
        progress.draw_loss(report),
        progress.draw_frontier(report),
        progress.draw_bits(report, "push"),
        progress.draw_bits(report, "pull"),
        costs.draw_time(report),
        *costs.draw_steps(report),
        costs.draw_links(report),
        *layers.draw_layers(report),
    ]
    return [figure for figure in found if figure is not None]


def _section(
    report: Report, figures: Sequence[Figure], numbers: Sequence[int], has_title: bool
) -> str:
    title = f"<h2>{_escape(_task(report))}</h2>" if has_title else ""
    notes = "".join(f"<li>{_escape(note)}</li>" for note in footnotes(report))
    said = f'<p class="verdict">{_escape(text)}</p>' if (text := verdict(report)) else ""
    cells = columns(report)
    rows = [[cell(results) for cell in cells.values()] for results in report.by_codec().values()]
    pictures = "\n".join(
        _picture(figure, number) for figure, number in zip(figures, numbers, strict=True)
    )
    return f"""<section>
{title}
{said}
<p>{_escape(_circumstances(report))}</p>
{_wide("What the runs ended with", _table(cells, rows))}
<details><summary>Notes on the table</summary><ul>{notes}</ul></details>
<div class="figures">
{pictures}
</div>
</section>"""


def _picture(figure: Figure, number: int) -> str:
    plot = ""
    if figure.traces:
        label = _escape(f"{figure.title}. {figure.text}")
        plot = f'<div class="plot" role="img" aria-label="{label}" data-figure="{number}"></div>'
    every = -(-len(figure.rows) // _LONGEST_TABLE) or 1
    thinned = f", 1 row of {every}" if every > 1 else ""
    rows = [[str(cell) for cell in row] for row in figure.rows[::every]]
    return f"""<figure>
<h3>{_escape(figure.title)}</h3>
{plot}
<figcaption>{_escape(figure.text)}</figcaption>
<details><summary>Numbers{thinned}</summary>
{_wide(f"Numbers of {figure.title}", _table(figure.columns, rows))}</details>
</figure>"""


def _wide(label: str, table: str) -> str:
    """A table that scrolls sideways where it is wider than the screen, also by keys."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_escape(label)}">{table}</div>'
    )


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_escape(title)}</th>' for title in titles)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{_escape(cell).replace(',', ',<wbr>')}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _task(report: Report) -> str:
    return f"{report.settings.model} on {report.settings.data}"


def _circumstances(report: Report) -> str:
    settings = report.settings
    links = report.conditions.note
    if report.conditions.shaped:
        links = f"links of {settings.links}"
    elif report.conditions.modelled:
        links = f"times modelled for links of {format_bandwidth(settings.bandwidth)}"
    parts = [
        f"{settings.workers} workers with batches of {settings.batch}",
        f"{settings.steps} steps",
        describe.optimizer(settings),
        f"exchange {describe.exchange(settings)}",
        links,
        f"{report.parameters:,} parameters",
        report.data,
    ]
    return "; ".join(part for part in parts if part) + "."


def _different(machines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(m, sort_keys=True): m for m in machines}.values())


def _describe(machine: dict[str, Any]) -> str:
    """The facts of a machine and a build, one after the other."""
    parts = []
    for name, value in machine.items():
        if isinstance(value, dict):
            value = [f"{key} {_text(one)}" for key, one in value.items() if one is not None]
        parts.append(f"{name}: {_text(value)}")
    return "; ".join(parts)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _part(name: str) -> str:
    return files("gradwire_lab.train.page").joinpath(name).read_text(encoding="utf-8")


def _escape(text: str) -> str:
    """Text of a file, with no markup and no character that is not printable."""
    return escape_markup(printable(text, keep="\n"), quote=True)


def _in_script(value: object) -> str:
    """JSON that does not end the script in which it stands."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
