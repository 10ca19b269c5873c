"""The figures of the evaluations, as data that pictures.py draws. Where several seeds were run,
they show the lowest and the highest, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.evaluate.found import Found
from gradwire_lab.evaluate.store import curve
from gradwire_lab.train.recipes import Metric
from gradwire_lab.train.results import Task


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


@dataclass(frozen=True)
class Lines:
    """A line for each name. logarithmic: the axis across. metric: of the heights; a line that ends
    far worse than most is cut off, and the legend says where it ends. looks: the names in an order
    that gives each its colour and marker; empty: that of `drawn`."""

    drawn: Mapping[str, Line]
    across: str
    up: str
    logarithmic: bool = False
    markers: bool = False
    title: str = ""
    metric: Metric | None = None
    looks: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """A group of bars for each name, side by side with their heights as text, or stacked. bottom:
    of the axis. mark: the height of a line."""

    drawn: Mapping[str, Mapping[str, Bar]]
    up: str
    stacked: bool = False
    bottom: float = 0.0
    mark: float | None = None
    form: str = "{:.1f}"


@dataclass(frozen=True)
class Histograms:
    """A row for each name; in it a panel for each histogram, shares of the values between the
    `edges`, on a logarithmic scale."""

    drawn: Mapping[str, Mapping[str, Sequence[float]]]
    across: str


Chart = Lines | Bars | Histograms | Task  # of a Task its frontier


def line_through(points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """The means of the values at each place, with their spread."""
    means, lows, highs = ([of(values) for _, values in points] for of in (fmean, min, max))
    return Line([x for x, _ in points], means, lows, highs)


def bar_of(values: Sequence[float]) -> Bar:
    return Bar(fmean(values), min(values), max(values))


def lines_over_steps(
    found: Found, arms: Mapping[str, Arm], *, of_loss: bool, looks: Sequence[str] = ()
) -> Lines:
    """The training loss, or what the evaluations measure, over the steps: the mean of the seeds.
    Runs that diverged are left out. looks: as of `Lines`."""
    metric = found.metric(next(iter(arms.values())))
    drawn = {}
    for label, one in arms.items():
        runs = [run for run in found.runs(one) if run.final is not None]
        if of_loss:
            own = [curve(run.loss, found.settings[one].steps) for run in runs]
        else:
            own = [
                (
                    [e.step for e in run.evaluations],
                    [metric.scale * e.value for e in run.evaluations],
                )
                for run in runs
            ]
        if runs:
            drawn[label] = _spread(own)
    if of_loss:
        return Lines(drawn, "step", "training loss (nats)", looks=looks)
    up = f"{metric.title} ({metric.unit})"
    return Lines(drawn, "step", up, markers=True, metric=metric, looks=looks)


def _spread(runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Line:
    """The spread of curves whose points may lie at different places: at those of the curve that
    begins last, so that every other one has points on both sides."""
    xs = max(runs, key=lambda run: run[0][0])[0]
    ys = np.array([np.interp(xs, *run) for run in runs])
    if len(runs) == 1:
        return Line(xs, ys[0].tolist())
    return Line(xs, ys.mean(0).tolist(), ys.min(0).tolist(), ys.max(0).tolist())


def bars_of_ends(found: Found, arms: Mapping[str, Arm]) -> Bars:
    """What the trainings end with, a bar for each; the first one is the base that a line marks."""
    ends = {label: found.ends(one) for label, one in arms.items()}
    drawn = {label: {"": bar_of(values)} for label, values in ends.items() if values}
    base, up = next(iter(arms)), found.metric(next(iter(arms.values()))).title
    lowest = min((bars[""].low for bars in drawn.values()), default=0.0)
    mark = drawn[base][""].height if base in drawn else None
    return Bars(drawn, f"{up} (%)", bottom=lowest // 1 - 2, mark=mark)
