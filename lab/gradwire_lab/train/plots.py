"""The report as pictures (PNG): the metric over time and over steps, loss and bits a value over
steps, and the frontier of bits and metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from gradwire_lab.train.recipes import Metric
from gradwire_lab.train.report import Report, RunResult, mean_of
from gradwire_lab.train.results import Series, Task
from gradwire_lab.train.rivals import is_rival

# Okabe and Ito's palette, whose colours differ for colour-blind people too.
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", ":")
SIZE_INCHES = (8.0, 5.0)
_DPI = 150
_LEGEND_LINE_INCHES = 0.2
_POINTS_OF_A_SMOOTH_LINE = 40


def write(report: Report, folder: Path) -> list[Path]:
    """Writes a picture of the metric, such as accuracy.png, and loss.png, and bits.png if anything
    was sent."""
    settings = report.settings
    name = settings.metric.name
    figures: dict[str, Callable[[], Figure]] = {
        f"{name}.png": partial(draw_metric, report),
        f"{name}_of_steps.png": partial(draw_metric, report, "step"),
        "loss.png": partial(draw_loss, report),
    }
    if any(result.push_bits for result in report.results):
        figures["bits.png"] = partial(draw_bits, report)
    series = [Series(codec, results) for codec, results in report.by_codec().items()]
    if sum(one.bits is not None for one in series) > 1:
        task = Task(settings.model, settings.data, series)
        figures["frontier.png"] = partial(draw_frontier, task)
    return save(figures, folder)


def write_frontiers(tasks: Sequence[Task], folder: Path) -> list[Path]:
    """Writes frontier-MODEL-DATA.png for each task."""
    figures = {f"frontier-{t.model}-{t.data}.png": partial(draw_frontier, t) for t in tasks}
    return save(figures, folder)


def save(figures: Mapping[str, Callable[[], Figure | None]], folder: Path) -> list[Path]:
    """Draws and writes the figures, by their files' names, and returns the paths. None: there is
    nothing to draw."""
    written = []
    with mpl.rc_context({"font.size": 11, "axes.grid": True, "grid.alpha": 0.3}):
        for name, draw in figures.items():
            if (figure := draw()) is not None:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / name, dpi=_DPI)
                written.append(folder / name)
    return written


def draw_metric(report: Report, place: str = "seconds") -> Figure:
    """place: "seconds", on a logarithmic scale and with a line at the goal, or "step"."""
    metric, is_of_time = report.settings.metric, place == "seconds"
    across = f"training time, {report.times} (s, logarithmic)" if is_of_time else place
    figure, axes = _new_axes(report, across, f"{metric.title} ({metric.unit})")
    for index, result, label in _lines(report):
        places = [getattr(e, place) for e in result.evaluations]
        values = [metric.scale * e.value for e in result.evaluations]
        runs = report.by_codec()[result.codec]
        final, time = (mean_of(runs, attrgetter(name)) for name in ("final", "seconds"))
        if label and final is not None:
            label += f" ({metric.text(final)} after {time:.0f} s)"
        axes.plot(places, values, marker="o", markersize=4, label=label, **style(index))
    figure.legend(loc="outside lower center", ncols=2)  # the lines leave no room in the axes
    if not is_of_time:
        return figure
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    if report.goal is not None:
        goal = metric.scale * report.goal
        axes.axhline(goal, color="#666666", linewidth=1)
        name = f"goal: {metric.text(report.goal)}"
        axes.annotate(name, (0.005, goal), xycoords=("axes fraction", "data"), va="bottom")
    return figure


def draw_frontier(task: Task) -> Figure:
    """Bits a value and the metric at the end of each series: the mean, and a bar from the lowest
    run to the highest. Series that are far worse than most are at the edge, with their means."""
    metric = task.metric
    found = [(s.bits, s) for s in task.series if s.finals and s.bits is not None]
    drawn = sorted(found, key=lambda one: one[0])
    height = SIZE_INCHES[1] + _LEGEND_LINE_INCHES * len(drawn)
    figure = Figure(figsize=(SIZE_INCHES[0], height), layout="constrained")
    axes = figure.subplots()
    worst = worst_shown([metric.scale * fmean(s.finals) for _, s in drawn], metric)
    for index, (bits, series) in enumerate(drawn):
        values = [metric.scale * value for value in series.finals]
        mean, text = fmean(values), metric.text(fmean(series.finals))
        spread = [[mean - min(values)], [max(values) - mean]]
        if not metric.reached(mean, worst):
            mean, spread = worst, [[0.0], [0.0]]
            # Upright, into the picture: texts of neighbours don't overlap.
            inside, va = (8, "bottom") if metric.higher_is_better else (-8, "top")
            axes.annotate(
                text, (bits, mean), (0, inside), textcoords="offset points", rotation="vertical",
                ha="center", va=va,
            )  # fmt: skip
            axes.axhline(worst, color="0.5", linewidth=1, linestyle=":")
        look = {"color": style(index)["color"], "fmt": MARKERS[index % len(MARKERS)]}
        label = f"{series.label} ({text})"
        axes.errorbar([bits], [mean], spread, label=label, capsize=3, **look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("bits a value of the compressed tensors, mean of push and pull")
    axes.set_ylabel(f"{metric.title} ({metric.unit})")
    axes.set_title(f"{task.model} on {task.data}", loc="left", fontsize=11)
    figure.legend(loc="outside lower left", fontsize=9)
    return figure


def worst_shown(means: Sequence[float], metric: Metric) -> float:
    """The worst value that is drawn in its place: three times as far from the best as the third
    quartile of all means, so that one that broke down does not press the others together."""
    ordered = sorted(means, reverse=metric.higher_is_better)
    if not ordered:
        return 0.0
    best, quartile, worst = ordered[0], ordered[3 * (len(ordered) - 1) // 4], ordered[-1]
    limit = best + 3.0 * (quartile - best)
    return worst if metric.reached(worst, limit) else limit


def draw_loss(report: Report) -> Figure:
    window = max(1, report.settings.steps // _POINTS_OF_A_SMOOTH_LINE)
    up = f"training loss (nats, mean of {window} steps and all workers)"
    figure, axes = _new_axes(report, "step", up)
    for index, result, label in _lines(report):
        if len(result.loss) < window:
            continue
        steps, look = range(1, len(result.loss) + 1), style(index)
        axes.plot(steps, result.loss, alpha=0.15, color=look["color"])
        smooth = moving_average(result.loss, window)
        axes.plot(steps[window - 1 :], smooth, label=label, **look)
    if axes.lines:
        axes.legend()
    return figure


def draw_bits(report: Report) -> Figure:
    """Two panels, push and pull, with the same logarithmic scale."""
    figure = Figure(figsize=(SIZE_INCHES[0], 1.4 * SIZE_INCHES[1]), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    titles = {"push": "push: gradients to their owner", "pull": "pull: results back"}
    for axes, (direction, title) in zip(panels, titles.items(), strict=True):
        for index, result, label in _lines(report):
            of_seed = f" with seed {result.seed}" if report.settings.seeds > 1 else ""
            if bits := getattr(result, f"{direction}_bits"):
                sent = [(step, value) for step, value in enumerate(bits, 1) if value > 0]
                mean = label and f"{label} (mean {fmean(bits):.2f}{of_seed})"
                axes.plot(*zip(*sent, strict=True), label=mean, **style(index))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel(f"bits a value, {direction}")
        axes.set_title(title, loc="left", fontsize=11)
        if axes.lines:
            axes.legend()
    axes.set_xlabel("step")
    figure.suptitle(_title(report), fontsize=11)
    return figure


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Means of every `window` consecutive values: len(values) - window + 1 of them."""
    means: list[float] = np.convolve(values, np.full(window, 1.0 / window), "valid").tolist()
    return means


def _lines(report: Report) -> Iterator[tuple[int, RunResult, str]]:
    """The number of a run's codec, the run, and its label: the codec, for the first seed alone.
    Next to rivals it says which are gradwire's."""
    has_rivals = any(is_rival(result.codec) for result in report.results)
    for index, result, is_first in report.lines():
        owner = "gradwire, " if has_rivals and not is_rival(result.codec) else ""
        yield index, result, f"{owner}{result.codec}" if is_first else ""


def style(index: int) -> dict[str, Any]:
    """The look of the line of the index-th codec."""
    return {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _LINES[index % len(_LINES)]}


def _new_axes(report: Report, across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(_title(report), loc="left", fontsize=11)
    return figure, axes


def _title(report: Report) -> str:
    settings = report.settings
    links = "unshaped links"
    if report.conditions.shaped or report.conditions.modelled:
        links = f"{settings.links} links"
    modelled = " (modelled)" if report.conditions.modelled else ""
    return f"{settings.model} on {settings.data}, {settings.workers} workers, {links}{modelled}"
