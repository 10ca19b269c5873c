"""Pictures of where the time of the steps went, and of how far the links were used."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from statistics import fmean

from gradwire_lab.train.page.figure import (
    Figure,
    Trace,
    axis,
    group_size,
    grouped,
    label_of,
    line,
    means_of,
    measured_by_us,
)
from gradwire_lab.train.report import Report, RunResult
from gradwire_lab.train.settings import format_bandwidth

_NAMES = {
    "rest": "the rest: computation",
    "encode": "encoding",
    "decode": "decoding",
    "other": "gradwire's other work",
    "wire": "waiting for messages",
}
_GREY = 7  # among the colours of page.js
_POINTS = 60
_BESIDE = (
    "Where the exchange runs beside the backward pass (the DDP hook), its parts together may be "
    "longer than the step; the diamond is the whole step."
)


@dataclass(frozen=True)
class StepTime:
    """Where the mean step of a run went, in milliseconds: means of all workers. The parts of the
    exchange may run beside the computation; `rest` is what they leave of the step."""

    rest: float
    encode: float
    decode: float
    other: float
    wire: float
    whole: float


def step_time(result: RunResult) -> StepTime | None:
    """None: nobody measured the parts, or there is no step."""
    workers = [
        hook
        for hook in result.hook_of_rank
        if hook is not None and hook.get("role") != "server" and "wire_seconds" in hook
    ]
    if not workers or not result.loss or not measured_by_us(result.codec):
        return None

    def mean(name: str) -> float:
        return fmean([hook.get(name, 0.0) for hook in workers])

    encode, decode, wire = mean("encode_seconds"), mean("decode_seconds"), mean("wire_seconds")
    other = max(0.0, mean("own_seconds") - encode - decode)
    # Modelled times replace the wait by the time that the bytes take on the link.
    wire = max(0.0, wire + result.seconds - result.measured_seconds)
    rest = max(0.0, result.seconds - wire - encode - decode - other)
    scale = 1e3 / len(result.loss)
    return StepTime(*(scale * part for part in (rest, encode, decode, other, wire, result.seconds)))


def draw_time(report: Report) -> Figure | None:
    """A bar for each codec; None: no part was measured."""
    found = {label_of(report, result): step_time(result) for result in report.results}
    times = {label: time for label, time in found.items() if time is not None}
    if not times:
        return None
    labels, order = list(times), list(found)
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "meta": index,
            "x": [getattr(times[label], name) for label in labels],
            "y": labels,
        }
        for index, (name, title) in enumerate(_NAMES.items())
    ]
    without = {
        label: 1e3 * result.seconds / len(result.loss)
        for result in report.results
        if (label := label_of(report, result)) not in times and result.loss
    }
    if without:
        bar = {"type": "bar", "orientation": "h", "name": "not divided", "meta": _GREY}
        traces.append(bar | {"x": [*without.values()], "y": [*without]})
    whole: Trace = {"type": "scatter", "mode": "markers", "name": "the whole step", "meta": "ink"}
    whole |= {"marker": {"symbol": "diamond", "size": 10}, "y": labels}
    traces.append(whole | {"x": [times[label].whole for label in labels]})
    said = [
        f"{label}: {time.whole:.1f} ms, of which {time.wire:.1f} ms wait and "
        f"{time.encode + time.decode + time.other:.1f} ms are gradwire's own work"
        for label, time in times.items()
    ]
    said += [f"{label}: {length:.1f} ms, not divided" for label, length in without.items()]
    rows = [(label, *(f"{part:.2f}" for part in astuple(time))) for label, time in times.items()]
    rows += [(label, *"-----", f"{length:.2f}") for label, length in without.items()]
    return Figure(
        "Where the time of a step went",
        f"Means of all steps and workers, {report.times}. {'. '.join(said)}. {_BESIDE}",
        traces,
        {
            "barmode": "stack",
            "xaxis": axis("milliseconds a step"),
            "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": order},
            "height": 190 + 46 * len(order),
        },
        ("codec", *(part.name for part in fields(StepTime))),
        rows,
    )


def draw_steps(report: Report) -> list[Figure]:
    """For each run with such measurements, the time of its steps and of their parts."""
    shown = [r for r in report.results if r.step_ends and r.wire_seconds and r.own_seconds]
    return [_draw_steps(report, result) for result in shown]


def _draw_steps(report: Report, result: RunResult) -> Figure:
    lengths = [
        1e3 * (end - before)
        for before, end in zip([0.0, *result.step_ends], result.step_ends, strict=False)
    ]
    size = group_size(len(lengths), _POINTS)
    steps, whole = grouped(lengths, size)
    parts = {
        "waiting for messages": grouped([1e3 * s for s in result.wire_seconds], size)[1],
        "gradwire's own work": grouped([1e3 * s for s in result.own_seconds], size)[1],
    }
    traces = [line(0, "the whole step", True, steps, whole, meta="ink")]
    for index, (name, values) in zip((4, 3), parts.items(), strict=True):
        traces.append(line(index, name, True, steps, values, fill="tozeroy"))
    wait, own = parts.values()
    longest = max(range(len(whole)), key=whole.__getitem__)
    measured = " The wait and the work are those on the links that were there."
    return Figure(
        f"Time of the steps, {label_of(report, result)}",
        f"Steps take {fmean(lengths):.1f} ms in the mean; the longest group, up to step "
        f"{steps[longest]}, {whole[longest]:.1f} ms.{means_of(size)}"
        + measured
        * report.conditions.modelled,
        traces,
        {"xaxis": axis("step"), "yaxis": axis("milliseconds", rangemode="tozero")},
        ("step", "whole (ms)", "wait (ms)", "own work (ms)"),
        [
            (step, *(f"{value:.2f}" for value in row))
            for step, *row in zip(steps, whole, wait, own, strict=True)
        ],
    )


def draw_links(report: Report) -> Figure | None:
    """What each worker's link carried, headers included; None: no link was counted."""
    found = [(label_of(report, r), r, r.link) for r in report.results if r.link is not None]
    if not found:
        return None
    rates = {
        way: [8e-6 * getattr(link, way) / run.measured_seconds for _, run, link in found]
        for way in ("sent", "received")
    }
    labels = [label for label, _, _ in found]
    traces: list[Trace] = [
        {"type": "bar", "orientation": "h", "name": way, "meta": index + 1, "x": rate, "y": labels}
        for index, (way, rate) in enumerate(rates.items())
    ]
    bandwidth = report.settings.bandwidth if report.conditions.shaped else None
    layout = {
        "barmode": "group",
        "xaxis": axis("megabits a second", rangemode="tozero"),
        "yaxis": {"autorange": "reversed"},
        "height": 190 + 56 * len(labels),
    }
    limit = ""
    if bandwidth is not None:
        place = {"x0": bandwidth / 1e6, "x1": bandwidth / 1e6, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [{"type": "line"} | place]
        limit = f" The line is the rate of the links, {format_bandwidth(bandwidth)}."
    rows, said = [], []
    for label, sent, received in zip(labels, *rates.values(), strict=True):
        share = "-" if bandwidth is None else f"{1e8 * max(sent, received) / bandwidth:.0f} %"
        rows.append((label, f"{sent:.3f}", f"{received:.3f}", share))
        said.append(f"{label}: {sent:.2f} sent" + (f", {share} of the link" if bandwidth else ""))
    return Figure(
        "Use of the links",
        "Megabits a second of a worker's link over the whole training, with the headers of "
        f"Ethernet, IP and TCP, mean of all workers. {'. '.join(said)}.{limit}",
        traces,
        layout,
        ("codec", "sent (Mbit/s)", "received (Mbit/s)", "of the link"),
        rows,
    )
