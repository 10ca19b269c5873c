"""Combines the measurements of all ranks: JSON for programs. report_table.py shows it to people.

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
the two is 4 bytes a parameter and step. Without owners (broadcast), a worker pushes each parameter
N - 1 times and pulls nothing; the bits are those of a value once, the ratio compares with the same
bytes as elsewhere. The ratio also counts the few bytes sent beside the packets. Link: bytes that
the worker's own network interface counted, with Ethernet, IP and TCP headers, acknowledgements and
DDP's own messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import Any

from gradwire_lab.json_fields import FromJson
from gradwire_lab.train.network import Bytes
from gradwire_lab.train.records import MetricValue, RankRecord
from gradwire_lab.train.rivals import is_rival
from gradwire_lab.train.settings import HOOKED, Run, TrainSettings, format_bandwidth

_PLACES = 6  # of seconds in a file: a microsecond


@dataclass(frozen=True)
class Conditions:
    """The links of a run. shaped: they were limited to settings.bandwidth. note: for the user, why
    they were not. modelled: they were not, although a bandwidth was given."""

    shaped: bool
    modelled: bool
    note: str = ""


@dataclass(frozen=True)
class RunResult(FromJson):
    """One run. Bytes are the mean of all workers, None if nothing was sent (one
    worker). Lists over steps are means of all workers. final: the metric at the end;
    None: the run diverged, in the step `diverged`, or could not go on, for the reason `failed`.
    served: the metric of the servers' own model at the end, from which a worker's differs where
    pulls are compressed; None: no server has one, or nobody measured it."""

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
    evaluations: list[MetricValue]
    loss: list[float]
    push_bits: list[float]
    pull_bits: list[float]
    hook_of_rank: list[dict[str, Any] | None]  # the servers come last
    device_of_worker: list[str]
    failed: str = ""
    served: float | None = None
    lost_workers: list[str] = field(default_factory=list)  # without which it went on, and why
    # Of each step; empty where nobody measured it, and in older files. The end is what the training
    # clock shows, in `seconds`; the others are measured, whatever the links.
    step_ends: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.final is None and self.diverged is None and not self.failed:
            raise ValueError("`final` is null, and the run neither diverged nor failed")


@dataclass(frozen=True)
class Report(FromJson):
    """data: a description of the data set. init_sha256: the first digits, of the file of --init;
    empty: there is none, or the report is older than this field."""

    settings: TrainSettings
    parameters: int
    data: str
    conditions: Conditions
    results: list[RunResult]
    init_sha256: str = ""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Report:
        return super().read(values | {"conditions": values["links"]})

    def by_codec(self) -> dict[str, list[RunResult]]:
        """The results of each codec, a seed after the other."""
        return {
            codec: [result for result in self.results if result.codec == codec]
            for codec in dict.fromkeys(result.codec for result in self.results)
        }

    def lines(self) -> Iterator[tuple[int, RunResult, bool]]:
        """The number of a run's codec, the run, and whether it is the first of its codec."""
        for index, results in enumerate(self.by_codec().values()):
            for result in results:
                yield index, result, result is results[0]

    def label(self, result: RunResult) -> str:
        """The run's name where each has one."""
        alone = self.settings.seeds == 1
        return result.codec if alone else f"{result.codec}, seed {result.seed}"

    def speedup(self, codec: str) -> float | None:
        """Over the first codec; both as the mean of the finished runs."""
        first, own = (
            mean_of(self.by_codec()[name], lambda result: result.seconds)
            for name in (self.results[0].codec, codec)
        )
        return first / own if first and own else None

    @property
    def goal(self) -> float | None:
        """settings.until, or else what is just worse (Metric.near) than the first codec at its
        end, the mean of the finished runs. None: there is none, or no other codec."""
        if self.settings.until is not None:
            return self.settings.until
        if len(self.by_codec()) == 1:
            return None
        first = mean_of(self.by_codec()[self.results[0].codec], lambda result: result.final)
        return None if first is None else self.settings.metric.near(first)

    def time_to_goal(self, result: RunResult) -> float | None:
        """Seconds of training until the first evaluation that reached the goal; None: none did."""
        metric, goal = self.settings.metric, self.goal
        reached = (e.seconds for e in result.evaluations if metric.reached(e.value, goal))
        return next(reached, None)

    def mean_time_to_goal(self, codec: str) -> float | None:
        """None if a run of the codec did not reach the goal."""
        times = [self.time_to_goal(result) for result in self.by_codec()[codec]]
        reached = [time for time in times if time is not None]
        return fmean(reached) if len(reached) == len(times) else None

    @property
    def times(self) -> str:
        return "modelled" if self.conditions.modelled else "measured"

    @property
    def links(self) -> dict[str, Any]:
        bandwidth = format_bandwidth(self.settings.bandwidth)
        latency = {"latency_ms": self.settings.latency}
        return {"bandwidth": bandwidth, **latency, **asdict(self.conditions)}

    def to_json(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Plain values. machine: a description of the machine and of the build."""
        return {
            "kind": "gradwire-train",
            "machine": machine,
            "settings": self.settings.to_json(),
            "parameters": self.parameters,
            "data": self.data,
            "init_sha256": self.init_sha256,
            "metric": self.settings.metric.name,
            "times": self.times,
            "links": self.links,
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
    """The runs that went on to the end: they did not diverge or fail."""
    return [result for result in results if result.final is not None]


def mean_of(
    results: Sequence[RunResult], number: Callable[[RunResult], float | None]
) -> float | None:
    """The mean over the finished runs; None if there is none, or no such number."""
    numbers = [n for result in finished(results) if (n := number(result)) is not None]
    return fmean(numbers) if numbers else None


def model_seconds(settings: TrainSettings, ranks: Sequence[RankRecord]) -> float:
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


def _values_of_step(settings: TrainSettings, parameters: int) -> tuple[float, float]:
    """How many values a worker pushes in a step, and how many it would with owners; it pulls as
    many. Without servers, a rank does not push the values that it owns."""
    reduced = parameters * (settings.workers - 1) / settings.workers
    if is_rival(settings.codecs[0]):
        return reduced, reduced
    if settings.has_servers:
        return parameters, parameters
    hooked = HOOKED.get(settings.exchange.partition(":")[0])
    if hooked and not hooked["has_owners"]:  # all values to every other rank
        return parameters * (settings.workers - 1), reduced
    return reduced, reduced


def result_of(
    settings: TrainSettings,
    parameters: int,
    conditions: Conditions,
    ranks: Sequence[RankRecord],
    lost: Sequence[str] = (),
) -> RunResult:
    """ranks: the records of a run, in order; those of workers that were lost have no steps."""
    first, steps = ranks[0], len(ranks[0].losses)
    workers = [record for record in ranks[: settings.workers] if record.losses or not lost]
    seconds = measured = max(record.seconds for record in workers)
    if conditions.modelled:
        seconds = model_seconds(settings, ranks)
    own = settings.of_run(Run(first.codec, first.seed)).of_ranks()
    values, reduced = _values_of_step(own, parameters)
    # Bytes that a worker would push without compression.
    pushed, plain = 4.0 * values * steps, 4.0 * reduced * steps
    hooks = [record.hook for record in workers if record.hook is not None]
    push = pull = push_bits = pull_bits = ratio = push_payload = pull_payload = None
    if hooks and plain > 0:
        push, pull, beside = (
            fmean([hook[f"{name}_bytes"] for hook in hooks]) for name in ("push", "pull", "control")
        )
        push_bits, pull_bits = 32 * push / pushed, 32 * pull / pushed
        ratio = 2 * plain / (push + pull + beside)
        push_payload, pull_payload = (_payload_bits(ranks, leg) for leg in ("push", "pull"))
    links = [record.link for record in workers if record.link is not None]
    is_whole = bool(first.evaluations) and first.diverged is None and not first.failed

    def means(name: str) -> list[float]:
        """The mean of each step over the workers that took it, up to a step without a value."""
        each = zip(*(getattr(record, name) for record in workers), strict=True)
        taken = ([value for value in step if value is not None] for step in each)
        return [fmean(known) for known in takewhile(bool, taken)]

    def bits(name: str) -> list[float]:
        return [8 * mean / values for mean in means(name)] if values else []

    return RunResult(
        codec=first.codec,
        seed=first.seed,
        final=first.evaluations[-1].value if is_whole else None,
        diverged=first.diverged,
        seconds=seconds,
        measured_seconds=measured,
        push_bytes=push,
        pull_bytes=pull,
        push_bits_per_value=push_bits,
        pull_bits_per_value=pull_bits,
        push_payload_bits=push_payload,
        pull_payload_bits=pull_payload,
        ratio=ratio,
        link=Bytes.mean(links) if links else None,
        replicas_identical=len({record.parameters_digest for record in workers}) == 1,
        evaluations=[replace(e, seconds=e.seconds * seconds / measured) for e in first.evaluations],
        loss=means("losses"),
        push_bits=bits("push_bytes"),
        pull_bits=bits("pull_bytes"),
        hook_of_rank=[record.hook for record in ranks],
        device_of_worker=[record.device for record in workers],
        failed=first.failed,
        served=first.served,
        lost_workers=list(lost),
        step_ends=[round(end * seconds / measured, _PLACES) for end in means("step_ends")],
        wire_seconds=[round(mean, _PLACES) for mean in means("wire_seconds")],
        own_seconds=[round(mean, _PLACES) for mean in means("own_seconds")],
    )


def _payload_bits(ranks: Sequence[RankRecord], leg: str) -> float | None:
    """Bits of a value of the compressed tensors, over all steps: the mean of the ranks that encode
    them. None: nobody counted them."""
    found = [
        bits * min(1.0, hook["steps"] / len(ranks[0].losses))
        for record in ranks
        if (hook := record.hook) is not None
        if (bits := hook.get(f"compressed_bits_{leg}")) is not None
    ]
    return fmean(found) if found else None
