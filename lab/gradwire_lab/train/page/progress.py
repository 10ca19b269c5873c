"""Pictures of how the trainings went on: metric and loss over time, bits over steps."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from gradwire_lab.train.page.figure import (
    Figure,
    axis,
    group_size,
    grouped,
    line,
    lines,
    log_axis,
    means_of,
)
from gradwire_lab.train.report import Report, RunResult
from gradwire_lab.train.results import Series

_POINTS_OF_LOSS = 100  # the loss of a step alone is mostly noise


def draw_metric(report: Report) -> Figure:
    """Over time, with a line at the goal."""
    metric = report.settings.metric

    def points(result: RunResult) -> Iterator[tuple[Any, ...]]:
        for e in result.evaluations:
            cells = e.step, f"{e.seconds:.2f}", metric.text(e.value)
            yield e.seconds, metric.scale * e.value, *cells

    traces, rows = lines(report, points, "lines+markers")
    said = [f"{report.label(run)}: {_end(report, run)}" for _, run, _ in report.lines()]
    layout: dict[str, Any] = {
        "xaxis": log_axis(f"training time, {report.times} (s)", traces, "x"),
        "yaxis": axis(f"{metric.title} ({metric.unit})"),
    }
    if report.goal is not None:
        goal = metric.scale * report.goal
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
        layout["shapes"] = [across]
        said.append(f"The line is the goal, {metric.text(report.goal)}")
    title = f"{metric.title.capitalize()} over time"
    columns = ("codec", "seed", "step", "seconds", metric.title)
    return Figure(title, ". ".join(said) + ".", traces, layout, columns, rows)


def _end(report: Report, result: RunResult) -> str:
    if result.failed:
        return f"failed ({result.failed})"
    if result.diverged is not None:
        return f"diverged in step {result.diverged}"
    assert result.final is not None
    return f"{report.settings.metric.text(result.final)} after {result.seconds:.1f} s"


def draw_loss(report: Report) -> Figure:
    """Over the time in which the steps ended, or over steps if a file does not have it."""
    timed = all(result.step_ends for result in report.results)
    size = group_size(max(len(result.loss) for result in report.results), _POINTS_OF_LOSS)

    def points(result: RunResult) -> Iterator[tuple[Any, ...]]:
        for step, mean in zip(*grouped(result.loss, size), strict=True):
            at = result.step_ends[step - 1] if timed else step
            yield at, mean, step, f"{at:.2f}" if timed else "-", f"{mean:.4f}"

    traces, rows = lines(report, points)
    ends = [(report.label(run), grouped(run.loss, size)[1]) for _, run, _ in report.lines()]
    said = [f"{label}: from {loss[0]:.3f} to {loss[-1]:.3f}" for label, loss in ends if loss]
    return Figure(
        f"Training loss over {'time' if timed else 'steps'}",
        ". ".join(said) + f". Means of all workers.{means_of(size)}",
        traces,
        {
            "xaxis": axis(f"training time, {report.times} (s)" if timed else "step"),
            "yaxis": axis("loss (nats)"),
        },
        ("codec", "seed", "step", "seconds", "loss"),
        rows,
    )


def draw_bits(report: Report, direction: str) -> Figure | None:
    """direction: push or pull. None: nothing was sent."""
    sent = [getattr(result, f"{direction}_bits") for result in report.results]
    if not any(map(any, sent)):
        return None
    size = group_size(max(map(len, sent)))

    def points(result: RunResult) -> Iterator[tuple[Any, ...]]:
        for step, mean in zip(*grouped(getattr(result, f"{direction}_bits"), size), strict=True):
            if mean > 0:
                yield step, mean, step, f"{mean:.4g}"

    traces, rows = lines(report, points)
    said = [
        f"{run.codec}: {mean:.3g} bits a value over all steps"
        for _, run, is_first in report.lines()
        if is_first and (mean := getattr(run, f"{direction}_bits_per_value")) is not None
    ]
    what = "gradients to their owners" if direction == "push" else "results back"
    return Figure(
        f"Bits a value over steps, {direction}",
        f"{direction.capitalize()}: {what}, with headers and tensors that go raw. "
        + ". ".join(said)
        + f".{means_of(size)}",
        traces,
        {"xaxis": axis("step"), "yaxis": log_axis("bits a value", traces, "y")},
        ("codec", "seed", "step", "bits a value"),
        rows,
    )


def draw_frontier(report: Report) -> Figure | None:
    """Bits of the compressed tensors and the metric at the end; None for fewer than two codecs."""
    metric = report.settings.metric
    traces, rows, said = [], [], []
    for index, (codec, results) in enumerate(report.by_codec().items()):
        series = Series(codec, results)
        if (bits := series.bits) is None or not (finals := series.finals):
            continue
        mean = fmean(finals)
        error = {"type": "data", "symmetric": False}
        error["array"] = [metric.scale * (max(finals) - mean)]
        error["arrayminus"] = [metric.scale * (mean - min(finals))]
        look = {"mode": "markers", "marker": {"size": 11}, "error_y": error}
        traces.append(line(index, codec, True, [bits], [metric.scale * mean], **look))
        rows.append((codec, len(finals), f"{bits:.4g}", metric.text(mean)))
        said.append(f"{codec}: {bits:.3g} bits, {metric.text(mean)}")
    if len(traces) < 2:
        return None
    return Figure(
        f"Bits a value and {metric.title} at the end",
        "Bits of the compressed tensors, mean of push and pull. " + ". ".join(said) + ".",
        traces,
        {
            "xaxis": log_axis("bits a value", traces, "x"),
            "yaxis": axis(f"{metric.title} ({metric.unit})"),
        },
        ("codec", "runs", "bits a value", metric.title),
        rows,
    )
