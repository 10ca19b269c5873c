"""Pictures of how the trainings went on: metric and loss over time, bits over steps."""

from __future__ import annotations

from typing import Any

from gradwire_lab.train.page.figure import (
    Figure,
    axis,
    group_size,
    grouped,
    label_of,
    line,
    lines_of,
    log_axis,
    means_of,
)
from gradwire_lab.train.report import Report, RunResult
from gradwire_lab.train.results import Series

_POINTS_OF_LOSS = 100  # the loss of a step alone is mostly noise


def draw_metric(report: Report) -> Figure:
    """Over time, with a line at the goal."""
    metric = report.settings.metric
    traces, rows, said = [], [], []
    for index, result, label, shown in lines_of(report):
        x = [e["seconds"] for e in result.evaluations]
        y = [metric.scale * e["value"] for e in result.evaluations]
        traces.append(line(index, label, shown, x, y, mode="lines+markers"))
        rows += [
            (label, result.seed, round(e["step"]), f"{e['seconds']:.2f}", metric.text(e["value"]))
            for e in result.evaluations
        ]
        said.append(f"{label_of(report, result)}: {_end(report, result)}")
    layout: dict[str, Any] = {
        "xaxis": log_axis(f"training time, {report.times} (s)", traces, "x"),
        "yaxis": axis(f"{metric.title} ({metric.unit})"),
    }
    if report.goal is not None:
        goal = metric.scale * report.goal
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
        ]
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
    traces, rows, said = [], [], []
    for index, result, label, shown in lines_of(report):
        steps, means = grouped(result.loss, size)
        x = [result.step_ends[step - 1] for step in steps] if timed else steps
        traces.append(line(index, label, shown, x, means))
        rows += [
            (label, result.seed, step, f"{at:.2f}" if timed else "-", f"{mean:.4f}")
            for step, at, mean in zip(steps, x, means, strict=True)
        ]
        if means:
            name = label_of(report, result)
            said.append(f"{name}: from {means[0]:.3f} to {means[-1]:.3f}")
    across = f"training time, {report.times} (s)" if timed else "step"
    return Figure(
        f"Training loss over {'time' if timed else 'steps'}",
        ". ".join(said) + f". Means of all workers.{means_of(size)}",
        traces,
        {"xaxis": axis(across), "yaxis": axis("loss (nats)")},
        ("codec", "seed", "step", "seconds", "loss"),
        rows,
    )


def draw_bits(report: Report, direction: str) -> Figure | None:
    """direction: push or pull. None: nothing was sent."""
    sent = {id(r): getattr(r, f"{direction}_bits") for r in report.results}
    if not any(any(bits) for bits in sent.values()):
        return None
    size = group_size(max(map(len, sent.values())))
    traces, rows, said = [], [], []
    for index, result, label, shown in lines_of(report):
        bits = sent[id(result)]
        points = [(s, mean) for s, mean in zip(*grouped(bits, size), strict=True) if mean > 0]
        steps, means = [step for step, _ in points], [mean for _, mean in points]
        traces.append(line(index, label, shown, steps, means))
        rows += [(label, result.seed, step, f"{mean:.4g}") for step, mean in points]
        mean = getattr(result, f"{direction}_bits_per_value")
        if shown and mean is not None:
            said.append(f"{label}: {mean:.3g} bits a value over all steps")
    what = "gradients to their owners" if direction == "push" else "results back"
    return Figure(
        f"Bits a value over steps, {direction}",
        f"{direction.capitalize()}: {what}, with headers and tensors that go raw. "
        + ". ".join(said)
        + f".{means_of(size)}",
        traces,
        {
            "xaxis": axis("step"),
            "yaxis": log_axis("bits a value", traces, "y"),
        },
        ("codec", "seed", "step", "bits a value"),
        rows,
    )


def draw_frontier(report: Report) -> Figure | None:
    """Bits of the compressed tensors and the metric at the end; None for fewer than two codecs."""
    metric = report.settings.metric
    traces, rows, said = [], [], []
    for index, (codec, results) in enumerate(report.by_codec().items()):
        series = Series(codec, results)
        if series.bits is None or not series.finals:
            continue
        mean = sum(series.finals) / len(series.finals)
        spread = [metric.scale * (edge - mean) for edge in (max(series.finals), min(series.finals))]
        error = {"type": "data", "symmetric": False, "array": [spread[0]]}
        error["arrayminus"] = [-spread[1]]
        look = {"mode": "markers", "marker": {"size": 11}, "error_y": error}
        traces.append(line(index, codec, True, [series.bits], [metric.scale * mean], **look))
        rows.append((codec, len(series.finals), f"{series.bits:.4g}", metric.text(mean)))
        said.append(f"{codec}: {series.bits:.3g} bits, {metric.text(mean)}")
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
