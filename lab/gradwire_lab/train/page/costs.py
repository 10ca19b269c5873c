"""Pictures of where the time of the steps went, and of how far the links were used."""

from __future__ import annotations

from statistics import fmean

from gradwire_lab.train.page.figure import (
    Figure,
    Trace,
    axis,
    bars,
    group_size,
    grouped,
    line,
    means_of,
)
from gradwire_lab.train.report import Report, RunResult
from gradwire_lab.train.rivals import is_rival
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


def step_time(result: RunResult) -> dict[str, float] | None:
    """Where the mean step of a run went, in milliseconds, by _NAMES and "whole": means of all
    workers. The parts of the exchange may run beside the computation; `rest` is what they leave of
    the step. None: nobody measured the parts, or there is no step."""
    workers = [
        hook
        for hook in result.hook_of_rank
        if hook is not None and hook.get("role") != "server" and "wire_seconds" in hook
    ]
    if not workers or not result.loss or is_rival(result.codec):
        return None

    def mean(name: str) -> float:
        return fmean([hook.get(f"{name}_seconds", 0.0) for hook in workers])

    parts = {"rest": 0.0, "encode": mean("encode"), "decode": mean("decode")}
    parts["other"] = max(0.0, mean("own") - sum(parts.values()))
    # Modelled times replace the wait by the time that the bytes take on the link.
    parts["wire"] = max(0.0, mean("wire") + result.seconds - result.measured_seconds)
    parts["rest"] = max(0.0, result.seconds - sum(parts.values()))
    scale = 1e3 / len(result.loss)
    return {name: scale * part for name, part in (parts | {"whole": result.seconds}).items()}


def draw_time(report: Report) -> Figure | None:
    """A bar for each codec; None: no part was measured."""
    found = {report.label(result): (result, step_time(result)) for result in report.results}
    times = {label: time for label, (_, time) in found.items() if time is not None}
    if not times:
        return None
    traces = [
        bars(index, title, [time[name] for time in times.values()], times)
        for index, (name, title) in enumerate(_NAMES.items())
    ]
    without = {
        label: 1e3 * result.seconds / len(result.loss)
        for label, (result, time) in found.items()
        if time is None and result.loss
    }
    if without:
        traces.append(bars(_GREY, "not divided", without.values(), without))
    whole: Trace = {"type": "scatter", "mode": "markers", "name": "the whole step", "meta": "ink"}
    whole |= {"marker": {"symbol": "diamond", "size": 10}, "y": list(times)}
    traces.append(whole | {"x": [time["whole"] for time in times.values()]})
    said = [
        f"{label}: {time['whole']:.1f} ms, of which {time['wire']:.1f} ms wait and "
        f"{time['encode'] + time['decode'] + time['other']:.1f} ms are gradwire's own work"
        for label, time in times.items()
    ]
    said += [f"{label}: {length:.1f} ms, not divided" for label, length in without.items()]
    columns = (*_NAMES, "whole")
    rows = [(label, *(f"{time[name]:.2f}" for name in columns)) for label, time in times.items()]
    rows += [(label, *"-----", f"{length:.2f}") for label, length in without.items()]
    order = list(found)
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
        ("codec", *columns),
        rows,
    )


def draw_steps(report: Report) -> list[Figure]:
    """For each run with such measurements, the time of its steps and of their parts."""
    shown = [r for r in report.results if r.step_ends and r.wire_seconds and r.own_seconds]
    return [_draw_steps(report, result) for result in shown]


def _draw_steps(report: Report, result: RunResult) -> Figure:
    ends = result.step_ends
    lengths = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
    size = group_size(len(lengths), _POINTS)
    whole, wait, own = (
        grouped([1e3 * s for s in seconds], size)[1]
        for seconds in (lengths, result.wire_seconds, result.own_seconds)
    )
    steps, _ = grouped(lengths, size)
    fill = {"fill": "tozeroy"}
    traces = [
        line(0, "the whole step", True, steps, whole, meta="ink"),
        line(4, "waiting for messages", True, steps, wait, **fill),
        line(3, "gradwire's own work", True, steps, own, **fill),
    ]
    longest = max(range(len(whole)), key=whole.__getitem__)
    measured = " The wait and the work are those on the links that were there."
    return Figure(
        f"Time of the steps, {report.label(result)}",
        f"Steps take {1e3 * fmean(lengths):.1f} ms in the mean; the longest group, up to step "
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
    found = {report.label(run): (run, run.link) for run in report.results if run.link is not None}
    if not found:
        return None
    rates = {
        way: [8e-6 * getattr(link, way) / run.measured_seconds for run, link in found.values()]
        for way in ("sent", "received")
    }
    traces = [bars(index, way, rate, found) for index, (way, rate) in enumerate(rates.items(), 1)]
    bandwidth = report.settings.bandwidth if report.conditions.shaped else None
    layout = {
        "barmode": "group",
        "xaxis": axis("megabits a second", rangemode="tozero"),
        "yaxis": {"autorange": "reversed"},
        "height": 190 + 56 * len(found),
    }
    limit = ""
    if bandwidth is not None:
        place = {"x0": bandwidth / 1e6, "x1": bandwidth / 1e6, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [{"type": "line"} | place]
        limit = f" The line is the rate of the links, {format_bandwidth(bandwidth)}."
    rows, said = [], []
    for label, sent, received in zip(found, *rates.values(), strict=True):
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
