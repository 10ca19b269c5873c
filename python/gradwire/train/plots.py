"""The report as pictures (PNG): accuracy over time, loss over steps, bits a value over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire.train.report import Report, RunResult
from gradwire.train.settings import format_bandwidth

# Okabe and Ito's palette, whose colours differ for colour-blind people too.
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
_LINES = ("-", "--", "-.", ":")
_SIZE_INCHES = (8.0, 5.0)
_DPI = 150
_POINTS_OF_A_SMOOTH_LINE = 40


def write(report: Report, folder: Path) -> list[Path]:
    """Writes a picture of the metric, such as accuracy.png, and loss.png, and bits.png if anything
    was sent."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {f"{report.settings.metric.name}.png": draw_metric, "loss.png": draw_loss}
    if any(result.push_bits for result in report.results):
        drawings["bits.png"] = draw_bits
    written = []
    with mpl.rc_context({"font.size": 11, "axes.grid": True, "grid.alpha": 0.3}):
        for name, draw in drawings.items():
            figure = draw(report)
            figure.savefig(folder / name, dpi=_DPI)
            written.append(folder / name)
    return written


def draw_metric(report: Report) -> Figure:
    figure, metric = Figure(figsize=_SIZE_INCHES, layout="constrained"), report.settings.metric
    axes = figure.subplots()
    for index, result, label in _lines(report):
        seconds = [e["seconds"] for e in result.evaluations]
        values = [metric.scale * e["value"] for e in result.evaluations]
        if label and result.final is not None:
            label += f" ({metric.text(result.final)} after {result.seconds:.0f} s)"
        axes.plot(seconds, values, marker="o", markersize=4, label=label, **_style(index))
    kind = "modelled" if report.conditions.modelled else "measured"
    _finish(axes, report, f"training time, {kind} (s)", f"{metric.title} ({metric.unit})")
    return figure


def draw_loss(report: Report) -> Figure:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    window = max(1, report.settings.steps // _POINTS_OF_A_SMOOTH_LINE)
    for index, result, label in _lines(report):
        if len(result.loss) < window:
            continue
        steps, style = range(1, len(result.loss) + 1), _style(index)
        axes.plot(steps, result.loss, alpha=0.15, color=style["color"])
        smooth = moving_average(result.loss, window)
        axes.plot(steps[window - 1 :], smooth, label=label, **style)
    _finish(axes, report, "step", f"training loss (nats, mean of {window} steps and all workers)")
    return figure


def draw_bits(report: Report) -> Figure:
    """Two panels, push and pull, with the same logarithmic scale."""
    figure = Figure(figsize=(_SIZE_INCHES[0], 1.4 * _SIZE_INCHES[1]), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    for index, result, label in _lines(report):
        if not result.push_bits:
            continue
        for axes, bits in ((above, result.push_bits), (below, result.pull_bits)):
            sent = [(step, value) for step, value in enumerate(bits, 1) if value > 0]
            mean = label and f"{label} (mean {sum(bits) / len(bits):.2f})"
            axes.plot(*zip(*sent, strict=True), label=mean, **_style(index))
    for axes, direction, title, across in (
        (above, "push", "push: gradients to their owner", ""),
        (below, "pull", "pull: results back", "step"),
    ):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        _finish(axes, report, across, f"bits a value, {direction}")
        axes.set_title(title, loc="left", fontsize=11)
    figure.suptitle(_title(report), fontsize=11)
    return figure


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Means of every `window` consecutive values: len(values) - window + 1 of them."""
    sums = [0.0, *accumulate(values)]
    return [(end - begin) / window for begin, end in zip(sums, sums[window:], strict=False)]


def _lines(report: Report) -> Iterator[tuple[int, RunResult, str]]:
    """The number of a run's codec, the run, and its label: the codec, for the first seed alone."""
    for index, (codec, results) in enumerate(report.by_codec().items()):
        for result in results:
            yield index, result, codec if result is results[0] else ""


def _style(index: int) -> dict[str, Any]:
    """The look of the line of the index-th codec."""
    return {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _LINES[index % len(_LINES)]}


def _finish(axes: Axes, report: Report, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(_title(report), loc="left", fontsize=11)
    axes.legend()


def _title(report: Report) -> str:
    settings = report.settings
    links = "unshaped links"
    if report.conditions.shaped or report.conditions.modelled:
        links = f"{format_bandwidth(settings.bandwidth)} links"
    modelled = " (modelled)" if report.conditions.modelled else ""
    return f"{settings.model} on {settings.data}, {settings.workers} workers, {links}{modelled}"
