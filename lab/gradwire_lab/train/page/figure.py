"""What a picture of the page consists of, and the lines that several of them draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradwire_lab.train.report import Report, RunResult
from gradwire_lab.train.rivals import is_rival

Trace = dict[str, Any]
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
    rows: Sequence[tuple[object, ...]]


def lines_of(report: Report) -> Iterator[tuple[int, RunResult, str, bool]]:
    """The number of a run's codec, the run, its label, and whether the legend shows it: the codec,
    for the first seed alone."""
    for index, (codec, results) in enumerate(report.by_codec().items()):
        for result in results:
            yield index, result, codec, result is results[0]


def label_of(report: Report, result: RunResult) -> str:
    """The run's name where each has one."""
    return result.codec if report.settings.seeds == 1 else f"{result.codec}, seed {result.seed}"


def line(
    index: int, label: str, shown: bool, x: Sequence[float], y: Sequence[float], **more: Any
) -> Trace:
    """A line of the index-th codec."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "legendgroup": label,
        "showlegend": shown,
        "meta": index,
        "x": list(x),
        "y": list(y),
    } | more


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


def measured_by_us(codec: str) -> bool:
    """Whether gradwire itself exchanged, so that it knows where the time went."""
    return not is_rival(codec)
