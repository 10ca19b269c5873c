"""The figures of the evaluations. Where several seeds were run, they show the lowest and the
highest, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.evaluate.found import Found
from gradwire_lab.evaluate.store import curve
from gradwire_lab.train import plots
from gradwire_lab.train.recipes import Metric


class Line(NamedTuple):
    """lows, highs: of the spread around the line, a bar at each marker or a band; empty: none."""

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


class Bar(NamedTuple):
    height: float
    low: float
    high: float


def lines(
    drawn: Mapping[str, Line],
    across: str,
    up: str,
    *,
    logarithmic: bool = False,
    markers: bool = False,
    title: str = "",
    metric: Metric | None = None,
    looks: Sequence[str] = (),
) -> Figure | None:
    """A line for each name. logarithmic: the axis across. metric: of the heights; a line that ends
    far worse than most is cut off, and the legend says where it ends. looks: the names in an order
    that gives each its colour and marker; empty: that of `drawn`. None: no line."""
    if not any(len(line.xs) for line in drawn.values()):
        return None
    figure = Figure(figsize=plots.SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    cut_off = _far_worse(drawn, metric) if metric is not None else {}
    order = list(looks or drawn)
    for name, line in drawn.items():
        index = order.index(name)
        marker = plots.MARKERS[index % len(plots.MARKERS)] if markers else ""
        style = plots.style(index)
        label = name + cut_off.get(name, "")
        axes.plot(line.xs, line.ys, label=label, marker=marker, markersize=5, **style)
        if line.lows and markers:
            axes.vlines(line.xs, line.lows, line.highs, color=style["color"], linewidth=1.5)
        elif line.lows:
            axes.fill_between(
                line.xs, line.lows, line.highs, color=style["color"], alpha=0.15, linewidth=0
            )
    if cut_off:
        axes.set_ylim(*_limits([line for name, line in drawn.items() if name not in cut_off]))
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=_ticks_between(drawn)))
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _far_worse(drawn: Mapping[str, Line], metric: Metric) -> dict[str, str]:
    """The names of lines that end far worse than most, with the end as text."""
    ends = {name: line.ys[-1] for name, line in drawn.items() if line.ys}
    if len(ends) < 3:
        return {}  # either may be the one that is worse
    worst = plots.worst_shown(list(ends.values()), metric)
    return {
        name: f" (beyond the picture: ends at {metric.text(end / metric.scale)})"
        for name, end in ends.items()
        if not metric.reached(end, worst)
    }


def _limits(shown: Sequence[Line]) -> tuple[float, float]:
    """The ends of the axis of heights, with a margin as matplotlib has it."""
    heights = [y for line in shown for part in (line.ys, line.lows, line.highs) for y in part]
    margin = 0.05 * (max(heights) - min(heights))
    return min(heights) - margin, max(heights) + margin


def _ticks_between(drawn: Mapping[str, Line]) -> tuple[float, ...]:
    """What the powers of two are multiplied by for ticks: a short axis has some between them."""
    xs = [x for line in drawn.values() for x in line.xs]
    return (1.0,) if max(xs) / min(xs) > 8 else (1.0, 1.25, 1.5, 1.75)


def over_steps(
    found: Found,
    arms: Mapping[str, Arm],
    *,
    of_loss: bool = False,
    title: str = "",
    looks: Sequence[str] = (),
) -> Figure | None:
    """The training loss, or what the evaluations measure, over the steps: the mean of the seeds.
    Runs that diverged are left out. looks: as of `lines`."""
    drawn = {}
    for label, one in arms.items():
        runs = [run for run in found.runs(one) if run.final is not None]
        if not runs:
            continue
        if of_loss:
            own = [curve(run.loss, found.settings[one].steps) for run in runs]
        else:
            scale = found.metric(one).scale
            own = [
                (
                    [e["step"] for e in run.evaluations],
                    [scale * e["value"] for e in run.evaluations],
                )
                for run in runs
            ]
        drawn[label] = _spread(own)
    metric = found.metric(next(iter(arms.values())))
    up = "training loss (nats)" if of_loss else f"{metric.title} ({metric.unit})"
    ends = None if of_loss else metric
    return lines(drawn, "step", up, markers=not of_loss, title=title, metric=ends, looks=looks)


def _spread(runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Line:
    """The spread of curves whose points may lie at different places: at those of the curve that
    begins last, so that every other one has points on both sides."""
    xs = max(runs, key=lambda run: run[0][0])[0]
    ys = np.array([np.interp(xs, *run) for run in runs])
    if len(runs) == 1:
        return Line(xs, ys[0].tolist())
    return Line(xs, ys.mean(0).tolist(), ys.min(0).tolist(), ys.max(0).tolist())


def final_bars(found: Found, arms: Mapping[str, Arm]) -> Figure | None:
    """What the trainings end with, a bar for each; the first one is the base that a line marks."""
    drawn = {}
    for label, one in arms.items():
        if finals := [100 * final for final in found.finals(one)]:
            drawn[label] = {"": Bar(fmean(finals), min(finals), max(finals))}
    base, up = next(iter(arms)), found.metric(next(iter(arms.values()))).title
    lowest = min((bar.low for bars in drawn.values() for bar in bars.values()), default=0.0)
    mark = drawn[base][""].height if base in drawn else None
    return grouped_bars(drawn, f"{up} (%)", bottom=lowest // 1 - 2, mark=mark)


def grouped_bars(
    drawn: Mapping[str, Mapping[str, Bar]],
    up: str,
    *,
    bottom: float = 0.0,
    mark: float | None = None,
    form: str = "{:.1f}",
) -> Figure | None:
    """A group of bars for each name, with their heights as text. bottom: of the axis. mark: the
    height of a line. None: no bar."""
    names = list(dict.fromkeys(name for bars in drawn.values() for name in bars))
    if not names:
        return None
    figure = Figure(figsize=plots.SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="x")
    width = 0.8 / len(names)
    for place, bars in enumerate(drawn.values()):
        for index, name in enumerate(names):
            if name not in bars:
                continue
            bar, x = bars[name], place + (index - (len(names) - 1) / 2) * width
            label = name if name and place == 0 else "_"
            axes.bar(
                x,
                bar.height - bottom,
                width,
                bottom,
                label=label,
                color=plots.style(index + 1)["color"],
            )
            if bar.high > bar.low:
                axes.vlines(x, bar.low, bar.high, color="black", linewidth=1.5)
            axes.annotate(
                form.format(bar.height), (x, bar.high), (0, 2), textcoords="offset points",
                ha="center", fontsize=8, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},
            )  # fmt: skip
    if mark is not None:
        axes.axhline(mark, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(bottom=bottom)
    _name_groups(axes, list(drawn))
    axes.set_ylabel(up)
    if names != [""]:
        figure.legend(loc="outside lower center", ncols=len(names), fontsize=9)
    return figure


def stacked_bars(drawn: Mapping[str, Mapping[str, float]], up: str) -> Figure | None:
    """A bar for each name, of the parts that its mapping names."""
    if not drawn:
        return None
    figure = Figure(figsize=plots.SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="x")
    parts = list(next(iter(drawn.values())))
    bottoms = [0.0] * len(drawn)
    for index, part in enumerate(parts):
        heights = [shares[part] for shares in drawn.values()]
        colour = plots.style(index + 1)["color"]
        axes.bar(range(len(drawn)), heights, 0.6, bottoms, label=part, color=colour)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    _name_groups(axes, list(drawn))
    axes.set_ylabel(up)
    figure.legend(loc="outside lower center", ncols=len(parts), fontsize=9)
    return figure


def _name_groups(axes: Axes, names: Sequence[str]) -> None:
    long = max(map(len, names)) > 60 / len(names)
    turn, align = (25, "right") if long else (0, "center")
    axes.set_xticks(range(len(names)), names, fontsize=9, rotation=turn, ha=align)


def histograms(drawn: Mapping[str, Mapping[str, Sequence[float]]], across: str) -> Figure | None:
    """A row for each name; in it a panel for each histogram, shares of the values between the
    `edges`, on a logarithmic scale."""
    if not drawn:
        return None
    width, height = plots.SIZE_INCHES
    figure = Figure(figsize=(1.5 * width, 0.45 * height * len(drawn)), layout="constrained")
    for row, (name, shares) in enumerate(drawn.items()):
        edges = shares["edges"]
        panels = [key for key in shares if key != "edges"]
        for column, key in enumerate(panels):
            place = row * len(panels) + column + 1
            axes = figure.add_subplot(len(drawn), len(panels), place)
            axes.stairs(shares[key], edges, fill=True, color=plots.style(1)["color"])
            axes.set_yscale("log")
            axes.set_ylim(1e-5, 1.0)
            axes.set_title(f"{name}: {key}", loc="left", fontsize=9)
            axes.set_xlabel(across, fontsize=8)
            axes.set_ylabel("share of the values" if column == 0 else "", fontsize=8)
    return figure
