"""Combines the measurements of all ranks: a table for people, JSON for programs.

Times. *Measured*: the training clock (loop.py) on links of the given bandwidth, or on the network
that is there. *Modelled*: the links could not be shaped, so the run went over loopback, and its
time on the wire is replaced by the bytes divided by the bandwidth:

    modelled = max over ranks (seconds - wire_seconds)
             + max over ranks (max(bytes sent, bytes received)) * 8 / bandwidth

The ranks are workers and servers. wire_seconds is how long a rank waited for messages; the rank
that waited least computed longest, hence the maximum. The model takes links as full duplex and
assumes that nothing overlaps. Plain DDP tells neither how long it waited (0 is subtracted) nor what
it sent: 2 (N - 1) / N * 4 bytes a parameter and step are assumed, as of a ring all-reduce. The
bytes are those of our packets. With the headers of Ethernet, IP and TCP a real link takes 5 %
longer (measured next to shaped links at 10 Mbit/s: raw 19.2 s modelled, 20.3 s on the links).

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
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradwire.train.network import Bytes
from gradwire.train.records import RankRecord
from gradwire.train.settings import PLAIN_DDP, SERVED, TrainSettings, format_bandwidth, is_cuda


@dataclass(frozen=True)
class Conditions:
    """The links of a run. shaped: they were limited to settings.bandwidth. note: for the user, why
    they were not. modelled: they were not, although a bandwidth was given."""

    shaped: bool
    modelled: bool
    note: str = ""


@dataclass(frozen=True)
class CodecResult:
    """One codec's run. Bytes are the mean of all workers, None if unknown (plain DDP) or if
    nothing was sent (one worker). Lists over steps are means of all workers."""

    codec: str
    accuracy: float
    seconds: float
    measured_seconds: float
    speedup: float  # over the first codec
    push_bytes: float | None
    pull_bytes: float | None
    push_bits_per_value: float | None
    pull_bits_per_value: float | None
    ratio: float | None
    link: Bytes | None
    replicas_identical: bool
    evaluations: list[dict[str, float]]
    loss: list[float]
    push_bits: list[float]
    pull_bits: list[float]
    hook_of_rank: list[dict[str, Any] | None]  # the servers come last
    device_of_worker: list[str]


@dataclass(frozen=True)
class Report:
    settings: TrainSettings
    parameters: int
    conditions: Conditions
    results: list[CodecResult]

    def to_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Plain values. machine: a description of the machine and of the build."""
        bandwidth = format_bandwidth(self.settings.bandwidth)
        return {
            "kind": "gradwire-train",
            "machine": machine,
            "settings": self.settings.to_json(),
            "parameters": self.parameters,
            "times": "modelled" if self.conditions.modelled else "measured",
            "links": {"bandwidth": bandwidth, **asdict(self.conditions)},
            "results": [asdict(result) for result in self.results],
        }


def assemble(
    settings: TrainSettings,
    parameters: int,
    conditions: Conditions,
    records: Sequence[Sequence[RankRecord]],
) -> Report:
    """records: for each codec the records of all ranks, in order."""
    results = [_result(settings, parameters, conditions, ranks) for ranks in records]
    first = results[0].seconds
    results = [replace(result, speedup=first / result.seconds) for result in results]
    return Report(settings, parameters, conditions, results)


def model_seconds(settings: TrainSettings, parameters: int, ranks: Sequence[RankRecord]) -> float:
    """The formula at the top of this file."""
    assert settings.bandwidth is not None
    busy, volume = 0.0, 0.0
    for record in ranks:
        if (hook := record.hook) is not None:
            busy = max(busy, record.seconds - hook["wire_seconds"])
            sent = hook["push_bytes"] + hook["pull_bytes"], hook.get("received_bytes", 0)
            if "role" in hook:  # with servers: one of the two is sent, the other received
                sent = hook["push_bytes"], hook["pull_bytes"]
            volume = max(volume, *sent)
        elif record.codec == PLAIN_DDP and not settings.is_server(record.rank):
            busy = max(busy, record.seconds)
            values = _pushed_values(settings, parameters, record.codec)
            volume = max(volume, 2 * 4.0 * values * settings.steps)
    return busy + volume * 8 / settings.bandwidth


def _pushed_values(settings: TrainSettings, parameters: int, codec: str) -> float:
    """How many values a worker pushes in a step; it pulls as many. Without servers, a rank does not
    push the values that it owns."""
    if settings.exchange in SERVED and codec != PLAIN_DDP:
        return parameters
    return parameters * (settings.workers - 1) / settings.workers


def _result(
    settings: TrainSettings, parameters: int, conditions: Conditions, ranks: Sequence[RankRecord]
) -> CodecResult:
    codec, workers = ranks[0].codec, ranks[: settings.worker_ranks]
    seconds = measured = max(record.seconds for record in workers)
    if conditions.modelled:
        seconds = model_seconds(settings, parameters, ranks)
    values = _pushed_values(settings, parameters, codec)
    plain = 4.0 * values * settings.steps  # bytes that a worker would push without compression
    hooks = [record.hook for record in workers if record.hook is not None]
    push = pull = push_bits = pull_bits = ratio = None
    if hooks and plain > 0:
        push = fmean([hook["push_bytes"] for hook in hooks])
        pull = fmean([hook["pull_bytes"] for hook in hooks])
        push_bits, pull_bits = 32 * push / plain, 32 * pull / plain
        beside = fmean([hook["control_bytes"] for hook in hooks])
        ratio = 2 * plain / (push + pull + beside)
    links = [record.link for record in workers if record.link is not None]
    return CodecResult(
        codec=codec,
        accuracy=ranks[0].evaluations[-1].accuracy,
        seconds=seconds,
        measured_seconds=measured,
        speedup=1.0,
        push_bytes=push,
        pull_bytes=pull,
        push_bits_per_value=push_bits,
        pull_bits_per_value=pull_bits,
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
    """The mean of each step over the ranks that took it."""
    steps = zip(*ranks, strict=True)
    return [fmean([value for value in step if value is not None]) for step in steps]


def _bits_of_steps(ranks: Sequence[Sequence[float | None]], values: float) -> list[float]:
    """Bits a value of each step from the bytes that each rank sent in it."""
    return [8 * mean / values for mean in _means_of_steps(ranks)] if values else []


# The table


def table(report: Report) -> Table:
    """Fits into 80 columns. Bytes in megabytes (10^6)."""
    columns: dict[str, Callable[[CodecResult], str]] = {
        "codec": lambda result: result.codec,
        "test\naccuracy": lambda result: f"{result.accuracy:.2%}",
        f"{'modelled' if report.conditions.modelled else 'wall'}\nseconds": (
            lambda result: f"{result.seconds:.1f}"
        ),
        "speed-\nup": lambda result: f"{result.speedup:.2f}",
        "pushed\nMB": lambda result: _megabytes(result.push_bytes),
        "pulled\nMB": lambda result: _megabytes(result.pull_bytes),
        "bits\npush": lambda result: _number(result.push_bits_per_value),
        "bits\npull": lambda result: _number(result.pull_bits_per_value),
        "\nratio": lambda result: _number(result.ratio),
    }
    if _has_links(report):
        columns["link\nMB"] = lambda result: _megabytes(result.link.sent if result.link else None)
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for title in columns:
        shown.add_column(title, justify="left" if title == "codec" else "right", no_wrap=True)
    for result in report.results:
        shown.add_row(*(Text(cell(result)) for cell in columns.values()))
    return shown


def footnotes(report: Report) -> list[str]:
    """Notes that a reader of the table needs."""
    served = report.settings.exchange in SERVED
    notes = [
        f"MB: what a worker sent{' (pulled: received)' * served}, mean of all. bits: of a value. "
        "ratio: float32 bytes / bytes sent, all inclusive."
        + " link: what its network interface counted, with every header."
        * _has_links(report)
    ]
    notes += _devices(report)
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
    different = [result.codec for result in report.results if not result.replicas_identical]
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


def _servers(settings: TrainSettings, result: CodecResult) -> str | None:
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


def _has_links(report: Report) -> bool:
    return any(result.link is not None for result in report.results)


def _megabytes(count: float | None) -> str:
    return "-" if count is None else _number(count / 1e6)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    places = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"
