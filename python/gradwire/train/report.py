"""Combines the measurements of all ranks: a table for people, JSON for programs.

Times. *Measured*: the training clock (loop.py) on links of the given bandwidth, or on the network
that is there. *Modelled*: the links could not be shaped, so the run went over loopback, and its
time on the wire is replaced by the bytes divided by the bandwidth:

    modelled = max over ranks (seconds - wire_seconds)
             + max over ranks (max(bytes sent, bytes received)) * 8 / bandwidth

The ranks are workers and servers. wire_seconds is how long a rank waited for messages; the rank
that waited least computed longest, hence the maximum. The model takes links as full duplex and
assumes that nothing overlaps. DDP and its hooks tell neither how long they waited (0 is subtracted)
nor what they sent: torch_ddp.py computes it. The bytes are those of our packets. With the headers
of Ethernet, IP and TCP a real link takes 5 % longer (measured next to shaped links at 10 Mbit/s:
raw 19.2 s modelled, 20.3 s on the links).

Bytes. Pushed and pulled: bytes that a worker (mean of all) sent of gradients and of results, in
whole packets with headers and raw tensors. By symmetry it receives as many. Uncompressed, each of
the two is 4 (N - 1) / N bytes a parameter and step. Bits a value and ratio compare with that,
whichever tensors went raw. With servers, pulled is the bytes that a worker received, and each of
the two is 4 bytes a parameter and step. The ratio also counts the few bytes sent beside the
packets. Link: bytes that the worker's own network interface counted, with Ethernet, IP and TCP
headers, acknowledgements and DDP's own messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradwire.train.network import Bytes
from gradwire.train.recipes import Metric
from gradwire.train.records import RankRecord
from gradwire.train.rivals import is_rival
from gradwire.train.settings import (
    SERVER,
    TrainSettings,
    format_bandwidth,
    is_cuda,
)


@dataclass(frozen=True)
class Conditions:
    """The links of a run. shaped: they were limited to settings.bandwidth. note: for the user, why
    they were not. modelled: they were not, although a bandwidth was given."""

    shaped: bool
    modelled: bool
    note: str = ""


@dataclass(frozen=True)
class RunResult:
    """One run. Bytes are the mean of all workers, None if nothing was sent (one
    worker). Lists over steps are means of all workers. final: the metric at the end;
    None: the run diverged, in the step `diverged`."""

    codec: str
    seed: int
    final: float | None
    diverged: int | None
    seconds: float
    measured_seconds: float
    push_bytes: float | None
    pull_bytes: float | None
    push_bits_per_value: float | None
    pull_bits_per_value: float | None
    push_payload_bits: float | None
    pull_payload_bits: float | None
    ratio: float | None
    link: Bytes | None
    replicas_identical: bool
    evaluations: list[dict[str, float]]
    loss: list[float]
    push_bits: list[float]
    pull_bits: list[float]
    hook_of_rank: list[dict[str, Any] | None]  # the servers come last
    device_of_worker: list[str]

    @staticmethod
    def read(values: dict[str, Any]) -> RunResult:
        """The result that was written as plain values. Raises TypeError, KeyError."""
        link = None if values["link"] is None else Bytes(**values["link"])
        names = {field.name for field in fields(RunResult)}
        return RunResult(**{k: v for k, v in values.items() if k in names} | {"link": link})


@dataclass(frozen=True)
class Report:
    """data: a description of the data set."""

    settings: TrainSettings
    parameters: int
    data: str
    conditions: Conditions
    results: list[RunResult]

    def by_codec(self) -> dict[str, list[RunResult]]:
        """The results of each codec, a seed after the other."""
        return {
            codec: [result for result in self.results if result.codec == codec]
            for codec in dict.fromkeys(result.codec for result in self.results)
        }

    def speedup(self, codec: str) -> float | None:
        """Over the first codec; both as the mean of the runs that did not diverge."""
        first, own = (
            mean_of(self.by_codec()[name], lambda result: result.seconds)
            for name in (self.results[0].codec, codec)
        )
        return first / own if first and own else None

    @property
    def goal(self) -> float | None:
        """settings.until, or else what is just worse (Metric.near) than the first codec at its
        end, the mean of the runs that did not diverge. None: all of them did, or there is no other
        codec."""
        if self.settings.until is not None:
            return self.settings.until
        if len(self.by_codec()) == 1:
            return None
        first = mean_of(self.by_codec()[self.results[0].codec], lambda result: result.final)
        return None if first is None else self.settings.metric.near(first)

    def time_to_goal(self, result: RunResult) -> float | None:
        """Seconds of training until the first evaluation that reached the goal; None: none did."""
        metric, goal = self.settings.metric, self.goal
        reached = (e["seconds"] for e in result.evaluations if metric.reached(e["value"], goal))
        return next(reached, None)

    def to_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Plain values. machine: a description of the machine and of the build."""
        bandwidth = format_bandwidth(self.settings.bandwidth)
        return {
            "kind": "gradwire-train",
            "machine": machine,
            "settings": self.settings.to_json(),
            "parameters": self.parameters,
            "data": self.data,
            "metric": self.settings.metric.name,
            "times": "modelled" if self.conditions.modelled else "measured",
            "links": {"bandwidth": bandwidth, **asdict(self.conditions)},
            "goal": self.goal,
            "results": [
                asdict(result)
                | {
                    "speedup": self.speedup(result.codec),
                    "seconds_to_goal": self.time_to_goal(result),
                }
                for result in self.results
            ],
        }


def finished(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs that did not diverge."""
    return [result for result in results if result.final is not None]


def mean_of(
    results: Sequence[RunResult], number: Callable[[RunResult], float | None]
) -> float | None:
    """The mean over the runs that did not diverge; None if there is none, or no such number."""
    numbers = [n for result in finished(results) if (n := number(result)) is not None]
    return fmean(numbers) if numbers else None


def steps_of(ranks: Sequence[RankRecord]) -> int:
    """The steps that a run took."""
    return len(ranks[0].losses)


def model_seconds(settings: TrainSettings, parameters: int, ranks: Sequence[RankRecord]) -> float:
    """The formula at the top of this file."""
    assert settings.bandwidth is not None
    busy, volume = 0.0, 0.0
    for record in ranks:
        if (hook := record.hook) is not None:
            busy = max(busy, record.seconds - hook.get("wire_seconds", 0.0))
            sent = hook["push_bytes"] + hook["pull_bytes"], hook.get("received_bytes", 0)
            if "role" in hook:  # with servers: one of the two is sent, the other received
                sent = hook["push_bytes"], hook["pull_bytes"]
            volume = max(volume, *sent)
    return busy + volume * 8 / settings.bandwidth


def _pushed_values(settings: TrainSettings, parameters: int, codec: str) -> float:
    """How many values a worker pushes in a step; it pulls as many. Without servers, a rank does not
    push the values that it owns."""
    if settings.is_simulated or (settings.exchange == SERVER and not is_rival(codec)):
        return parameters
    return parameters * (settings.workers - 1) / settings.workers


def result_of(
    settings: TrainSettings, parameters: int, conditions: Conditions, ranks: Sequence[RankRecord]
) -> RunResult:
    """ranks: the records of a run, in order."""
    codec, workers = ranks[0].codec, ranks[: settings.worker_ranks]
    seconds = measured = max(record.seconds for record in workers)
    if conditions.modelled:
        seconds = model_seconds(settings, parameters, ranks)
    values = _pushed_values(settings, parameters, codec)
    plain = 4.0 * values * steps_of(ranks)  # bytes that a worker would push without compression
    hooks = [record.hook for record in workers if record.hook is not None]
    push = pull = push_bits = pull_bits = ratio = None
    payloads: list[float | None] = [None, None]
    if hooks and plain > 0:
        push = fmean([hook["push_bytes"] for hook in hooks])
        pull = fmean([hook["pull_bytes"] for hook in hooks])
        push_bits, pull_bits = 32 * push / plain, 32 * pull / plain
        beside = fmean([hook["control_bytes"] for hook in hooks])
        ratio = 2 * plain / (push + pull + beside)
        if "compressed_values" in hooks[0]:
            coded = steps_of(ranks) * hooks[0]["compressed_values"]
            payloads = [8 * hooks[0][f"{leg}_payload_bytes"] / coded for leg in ("push", "pull")]
    links = [record.link for record in workers if record.link is not None]
    diverged, last = ranks[0].diverged, ranks[0].evaluations[-1:]
    return RunResult(
        codec=codec,
        seed=ranks[0].seed,
        final=last[0].value if last and diverged is None else None,
        diverged=diverged,
        seconds=seconds,
        measured_seconds=measured,
        push_bytes=push,
        pull_bytes=pull,
        push_bits_per_value=push_bits,
        pull_bits_per_value=pull_bits,
        push_payload_bits=payloads[0],
        pull_payload_bits=payloads[1],
        ratio=ratio,
        link=Bytes.mean(links) if links else None,
        replicas_identical=len({record.parameters_digest for record in workers}) == 1,
        evaluations=[
            asdict(e) | {"seconds": e.seconds * seconds / measured} for e in ranks[0].evaluations
        ],
        loss=_means_of_steps([record.losses for record in workers]),
        push_bits=_bits_of_steps([record.push_bytes for record in workers], values),
        pull_bits=_bits_of_steps([record.pull_bytes for record in workers], values),
        hook_of_rank=[record.hook for record in ranks],
        device_of_worker=[record.device for record in workers],
    )


def _means_of_steps(ranks: Sequence[Sequence[float | None]]) -> list[float]:
    """The mean of each step over the ranks that took it, up to a step that has no value."""
    steps = ([v for v in step if v is not None] for step in zip(*ranks, strict=True))
    return [fmean(values) for values in takewhile(bool, steps)]


def _bits_of_steps(ranks: Sequence[Sequence[float | None]], values: float) -> list[float]:
    """Bits a value of each step from the bytes that each rank sent in it."""
    return [8 * mean / values for mean in _means_of_steps(ranks)] if values else []


# The table

Results = Sequence[RunResult]  # of one codec


def table(report: Report) -> Table:
    """Fits into 80 columns. Bytes in megabytes (10^6)."""
    metric = report.settings.metric

    def mean(text: Callable[[float | None], str], number: Any) -> Callable[[Results], str]:
        return lambda results: text(mean_of(results, number))

    columns: dict[str, Callable[[Results], str]] = {
        "codec": lambda results: results[0].codec,
        metric.title.replace(" ", "\n"): lambda results: (
            "diverged"
            if (value := mean_of(results, lambda result: result.final)) is None
            else metric.text(value)
        ),
    }
    if report.settings.seeds > 1:
        columns["\n±"] = lambda results: _spread(metric, results)
    columns |= {
        f"{'modelled' if report.conditions.modelled else 'wall'}\nseconds": mean(
            lambda seconds: "-" if seconds is None else f"{seconds:.1f}", lambda r: r.seconds
        ),
        "speed-\nup": lambda results: _ratio(report.speedup(results[0].codec)),
    }
    if (goal := report.goal) is not None:
        columns[f"s to\n{metric.text(goal)}"] = lambda results: _time_to_goal(report, results)
    columns |= {
        "\nMB": mean(_megabytes, _sent_bytes),
        "bits\npush": mean(_number, lambda r: r.push_bits_per_value),
        "bits\npull": mean(_number, lambda r: r.pull_bits_per_value),
        "\nratio": mean(_number, lambda r: r.ratio),
    }
    if _has_links(report):
        columns["link\nMB"] = mean(_megabytes, lambda r: r.link.sent if r.link else None)
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for title in columns:
        shown.add_column(title, justify="left" if title == "codec" else "right", no_wrap=True)
    for results in report.by_codec().values():
        shown.add_row(*(Text(cell(results)) for cell in columns.values()))
    return shown


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
    if report.settings.seeds > 1:
        counts = {len(finished(results)) for results in report.by_codec().values()}
        of = "" if counts == {report.settings.seeds} else ", without those that diverged"
        notes.append(
            f"Means of {report.settings.seeds} seeds{of}; ±: half the distance from the lowest to "
            "the highest."
        )
    notes += _devices(report)
    computed = [codec for codec in report.by_codec() if is_rival(codec)]
    if computed and not report.settings.is_simulated:
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
    if report.settings.every > 1:
        notes.append(
            f"Exchanges take place every {report.settings.every} steps; bits and ratio are those "
            "of all steps."
        )
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
        notes.append("Parameters are bit-identical on all ranks after every run.")
    return notes


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
    servers = [hook for hook in result.hook_of_rank[settings.worker_ranks :] if hook is not None]
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


def _time_to_goal(report: Report, results: Results) -> str:
    """The mean time to the goal, if every run reached it."""
    times = [time for result in results if (time := report.time_to_goal(result)) is not None]
    return f"{fmean(times):.1f}" if len(times) == len(results) else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"
