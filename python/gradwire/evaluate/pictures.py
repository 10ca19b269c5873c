"""The figures of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from gradwire.train import plots

Line = tuple[Sequence[float], Sequence[float]]


def lines(
    drawn: Mapping[str, Line],
    across: str,
    up: str,
    *,
    logarithmic: str = "",
    markers: bool = False,
    title: str = "",
) -> Figure:
    """A line for each name. logarithmic: the axes that are: "x", "y", "xy"."""
    figure = Figure(figsize=plots.SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for index, (name, (xs, ys)) in enumerate(drawn.items()):
        marker = plots.MARKERS[index % len(plots.MARKERS)] if markers else ""
        axes.plot(xs, ys, label=name, marker=marker, markersize=5, **plots.style(index))
    if "x" in logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    if "y" in logarithmic:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, loc="left", fontsize=11)
    if drawn:
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure
