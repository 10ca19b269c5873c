"""The reports of trainings as a web page: one file, with its library, that needs no network. It has
a section for each report, its pictures and its numbers, and Plotly.js.

Text of files is escaped, and has no character that is not printable.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradwire.errors import missing, printable
from gradwire.files import write_text
from gradwire_lab.train import describe
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.page import costs, layers, progress
from gradwire_lab.train.page.figure import Figure
from gradwire_lab.train.report import Report
from gradwire_lab.train.report_table import footnotes, table, verdict
from gradwire_lab.train.settings import format_bandwidth

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

    sections = [_section(report) for report in reports]
    plots = [
        {"traces": figure.traces, "layout": figure.layout}
        for section in sections
        for figure in section["figures"]
    ]
    different = {json.dumps(machine, sort_keys=True): machine for machine in machines}
    page = _render(
        # JSON that does not end the script in which it stands.
        {
            "plots": json.dumps(plots, allow_nan=False).replace("<", "\\u003c"),
            "plotly": get_plotlyjs(),
        },
        title=f"gradwire: {', '.join(dict.fromkeys(section['task'] for section in sections))}",
        sections=sections,
        machines=[_describe(machine) for machine in different.values()],
        longest_table=_LONGEST_TABLE,
    )
    write_text(path, page)


def _render(scripts: dict[str, str], **facts: Any) -> str:
    """The page. scripts: stand in it as they are."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    def printed(value: object) -> object:
        return value if isinstance(value, Markup) else printable(str(value), keep="\n")

    def breakable(cell: object) -> Markup:
        """A text that may be broken after its commas."""
        return escape(printed(cell)).replace(",", Markup(",<wbr>"))

    environment = Environment(
        loader=PackageLoader("gradwire_lab.train", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    for name in ("css", "js"):
        part = files("gradwire_lab.train.page").joinpath(f"page.{name}")
        scripts[name] = part.read_text(encoding="utf-8")
    parts = {name: Markup(script) for name, script in scripts.items()}
    return environment.get_template("page.html").render(**parts, **facts)


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
    shown = table(report)
    return {
        "task": f"{report.settings.model} on {report.settings.data}",
        "verdict": verdict(report),
        "circumstances": _circumstances(report),
        "columns": list(shown.titles),
        "rows": shown.rows,
        "notes": footnotes(report),
        "figures": draw(report),
    }


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
