"""What a picture of the page consists of, and the lines and bars that several of them draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradwire_lab.train.report import Report, RunResult

Trace = dict[str, Any]
Rows = Sequence[tuple[object, ...]]
MOST_POINTS = 400  # of a line; longer ones are drawn as means of equally many steps


@dataclass(frozen=True)
class Figure:
    """A picture. text: the same in words. traces, layout: as Plotly.js takes them; page.js adds
    colours by each trace's `meta`, and fonts. columns, rows: the numbers in the picture."""

    title: str
    text: str
    traces: list[Trace]
    layout: dict[str, Any]
    columns: tuple[str, ...]
    rows: Rows


def lines(
    report: Report, points: Callable[[RunResult], Iterable[tuple[Any, ...]]], mode: str = "lines"
) -> tuple[list[Trace], Rows]:
    """A line of each run, and the rows of their points. points: the two places of each point, and
    what stands in its row after codec and seed."""
    traces, rows = [], []
    for index, result, is_first in report.lines():
        drawn = list(points(result))
        xs, ys = ([point[axis] for point in drawn] for axis in (0, 1))
        traces.append(line(index, result.codec, is_first, xs, ys, mode=mode))
        rows += [(result.codec, result.seed, *cells) for _, _, *cells in drawn]
    return traces, rows


def line(
    index: int, label: str, shown: bool, x: Sequence[float], y: Sequence[float], **more: Any
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "legendgroup": label,
        "showlegend": shown,
        "meta": index,
        "x": x,
        "y": y,
    } | more


def bars(index: int, name: str, lengths: Iterable[float], labels: Iterable[str]) -> Trace:
    """Bars from the left, with the index-th colour."""
    places = {"x": list(lengths), "y": list(labels)}
    return {"type": "bar", "orientation": "h", "name": name, "meta": index} | places


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | more


def log_axis(title: str, traces: Sequence[Trace], which: str) -> dict[str, Any]:
    """Logarithmic, with ticks at 1, 2 and 5 of each decade; linear if the values that the traces
    have for this axis ("x" or "y") lie between fewer than two ticks."""
    ticks = [float(f"{digit}e{power}") for power in range(-4, 7) for digit in (1, 2, 5)]
    values = [value for trace in traces for value in trace[which] if value]
    if values and sum(min(values) <= tick <= max(values) for tick in ticks) < 2:
        return axis(title)
    texts = [f"{tick:g}" for tick in ticks]
    return axis(f"{title}, log scale", type="log", tickvals=ticks, ticktext=texts)


def group_size(steps: int, most: int = MOST_POINTS) -> int:
    """How many steps a point stands for."""
    return max(1, -(-steps // most))


def grouped(values: Sequence[float], size: int) -> tuple[list[int], list[float]]:
    """The last step, from 1, and the mean of each `size` consecutive steps; the last group may be
    smaller."""
    ends = [min(start + size, len(values)) for start in range(0, len(values), size)]
    return ends, [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def means_of(size: int) -> str:
    """A sentence on what a point is, for a figure's text."""
    return "" if size == 1 else f" Each point is the mean of {size} steps."
