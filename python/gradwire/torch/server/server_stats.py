"""Counters of one rank of a ServerOptimizer, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire._core import Layout
from gradwire.torch.server.barrier import PartTimes
from gradwire.torch.server.server_link import ServerLink
from gradwire.torch.server.server_loop import Serving
from gradwire.torch.server.worker_loop import Working
from gradwire.torch.stats import (
    OutgrownResidual,
    RawTensor,
    bits,
    raw_tensors_of,
    table,
    times_less,
)


@dataclass(frozen=True)
class ServerStats:
    """Counters of one rank. Bytes are those that the rank itself sent or received."""

    role: str  # "worker" or "server"
    codec: str
    workers: int
    servers: int
    version: int  # of the model here: the lowest, if the servers' numbers differ
    steps: int  # a worker's pushes; a server's versions, including the one under way
    # No rank applied them, because they were not finite; with barrier="tensor", each part of a
    # version is applied or skipped alone, and counts.
    skipped_versions: int
    push_bytes: int  # a worker sent, a server received
    pull_bytes: int  # a server sent, a worker received
    control_bytes: int  # other bytes sent: the model at the beginning and end, options, lengths
    compressed_bits_push: float | None  # of a value that a worker pushes, without headers and raw
    compressed_bits_pull: float | None  # tensors; of a value of a server's pulls
    values: int  # of the model (worker), of the tensors here (server)
    ratio: float | None  # raw bytes of these pushes and pulls / their bytes; None: none yet
    dropped_pushes: dict[int, int]  # server: too late, by worker. Worker: not made, by server
    lost_workers: tuple[int, ...]  # on a server: workers that are gone without having left
    joined_workers: tuple[int, ...]  # on a server: lost ones whose places others took, in order
    models_sent: int  # by a server, to workers that lacked more versions than are kept
    encode_seconds: float
    wire_seconds: float  # the wait for messages, which includes the computation of other ranks
    decode_seconds: float
    # A worker's last step of which all is known, with barrier="tensor"; else empty.
    timeline: tuple[PartTimes, ...]
    raw_tensors: tuple[RawTensor, ...]
    outgrown_residuals: tuple[OutgrownResidual, ...]  # of this rank, each tensor once
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> str:
        """A table as text."""
        rows = [
            ("role", f"{self.role}, {self.workers} workers and {self.servers} servers"),
            ("codec", self.codec),
            ("version", f"{self.version} ({self.skipped_versions} not finite)"),
            ("steps", str(self.steps)),
            ("values", f"{self.values:,}"),
            ("pushed", f"{self.push_bytes:,} bytes"),
            ("pulled", f"{self.pull_bytes:,} bytes"),
            ("beside", f"{self.control_bytes:,} bytes (model, options, lengths)"),
            ("ratio", times_less(self.ratio)),
            ("encode", f"{self.encode_seconds:.3f} s"),
            ("wire", f"{self.wire_seconds:.3f} s"),
            ("decode", f"{self.decode_seconds:.3f} s"),
        ]
        for rank, count in self.dropped_pushes.items():
            if count and self.role == "server":
                rows.append(("dropped", f"{count} pushes of rank {rank}, too late"))
            elif count:
                rows.append(("held back", f"{count} pushes for rank {rank}, which was ahead"))
        for worker in self.lost_workers:
            rows.append(("lost", f"rank {worker}"))
        for worker in self.joined_workers:
            rows.append(("joined", f"another process, in the place of rank {worker}"))
        if self.models_sent:
            rows.append(
                ("behind", f"{self.models_sent} times the model, for versions kept no more")
            )
        return table(rows, self.raw_tensors, self.remarks)

    __str__ = report


def summarize(
    side: Serving | Working,
    link: ServerLink | None,
    layout: Layout,
    *,
    version: int,
    timeline: Sequence[PartTimes],
    remarks: tuple[str, ...],
) -> ServerStats:
    """`remarks`: beside those that follow from the counters."""
    counted = side.counters()
    outgrown = side.outgrown_residuals()
    push_bytes, pull_bytes, *values = (counted[name] for name in side.moved)
    sent = 0 if link is None else link.sent_bytes
    return ServerStats(
        role=side.role,
        codec=side.settings.text(),
        workers=side.settings.workers,
        servers=side.settings.servers,
        version=version,
        steps=counted["steps"],
        skipped_versions=counted["non_finite_steps"],
        push_bytes=push_bytes,
        pull_bytes=pull_bytes,
        control_bytes=sent - counted["push_bytes"] - counted["pull_bytes"],
        compressed_bits_push=bits(
            counted["push_payload_bytes"], counted["values_pushed_compressed"]
        ),
        compressed_bits_pull=bits(
            counted["pull_payload_bytes"], counted["values_pulled_compressed"]
        ),
        values=sum(part.numel for part in side.parts.values()),
        ratio=_ratio(push_bytes + pull_bytes, sum(values)),
        dropped_pushes=side.dropped_pushes(),
        lost_workers=tuple(sorted(side.lost)),
        joined_workers=tuple(side.joined),
        models_sent=side.models,
        encode_seconds=counted["encode_seconds"],
        wire_seconds=0.0 if link is None else link.wire_seconds,
        decode_seconds=counted["decode_seconds"],
        timeline=tuple(timeline),
        raw_tensors=raw_tensors_of([layout]),
        outgrown_residuals=tuple(outgrown),
        remarks=(*(found.describe() for found in outgrown), *remarks),
    )


def scalars_between(
    before: dict[str, Any], now: dict[str, Any], moved: Sequence[str]
) -> dict[str, float | None]:
    """The names and numbers of LiveScalars.scalars for a step that began with the counters `before`
    and ended with `now`; empty counters are zeros. moved: see Side."""
    seconds = [f"{what}_seconds" for what in ("encode", "decode", "wire")]
    of_step = {name: now.get(name, 0) - before.get(name, 0) for name in (*moved, *seconds)}
    push_bytes, pull_bytes, pushed, pulled = (of_step[name] for name in moved)
    total = [now.get(name, 0) for name in moved]
    return {
        "push_bits": bits(push_bytes, pushed),
        "pull_bits": bits(pull_bytes, pulled),
        "push_bytes": push_bytes,
        "pull_bytes": pull_bytes,
        **{name: of_step[name] for name in seconds},
        "skipped_steps_total": now.get("non_finite_steps", 0),
        "ratio": _ratio(sum(total[:2]), sum(total[2:])),
    }


def _ratio(moved: int, values: int) -> float | None:
    """Of the values' bytes as float32 to these bytes."""
    return 4 * values / moved if moved else None
