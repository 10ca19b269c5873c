"""What a rank's exchanges did: counted bucket by bucket, reported as `Stats`.

Bytes are those of whole packets, as the exchange counts them. Bits a value of pushes are 8 * push
bytes over the values pushed: a rank does not push the shard that it owns. Bits a value of pulls
count each pull packet once, because every peer gets the same one. So raw takes a little more than
32 bits a value, or than 16 for gradients of 16 bits. The ratio compares with raw in the gradients'
own dtype. Compressed bits are those of the payloads of tensors that do not go raw, so they are what
the budget of an `auto` codec limits.

Own seconds are the time of the exchanges, here and in their thread, without the wait for the wire.
They are measured by the clock, so on a busy machine they include the wait for a processor. Own CPU
seconds do not, and they leave out helper threads (`threads` above 1).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

from gradwire._core import Layout


@dataclass(frozen=True)
class OutgrownResidual:
    """A residual that was found with `factor` times the norm of its input, in step `step`. `limit`:
    the factor above which it is reported, smaller for residuals in bfloat16 (`in_bf16`)."""

    kind: str  # "push" or "pull"
    name: str
    step: int
    factor: float
    limit: float
    in_bf16: bool

    def describe(self) -> str:
        found = (
            f"the {self.kind} residual of {self.name} is {self.factor:.3g} times as large as its "
            f"input in step {self.step} (limit {self.limit:g}): "
        )
        if self.in_bf16:
            return found + (
                "rounding it to bfloat16 loses part of the input. Take residual=f32, or a codec "
                "that sends more"
            )
        return found + (
            "error feedback does not catch up, and what is sent is old. Take a codec that sends "
            "more (3lc with a smaller s, a larger ratio or density, int8), and give a gradient "
            "scaler to GradwireState (scaler=)"
        )


@dataclass(frozen=True)
class BucketTiming:
    """When one bucket was handed over, begun and done; seconds of `time.perf_counter`."""

    index: int
    queued: float
    started: float
    finished: float


@dataclass
class StepCounters:
    """One step of this rank, all buckets together."""

    step: int = -1
    raw: bool = False  # one of the first `start_iter` iterations
    skipped: bool = False  # a gradient was not finite
    push_bytes: int = 0
    pull_bytes: int = 0
    pull_packet_bytes: int = 0  # each pull packet once
    received_bytes: int = 0
    local_bytes: int = 0  # sent inside a machine
    control_bytes: int = 0  # sent beside the packets: length words, comparison of layouts
    raw_bytes: int = 0  # what the same pushes and pulls take in the gradients' own dtype
    values: int = 0  # in the buckets
    values_pushed: int = 0
    values_pulled: int = 0  # in the pull packets, each once
    push_payload_bytes: int = 0  # of the tensors that do not go raw, without headers
    pull_payload_bytes: int = 0
    values_pushed_compressed: int = 0
    values_pulled_compressed: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wire_seconds: float = 0.0
    own_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    setup_seconds: float = 0.0  # comparing layouts with the peers
    error_norm_sum: float = 0.0
    error_norm_samples: int = 0
    dtypes: set[str] = field(default_factory=set)  # of the gradients
    buckets: list[BucketTiming] = field(default_factory=list)

    def count(self, counted: dict[str, Any]) -> None:
        """Adds the entries that have the names of counters."""
        for name in counted.keys() & _SUMMED:
            setattr(self, name, getattr(self, name) + counted[name])

    @property
    def bits_per_value_push(self) -> float | None:
        return bits(self.push_bytes, self.values_pushed)

    @property
    def bits_per_value_pull(self) -> float | None:
        return bits(self.pull_packet_bytes, self.values_pulled)

    def summary(self) -> dict[str, Any]:
        """Bytes, bits a value (None: no value) and timings."""
        return {name: getattr(self, name) for name in _IN_SUMMARY} | {
            "push_bits_per_value": self.bits_per_value_push,
            "pull_bits_per_value": self.bits_per_value_pull,
            "buckets": list(self.buckets),
        }


_IN_SUMMARY = (
    *("step", "raw", "skipped", "push_bytes", "pull_bytes", "local_bytes", "control_bytes"),
    *("received_bytes", "wire_seconds", "own_seconds", "own_cpu_seconds"),
)

# The counters that a sum over steps adds up.
_SUMMED = {f.name for f in fields(StepCounters) if f.type in ("int", "float")} - {"step"}


@dataclass
class Totals(StepCounters):
    """The sum over all steps so far."""

    steps: int = 0
    raw_steps: int = 0
    skipped_steps: int = 0
    fastest: dict[bool, float] = field(default_factory=dict)  # least own + wire seconds; True: raw
    outgrown_residuals: list[OutgrownResidual] = field(default_factory=list)

    def add(self, step: StepCounters) -> None:
        self.count(vars(step))
        self.steps += 1
        self.raw_steps += step.raw
        self.skipped_steps += step.skipped
        self.dtypes |= step.dtypes
        seconds = step.own_seconds + step.wire_seconds
        self.fastest[step.raw] = min(seconds, self.fastest.get(step.raw, seconds))

    @property
    def sent_bytes(self) -> int:
        """All bytes but those sent inside a machine."""
        return self.push_bytes + self.pull_bytes + self.control_bytes

    @property
    def ratio(self) -> float | None:
        return self.raw_bytes / self.sent_bytes if self.raw_bytes else None

    @property
    def compressed_bits_push(self) -> float | None:
        return bits(self.push_payload_bytes, self.values_pushed_compressed)

    @property
    def compressed_bits_pull(self) -> float | None:
        return bits(self.pull_payload_bytes, self.values_pulled_compressed)

    @property
    def error_norm(self) -> float | None:
        samples = self.error_norm_samples
        return self.error_norm_sum / samples if samples else None


@dataclass(frozen=True)
class RawTensor:
    """A parameter that is sent uncompressed, and why."""

    name: str
    numel: int
    reason: str


@dataclass(frozen=True)
class ChosenCodec:
    """The codec that a tensor of an `auto` text has now, and what the last decision predicts of it.

    bits       a value
    error      norm of what a step leaves out / norm of its input
    decisions  how often the goal has been decided in this direction
    """

    goal: str
    direction: str
    tensor: str
    codec: str
    bits: float
    error: float
    decisions: int


@dataclass(frozen=True)
class TensorTraffic:
    """What this rank has encoded of a parameter of `numel` values, in all steps but those that go
    raw as a whole. Bytes are those of payloads, without headers. A pull counts once, whichever
    ranks get it; only the owner of the values encodes it."""

    name: str
    numel: int
    values_pushed: int
    push_payload_bytes: int
    values_pulled: int
    pull_payload_bytes: int

    def __add__(self, other: TensorTraffic) -> TensorTraffic:
        (name, numel, *counted), (_, _, *further) = astuple(self), astuple(other)
        return TensorTraffic(name, numel, *map(operator.add, counted, further))


@dataclass(frozen=True)
class Stats:
    """A summary for this rank. Bytes are those that it sent itself, unless noted otherwise."""

    codec: str
    world_size: int
    steps: int
    raw_steps: int
    skipped_steps: int
    push_bytes: int
    pull_bytes: int
    local_bytes: int  # inside a machine, of a hierarchical exchange
    control_bytes: int
    received_bytes: int
    values: int
    dtypes: tuple[str, ...]  # of the gradients
    ratio: float | None  # bytes in these dtypes / bytes sent between machines; None: none sent
    bits_per_value_push: float | None
    bits_per_value_pull: float | None
    compressed_bits_push: float | None  # of a value, without headers and raw tensors
    compressed_bits_pull: float | None
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    own_seconds: float
    own_cpu_seconds: float
    setup_seconds: float
    # Norm of what the pushes left out / norm of their input, both without raw tensors; the mean of
    # some steps.
    error_norm: float | None
    raw_tensors: tuple[RawTensor, ...]
    outgrown_residuals: tuple[OutgrownResidual, ...]  # each tensor once, when it was found
    remarks: tuple[str, ...]
    chosen: tuple[ChosenCodec, ...] = ()  # of `auto` codecs
    tensors: tuple[TensorTraffic, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self, above: Sequence[tuple[str, str]] = (), ratio: str = "") -> str:
        """Notes and a table as text. above: rows before all others. ratio: the text of that row."""
        per_step = 1e3 / self.steps if self.steps else 0.0
        error = "-" if self.error_norm is None else f"{self.error_norm:.4f} of the input"
        further = []
        if self.compressed_bits_push is not None or self.compressed_bits_pull is not None:
            pushed, pulled = _bits(self.compressed_bits_push), _bits(self.compressed_bits_pull)
            text = f"{pushed} pushed, {pulled} pulled (without headers and raw tensors)"
            further.append(("compressed", text))
        if self.local_bytes:
            further.append(("in machine", f"{self.local_bytes:,} bytes"))
        rows = [
            *above,
            ("codec", self.codec),
            ("steps", f"{self.steps} ({self.raw_steps} raw, {self.skipped_steps} not finite)"),
            ("values", f"{self.values:,} ({', '.join(self.dtypes) or 'none yet'})"),
            ("pushed", f"{self.push_bytes:,} bytes, {_bits(self.bits_per_value_push)}"),
            ("pulled", f"{self.pull_bytes:,} bytes, {_bits(self.bits_per_value_pull)}"),
            *further,
            ("beside", f"{self.control_bytes:,} bytes (lengths, comparison of layouts)"),
            ("received", f"{self.received_bytes:,} bytes"),
            ("ratio", ratio or times_less(self.ratio)),
            ("encode", f"{self.encode_seconds * per_step:.3f} ms a step"),
            ("wire", f"{self.wire_seconds * per_step:.3f} ms a step"),
            ("decode", f"{self.decode_seconds * per_step:.3f} ms a step"),
            (
                "own work",
                f"{self.own_seconds * per_step:.3f} ms a step, all but the wire "
                f"({self.own_cpu_seconds * per_step:.3f} ms of CPU)",
            ),
            ("error norm", error),
        ]
        return table(rows, self.raw_tensors, self.remarks) + _describe_chosen(self.chosen)

    __str__ = report


def sum_by_name(parts: Iterable[TensorTraffic]) -> tuple[TensorTraffic, ...]:
    """One entry for each tensor, in the order in which they first come."""
    sums: dict[str, TensorTraffic] = {}
    for part in parts:
        sums[part.name] = sums[part.name] + part if part.name in sums else part
    return tuple(sums.values())


def raw_tensors_of(layouts: Sequence[Layout]) -> tuple[RawTensor, ...]:
    """The tensors that go raw although another codec is set."""
    found: Counter[tuple[str, str]] = Counter()
    for layout in layouts:
        for segment in layout.segments:
            if segment["reason"]:
                found[segment["name"], segment["reason"]] += segment["numel"]
    return tuple(RawTensor(name, numel, reason) for (name, reason), numel in found.items())


def table(
    rows: Sequence[tuple[str, str]], raw_tensors: Sequence[RawTensor], remarks: Sequence[str]
) -> str:
    """The text of a report: remarks, labelled rows, then the raw tensors with the reasons."""
    lines = [f"note: {remark}" for remark in remarks]
    lines += [f"{label:<11}{text}" for label, text in rows]
    if raw_tensors:
        numel = sum(tensor.numel for tensor in raw_tensors)
        lines.append(f"{'raw':<11}{len(raw_tensors)} tensors, {numel:,} values:")
        lines += [f"  {t.name} ({t.numel:,}): {t.reason}" for t in raw_tensors]
    return "\n".join(lines)


def times_less(ratio: float | None) -> str:
    return "nothing sent" if ratio is None else f"{ratio:.2f} x less than raw"


def _describe_chosen(chosen: Sequence[ChosenCodec]) -> str:
    """A line for each goal and direction, then one for each tensor."""
    lines: list[str] = []
    for entry in chosen:
        head = f"{entry.goal}, {entry.direction}: decided {entry.decisions} times"
        if head not in lines:
            lines.append(head)
        lines.append(
            f"  {entry.tensor}: {entry.codec}, {_bits(entry.bits)}, error {entry.error:.3g}"
        )
    return "".join(f"\n{line}" for line in lines)


def summarize(totals: Totals, *, remarks: tuple[str, ...] = (), **told: Any) -> Stats:
    """remarks: beside those that follow from the counters. told: what these do not tell."""
    counted = {f.name: getattr(totals, f.name) for f in fields(Stats) if hasattr(totals, f.name)}
    counted["dtypes"] = tuple(sorted(totals.dtypes))
    counted["outgrown_residuals"] = tuple(totals.outgrown_residuals)
    return Stats(**counted, **told, remarks=(*_remarks(totals), *remarks))


def bits(num_bytes: float, values: float) -> float | None:
    """Bits a value, or None where there was no value."""
    return 8 * num_bytes / values if values else None


def _bits(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3f} bits a value"


def _remarks(totals: Totals) -> list[str]:
    compressed, raw = totals.fastest.get(False), totals.fastest.get(True)
    remarks = [found.describe() for found in totals.outgrown_residuals]
    if compressed is not None and 0 < totals.raw_bytes < totals.sent_bytes:
        remarks.append(
            f"compression does not pay: {totals.sent_bytes:,} bytes sent, raw would have been "
            f"{totals.raw_bytes:,}"
        )
    if compressed is not None and raw is not None and raw < compressed and totals.raw_bytes:
        remarks.append(
            f"compression does not pay on this network: own work and wire took "
            f"{compressed * 1e3:.3f} ms in the fastest step, the fastest raw iteration took "
            f"{raw * 1e3:.3f} ms"
        )
    return remarks
