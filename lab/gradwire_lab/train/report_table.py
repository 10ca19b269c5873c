"""The report of a training for people: a table and the notes below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from gradwire.errors import sends_coarsely
from gradwire.table import Table
from gradwire_lab.train.recipes import Metric
from gradwire_lab.train.report import Report, RunResult, finished, mean_of
from gradwire_lab.train.rivals import is_rival
from gradwire_lab.train.settings import (
    GRADIENTS,
    SGD,
    Run,
    TrainSettings,
    both_ways,
    format_bandwidth,
    is_cuda,
)

Results = Sequence[RunResult]  # of one codec


def columns(report: Report) -> dict[str, Callable[[Results], str]]:
    """The text of a codec's cell in each column. Bytes in megabytes (10^6)."""
    metric = report.settings.metric

    def mean(text: Callable[[float | None], str], number: Any) -> Callable[[Results], str]:
        return lambda results: text(mean_of(results, number))

    cells: dict[str, Callable[[Results], str]] = {
        "codec": lambda results: results[0].codec,
        metric.title: lambda results: (
            ("failed" if results[0].failed else "diverged")
            if (value := mean_of(results, lambda result: result.final)) is None
            else metric.text(value)
        ),
    }
    if report.settings.seeds > 1:
        cells["±"] = lambda results: _spread(metric, results)
    cells |= {
        f"{'modelled' if report.conditions.modelled else 'wall'} seconds": mean(
            _seconds, lambda r: r.seconds
        ),
        "speed-up": lambda results: _ratio(report.speedup(results[0].codec)),
    }
    if (goal := report.goal) is not None:
        cells[f"s to {metric.text(goal)}"] = lambda results: _seconds(
            report.mean_time_to_goal(results[0].codec)
        )
    cells |= {
        "MB": mean(_megabytes, _sent_bytes),
        "bits push": mean(_number, lambda r: r.push_bits_per_value),
        "bits pull": mean(_number, lambda r: r.pull_bits_per_value),
        "ratio": mean(_number, lambda r: r.ratio),
    }
    if _has_links(report):
        cells["link MB"] = mean(_megabytes, lambda r: r.link.sent if r.link else None)
    return cells


def table(report: Report) -> Table:
    cells = columns(report)
    rows = [[cell(results) for cell in cells.values()] for results in report.by_codec().values()]
    return Table(list(cells), rows, codecs=(0,))


def footnotes(report: Report) -> list[str]:
    """Notes that a reader of the table needs."""
    notes = [
        "MB: what a worker pushed and pulled, mean of all. bits: of a value. ratio: float32 bytes "
        "/ bytes sent, all inclusive."
        + " link: what its network interface sent, with every header."
        * _has_links(report)
    ]
    if report.goal is not None:
        notes.append(_goal_note(report, report.goal))
    notes += [
        f"{result.codec}, seed {result.seed}: DIVERGED in step {result.diverged} (a smaller --lr "
        f"may help, now {report.settings.learning_rate:g})."
        for result in report.results
        if result.diverged is not None
    ]
    notes += [
        f"{result.codec}, seed {result.seed}: FAILED: {result.failed}."
        for result in report.results
        if result.failed
    ]
    if report.settings.seeds > 1:
        counts = {len(finished(results)) for results in report.by_codec().values()}
        of = "" if counts == {report.settings.seeds} else ", without those that diverged or failed"
        notes.append(
            f"Means of {report.settings.seeds} seeds{of}; ±: half the distance from the lowest to "
            "the highest."
        )
    notes += _devices(report)
    computed = [codec for codec in report.by_codec() if is_rival(codec)]
    if computed and not report.settings.in_one_process:
        notes.append(
            f"{', '.join(computed)}: MB, bits and ratio are computed for a ring all-reduce of what "
            "PyTorch's hook sends."
        )
    if report.conditions.modelled:
        bandwidth = format_bandwidth(report.settings.bandwidth)
        notes.append(
            f"MODELLED times: the links were not shaped. Computation was measured over loopback, "
            f"the wire is bytes * 8 / {bandwidth}; nothing overlaps."
        )
    notes += [note for result in report.results if (note := _servers(report.settings, result))]
    notes += [
        f"{report.settings.title(Run(result.codec, result.seed))}: {why}; the run went on without "
        "it."
        for result in report.results
        for why in result.lost_workers
    ]
    if report.settings.every > 1:
        notes.append(
            f"Exchanges take place every {report.settings.every} steps; bits and ratio are those "
            "of all steps."
        )
    notes += _clipped_late(report)
    notes += dict.fromkeys(
        f"{result.codec}: {remark}."
        for result in report.results
        for rank in result.hook_of_rank
        for remark in (rank or {}).get("remarks", ())
    )
    different = dict.fromkeys(r.codec for r in report.results if not r.replicas_identical)
    if different:
        notes.append(f"REPLICAS DIFFER between the ranks after: {', '.join(different)}")
    elif report.settings.ranks > 1:
        but = ", but for those that failed" * any(result.failed for result in report.results)
        notes.append(f"Parameters are bit-identical on all ranks after every run{but}.")
    return notes


def _clipped_late(report: Report) -> list[str]:
    """Where the gradient is clipped after a codec that sends values rarely."""
    settings = report.settings
    if settings.clip == 0.0 or (settings.optimizer, settings.compress) != (SGD, GRADIENTS):
        return []
    coarse = [c for c in report.by_codec() if not is_rival(c) and sends_coarsely(both_ways(c)[0])]
    if not coarse:
        return []
    return [
        f"{', '.join(coarse)}: values that are sent late come together, so that what arrives has a "
        f"larger norm than the gradient, and --clip {settings.clip:g} after the exchange takes a "
        "part of it away for good (LeNet with --clip 1: 78.7 % instead of 83.9 %). Clip far above "
        "the usual norm, or give --compress updates, which are made of clipped gradients."
    ]


def _devices(report: Report) -> list[str]:
    """Which GPU each worker computed on; nothing for CPUs."""
    names = report.results[0].device_of_worker
    if not is_cuda(report.settings.device):
        return []
    workers = {name: [i for i, of in enumerate(names) if of == name] for name in names}
    places = [f"{name}: {report.settings.names(ranks)}" for name, ranks in workers.items()]
    shared = any(len(ranks) > 1 for ranks in workers.values())
    return [
        f"Computed on {'; '.join(places)}."
        + " Workers that share a GPU wait for each other's computation." * shared
    ]


def _servers(settings: TrainSettings, result: RunResult) -> str | None:
    """The servers' traffic, and the pushes that they dropped."""
    servers = [hook for hook in result.hook_of_rank[settings.workers :] if hook is not None]
    if not servers:
        return None
    received, sent = (
        _megabytes(fmean([hook[key] for hook in servers])) for key in ("push_bytes", "pull_bytes")
    )
    note = f"{result.codec}: a server received {received} MB and sent {sent} MB"
    dropped = {
        worker: sum(hook["dropped_pushes"][worker] for hook in servers)
        for worker in servers[0]["dropped_pushes"]
    }
    late = ", ".join(f"{count} of worker {worker}" for worker, count in dropped.items() if count)
    return f"{note}; pushes that came too late and were dropped: {late or 'none'}."


def _spread(metric: Metric, results: Results) -> str:
    values = [result.final for result in results if result.final is not None]
    return metric.text((max(values) - min(values)) / 2) if values else "-"


def _goal_note(report: Report, goal: float) -> str:
    """What the goal is, and how finely the time to it is known."""
    settings, metric = report.settings, report.settings.metric
    of = ""
    if settings.until is None:
        margin = f"{metric.scale * metric.margin:g} {'points' if metric.unit == '%' else 'nats'}"
        of = f", {margin} worse than {report.results[0].codec} at its end"
    note = (
        f"s to {metric.text(goal)}: seconds of training, evaluations not counted, until the "
        f"first evaluation (every {settings.eval_every} steps) that reached this{of}."
    )
    missing = [result.codec for result in report.results if report.time_to_goal(result) is None]
    if missing:
        note += f" Not reached by {', '.join(dict.fromkeys(missing))}."
    return note


def _has_links(report: Report) -> bool:
    """Whether the table has a column for links; beside that of the spread it has no room."""
    alone = report.settings.seeds == 1
    return alone and any(result.link is not None for result in report.results)


def _sent_bytes(result: RunResult) -> float | None:
    if result.push_bytes is None or result.pull_bytes is None:
        return None
    return result.push_bytes + result.pull_bytes


def _megabytes(count: float | None) -> str:
    return "-" if count is None else _number(count / 1e6)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"
