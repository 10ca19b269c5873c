"""What one rank of a ServerOptimizer did, as numbers and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradwire._core import Layout, ServerExchange
from gradwire.torch.server_loop import Serving
from gradwire.torch.server_parts import ServerPart
from gradwire.torch.stats import RawTensor


@dataclass(frozen=True)
class ServerStats:
    """Bytes are those of this rank, where not said otherwise."""

    role: str  # "worker" or "server"
    codec: str
    workers: int
    servers: int
    version: int  # of the model here; the oldest of any server's tensors
    steps: int  # of a worker: pushes; of a server: versions it finished or has under way
    skipped_versions: int  # not finite, applied by nobody
    push_bytes: int  # a worker sent, a server received
    pull_bytes: int  # a server sent, a worker received
    control_bytes: int  # sent beside: the model at the beginning and end, options, lengths
    values: int  # of the model (worker), of the tensors here (server)
    ratio: float | None  # raw bytes of these pushes and pulls / their bytes; None: none yet
    dropped_pushes: dict[int, int]  # a server's: too late, by worker; a worker's: see its report
    lost_workers: tuple[int, ...]  # a server's: gone, and done without
    models_sent: int  # a server's: to workers that lacked more versions than are kept
    encode_seconds: float
    wire_seconds: float  # waited for messages, so also for what others compute
    decode_seconds: float
    raw_tensors: tuple[RawTensor, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> str:
        """A table for people."""
        ratio = "nothing yet" if self.ratio is None else f"{self.ratio:.2f} x less than raw"
        rows = [
            ("role", f"{self.role}, {self.workers} workers and {self.servers} servers"),
            ("codec", self.codec),
            ("version", f"{self.version} ({self.skipped_versions} not finite)"),
            ("steps", str(self.steps)),
            ("values", f"{self.values:,}"),
            ("pushed", f"{self.push_bytes:,} bytes"),
            ("pulled", f"{self.pull_bytes:,} bytes"),
            ("beside", f"{self.control_bytes:,} bytes (model, options, lengths)"),
            ("ratio", ratio),
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
        if self.models_sent:
            rows.append(
                ("behind", f"{self.models_sent} times the model, for versions kept no more")
            )
        lines = [f"{label:<11}{text}" for label, text in rows]
        if self.raw_tensors:
            numel = sum(tensor.numel for tensor in self.raw_tensors)
            lines.append(f"{'raw':<11}{len(self.raw_tensors)} tensors, {numel:,} values:")
            lines += [f"  {t.name} ({t.numel:,}): {t.reason}" for t in self.raw_tensors]
        return "\n".join(lines)

    __str__ = report


def summarize(
    exchange: ServerExchange,
    layout: Layout,
    part: ServerPart,
    *,
    servers: int,
    codec: str,
    version: int,
    sent_bytes: int,
    wire_seconds: float,
    serving: Serving | None,
) -> ServerStats:
    """`serving`: of a server that has begun; None on a worker."""
    counted = exchange.stats()
    is_server = part.is_server
    push_bytes = counted["push_bytes_received" if is_server else "push_bytes"]
    pull_bytes = counted["pull_bytes" if is_server else "pull_bytes_received"]
    raw_values = counted["values_pushed"] + part.values_pulled(exchange)
    if serving is not None:
        raw_values = part.numel * (serving.pushes + serving.pulls)
    moved = push_bytes + pull_bytes
    return ServerStats(
        role="server" if is_server else "worker",
        codec=codec,
        workers=layout.workers,
        servers=servers,
        version=version,
        steps=counted["steps"],
        skipped_versions=counted["non_finite_steps"],
        push_bytes=push_bytes,
        pull_bytes=pull_bytes,
        control_bytes=sent_bytes - counted["push_bytes"] - counted["pull_bytes"],
        values=part.numel if is_server else layout.numel,
        ratio=4 * raw_values / moved if moved else None,
        dropped_pushes=dict(enumerate(exchange.dropped_pushes)),
        lost_workers=() if serving is None else tuple(sorted(serving.lost)),
        models_sent=0 if serving is None else serving.models,
        encode_seconds=counted["encode_seconds"],
        wire_seconds=wire_seconds,
        decode_seconds=counted["decode_seconds"],
        raw_tensors=tuple(
            RawTensor(segment["name"], segment["numel"], segment["reason"])
            for segment in layout.segments
            if segment["reason"]
        ),
    )
