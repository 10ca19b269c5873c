"""Writes the page: a section for each report, its pictures and its numbers, and Plotly.js."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import missing
from gradwire.files import write_text
from gradwire_lab.train import describe
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.page import costs, layers, progress
from gradwire_lab.train.page.figure import Figure
from gradwire_lab.train.report import Report
from gradwire_lab.train.report_table import columns, footnotes
from gradwire_lab.train.settings import format_bandwidth
from gradwire_lab.train.verdict import verdict

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

    from gradwire_lab.train.page.template import render

    sections = [_section(report) for report in reports]
    plots = [
        {"traces": figure.traces, "layout": figure.layout}
        for section in sections
        for figure in section["figures"]
    ]
    page = render(
        title=f"gradwire: {', '.join(dict.fromkeys(section['task'] for section in sections))}",
        sections=sections,
        machines=[_describe(machine) for machine in _different(machines)],
        longest_table=_LONGEST_TABLE,
        plots=_in_script(plots),
        plotly=get_plotlyjs(),
    )
    write_text(path, page)


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


def _section(report: Report) -> dict[str, Any]:
    """What the template shows of a report."""
    cells = columns(report)
    return {
        "task": _task(report),
        "verdict": verdict(report),
        "circumstances": _circumstances(report),
        "columns": list(cells),
        "rows": [
            [cell(results) for cell in cells.values()] for results in report.by_codec().values()
        ],
        "notes": footnotes(report),
        "figures": draw(report),
    }


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


def _in_script(value: object) -> str:
    """JSON that does not end the script in which it stands."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
