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
) -> Figure | None:
    """A line for each name. logarithmic: the axes that are: "x", "y", "xy". None: no line."""
    if not any(len(xs) for xs, _ in drawn.values()):
        return None
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
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


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
