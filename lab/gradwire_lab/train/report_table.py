"""The report of a training for people: a table, the notes below it, and a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from statistics import fmean

from gradwire.errors import sends_coarsely
from gradwire.table import Table
from gradwire_lab.train.report import Report, RunResult, finished, mean_of
from gradwire_lab.train.rivals import is_rival
from gradwire_lab.train.settings import Run, TrainSettings, both_ways, format_bandwidth, is_cuda


def table(report: Report) -> Table:
    rows = [_row(report, results) for results in report.by_codec().values()]
    return Table(list(rows[0]), [list(row.values()) for row in rows], codecs=(0,))


def _row(report: Report, results: Sequence[RunResult]) -> dict[str, str]:
    """The cells of a codec, by their columns. Bytes in megabytes (10^6)."""
    metric, codec, goal = report.settings.metric, results[0].codec, report.goal

    def mean(name: str) -> float | None:
        return mean_of(results, attrgetter(name))

    final, pushed, pulled = mean("final"), mean("push_bytes"), mean("pull_bytes")
    broken = "failed" if results[0].failed else "diverged"
    row = {"codec": codec, metric.title: broken if final is None else metric.text(final)}
    if report.settings.seeds > 1:
        values = [result.final for result in finished(results) if result.final is not None]
        row["±"] = metric.text((max(values) - min(values)) / 2) if values else "-"
    times = "modelled" if report.conditions.modelled else "wall"
    row[f"{times} seconds"] = _number(mean("seconds"), places=1)
    row["speed-up"] = _number(report.speedup(codec), places=2)
    if goal is not None:
        row[f"s to {metric.text(goal)}"] = _number(report.mean_time_to_goal(codec), places=1)
    row["MB"] = "-" if pushed is None or pulled is None else _number((pushed + pulled) / 1e6)
    row |= {f"bits {leg}": _number(mean(f"{leg}_bits_per_value")) for leg in ("push", "pull")}
    row["ratio"] = _number(mean("ratio"))
    if _has_links(report):
        links = [result.link.sent for result in finished(results) if result.link is not None]
        row["link MB"] = _number(fmean(links) / 1e6 if links else None)
    return row


def footnotes(report: Report) -> list[str]:
    """Notes that a reader of the table needs; equal ones once."""
    return list(dict.fromkeys(_notes(report)))


def _notes(report: Report) -> Iterator[str]:
    settings, results, codecs = report.settings, report.results, list(report.by_codec())
    yield (
        "MB: what a worker pushed and pulled, mean of all. bits: of a value. ratio: float32 bytes "
        "/ bytes sent, all inclusive."
        + " link: what its network interface sent, with every header."
        * _has_links(report)
    )
    yield from _of_goal(report)
    for run in results:
        if run.diverged is not None:
            yield (
                f"{run.codec}, seed {run.seed}: DIVERGED in step {run.diverged} (a smaller --lr "
                f"may help, now {settings.learning_rate:g})."
            )
    yield from (f"{r.codec}, seed {r.seed}: FAILED: {r.failed}." for r in results if r.failed)
    if settings.seeds > 1:
        counts = Counter(result.codec for result in results)
        fewer = ", ".join(f"{c}: {count}" for c, count in counts.items() if count < settings.seeds)
        of = f" ({fewer})" if fewer else ""
        of += ", without those that diverged or failed" * (len(finished(results)) < len(results))
        yield (
            f"Means of {settings.seeds} seeds{of}; ±: half the distance from the lowest to the "
            "highest."
        )
    if is_cuda(settings.device):
        yield _devices(report)
    computed = ", ".join(filter(is_rival, codecs))
    if computed and not settings.in_one_process:
        yield (
            f"{computed}: MB, bits and ratio are computed for a ring all-reduce of what PyTorch's "
            "hook sends."
        )
    if report.conditions.modelled:
        yield (
            "MODELLED times: the links were not shaped. Computation was measured over loopback, "
            f"the wire is bytes * 8 / {format_bandwidth(settings.bandwidth)}; nothing overlaps."
        )
    for run in results:
        yield from _of_servers(settings, run)
    for run in results:
        title = settings.title(Run(run.codec, run.seed))
        yield from (f"{title}: {why}; the run went on without it." for why in run.lost_workers)
    if settings.every > 1:
        yield (
            f"Exchanges take place every {settings.every} steps; bits and ratio are those of all "
            "steps."
        )
    coarse = [c for c in codecs if not is_rival(c) and sends_coarsely(both_ways(c)[0])]
    if coarse and settings.clip and (settings.optimizer, settings.compress) == ("sgd", "gradients"):
        yield (
            f"{', '.join(coarse)}: values that are sent late come together, so that what arrives "
            f"has a larger norm than the gradient, and --clip {settings.clip:g} after the exchange "
            "takes a part of it away for good (LeNet with --clip 1: 78.7 % instead of 83.9 %). "
            "Clip far above the usual norm, or give --compress updates, which are made of clipped "
            "gradients."
        )
    yield from (
        f"{run.codec}: {remark}."
        for run in results
        for hook in run.hook_of_rank
        for remark in (hook or {}).get("remarks", ())
    )
    if different := dict.fromkeys(run.codec for run in results if not run.replicas_identical):
        yield f"REPLICAS DIFFER between the ranks after: {', '.join(different)}"
    elif settings.ranks > 1:
        but = ", but for those that failed" * any(run.failed for run in results)
        yield f"Parameters are bit-identical on all ranks after every run{but}."


def _of_goal(report: Report) -> Iterator[str]:
    """What the goal is, and how finely the time to it is known."""
    settings, metric = report.settings, report.settings.metric
    if report.goal is None:
        return
    of = ""
    if settings.until is None:
        margin = f"{metric.scale * metric.margin:g} {'points' if metric.unit == '%' else 'nats'}"
        of = f", {margin} worse than {report.results[0].codec} at its end"
    missing = dict.fromkeys(r.codec for r in report.results if report.time_to_goal(r) is None)
    yield (
        f"s to {metric.text(report.goal)}: seconds of training, evaluations not counted, until the "
        f"first evaluation (every {settings.eval_every} steps) that reached this{of}."
        + (f" Not reached by {', '.join(missing)}." if missing else "")
    )


def _devices(report: Report) -> str:
    workers: dict[str, list[int]] = {}
    for rank, name in enumerate(report.results[0].device_of_worker):
        workers.setdefault(name, []).append(rank)
    places = [f"{name}: {report.settings.names(ranks)}" for name, ranks in workers.items()]
    shared = any(len(ranks) > 1 for ranks in workers.values())
    waits = " Workers that share a GPU wait for each other's computation."
    return f"Computed on {'; '.join(places)}.{waits * shared}"


def _of_servers(settings: TrainSettings, result: RunResult) -> Iterator[str]:
    """The servers' traffic, and the pushes that they dropped."""
    servers = [hook for hook in result.hook_of_rank[settings.workers :] if hook is not None]
    if servers:
        received, sent = (
            _number(fmean([hook[f"{leg}_bytes"] for hook in servers]) / 1e6)
            for leg in ("push", "pull")
        )
        title = settings.title(Run(result.codec, result.seed))
        dropped = sum((Counter(hook["dropped_pushes"]) for hook in servers), Counter[str]())
        late = ", ".join(f"{count} of worker {worker}" for worker, count in dropped.items())
        yield (
            f"{title}: a server received {received} MB and sent {sent} MB; pushes that came "
            f"too late and were dropped: {late or 'none'}."
        )


def verdict(report: Report) -> str:
    """What came first to the goal, and with what it ended, next to the first codec, the baseline.
    Empty for a single codec, and for a baseline that came to no end."""
    by_codec = report.by_codec()
    first, *others = by_codec
    means = {codec: mean_of(of, attrgetter("final")) for codec, of in by_codec.items()}
    ends = {
        codec: report.settings.metric.text(end) for codec, end in means.items() if end is not None
    }
    if not others or report.goal is None or first not in ends:
        return ""
    goal = report.settings.metric.text(report.goal)
    times = {codec: time for codec in ends if (time := report.mean_time_to_goal(codec)) is not None}
    if not times:
        return f"None came to {goal}; {first} ended with {ends[first]}."
    fastest = min(times, key=times.__getitem__)
    modelled = " (modelled times)" * report.conditions.modelled
    came = f"{fastest} came to {goal} first, after {times[fastest]:.1f} s{modelled}"
    if fastest == first:
        rest = sorted((time, codec) for codec, time in times.items() if codec != first)
        next_one = f"; next came {rest[0][1]}, after {rest[0][0]:.1f} s" if rest else ""
        return (
            f"{came}, so compression did not pay here{next_one}. {first} ended with {ends[first]}."
        )
    before = f"where {first} did not come"
    if first in times:
        faster = times[first] / times[fastest]
        before = f"{faster:.1f} times as fast as {first} ({times[first]:.1f} s)"
    return f"{came}, {before}; it ended with {ends[fastest]}, {first} with {ends[first]}."


def _has_links(report: Report) -> bool:
    """Whether the table has a column for links; beside that of the spread it has no room."""
    alone = report.settings.seeds == 1
    return alone and any(result.link is not None for result in report.results)


def _number(value: float | None, places: int | None = None) -> str:
    """places: after the point; None: so many that three digits stand there, if it is small."""
    if value is None:
        return "-"
    if places is None:
        places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"
