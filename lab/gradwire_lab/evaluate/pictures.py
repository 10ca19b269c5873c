"""Draws the charts of the evaluations with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from gradwire_lab.evaluate.charts import Bars, Chart, Histograms, Line, Lines
from gradwire_lab.train import plots
from gradwire_lab.train.recipes import Metric
from gradwire_lab.train.results import Task


def draw(chart: Chart) -> Figure | None:
    """None: there is nothing to draw."""
    match chart:
        case Task():
            return plots.draw_frontier(chart)
        case Lines():
            return _draw_lines(chart) if any(line.xs for line in chart.drawn.values()) else None
        case Bars():
            return _draw_bars(chart) if chart.drawn else None
        case Histograms():
            return _draw_histograms(chart) if chart.drawn else None


def _new_axes(up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=plots.SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel(up)
    return figure, axes


def _draw_lines(chart: Lines) -> Figure:
    figure, axes = _new_axes(chart.up)
    worse = _far_worse(chart.drawn, chart.metric) if chart.metric is not None else {}
    low, high = _limits([line for name, line in chart.drawn.items() if name not in worse])
    order = list(chart.looks or chart.drawn)
    for name, line in chart.drawn.items():
        index = order.index(name)
        marker = plots.MARKERS[index % len(plots.MARKERS)] if chart.markers else ""
        style = plots.style(index)
        label, colour = name, style["color"]
        if name in worse and not low < line.ys[-1] < high:
            label += f" (beyond the picture: ends at {worse[name]})"
        axes.plot(line.xs, line.ys, label=label, marker=marker, markersize=5, **style)
        if line.lows and chart.markers:
            axes.vlines(line.xs, line.lows, line.highs, color=colour, linewidth=1.5)
        elif line.lows:
            axes.fill_between(line.xs, line.lows, line.highs, color=colour, alpha=0.15, linewidth=0)
    if worse:
        axes.set_ylim(low, high)
    if chart.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=_ticks_between(chart.drawn)))
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel(chart.across)
    axes.set_title(chart.title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _far_worse(drawn: Mapping[str, Line], metric: Metric) -> dict[str, str]:
    """The names of lines that end far worse than most, with the end as text."""
    ends = {name: line.ys[-1] for name, line in drawn.items() if line.ys}
    if len(ends) < 3:
        return {}  # either may be the one that is worse
    worst = plots.worst_shown(list(ends.values()), metric)
    return {
        name: metric.text(end / metric.scale)
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


def _draw_bars(chart: Bars) -> Figure:
    figure, axes = _new_axes(chart.up)
    axes.grid(visible=False, axis="x")
    names = list(dict.fromkeys(name for bars in chart.drawn.values() for name in bars))
    width = 0.6 if chart.stacked else 0.8 / len(names)
    for place, bars in enumerate(chart.drawn.values()):
        x, bottom = float(place), chart.bottom
        for index, name in enumerate(names):
            if name not in bars:
                continue
            bar, colour = bars[name], plots.style(index + 1)["color"]
            if not chart.stacked:
                x = place + (index - (len(names) - 1) / 2) * width
            label = name if name and place == 0 else "_"
            axes.bar(x, bar.height - chart.bottom, width, bottom, label=label, color=colour)
            if chart.stacked:
                bottom += bar.height
                continue
            if bar.high > bar.low:
                axes.vlines(x, bar.low, bar.high, color="black", linewidth=1.5)
            axes.annotate(
                chart.form.format(bar.height), (x, bar.high), (0, 2), textcoords="offset points",
                ha="center", fontsize=8, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},
            )  # fmt: skip
    if chart.mark is not None:
        axes.axhline(chart.mark, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(bottom=chart.bottom)
    long = max(map(len, chart.drawn)) > 60 / len(chart.drawn)
    turn, align = (25, "right") if long else (0, "center")
    axes.set_xticks(range(len(chart.drawn)), list(chart.drawn), fontsize=9, rotation=turn, ha=align)
    if names != [""]:
        figure.legend(loc="outside lower center", ncols=len(names), fontsize=9)
    return figure


def _draw_histograms(chart: Histograms) -> Figure:
    width, height = plots.SIZE_INCHES
    rows = len(chart.drawn)
    figure = Figure(figsize=(1.5 * width, 0.45 * height * rows), layout="constrained")
    for row, (name, shares) in enumerate(chart.drawn.items()):
        panels = [key for key in shares if key != "edges"]
        for column, key in enumerate(panels):
            axes = figure.add_subplot(rows, len(panels), row * len(panels) + column + 1)
            axes.stairs(shares[key], shares["edges"], fill=True, color=plots.style(1)["color"])
            axes.set_yscale("log")
            axes.set_ylim(1e-5, 1.0)
            axes.set_title(f"{name}: {key}", loc="left", fontsize=9)
            axes.set_xlabel(chart.across, fontsize=8)
            axes.set_ylabel("share of the values" if column == 0 else "", fontsize=8)
    return figure
