"""What a rank has encoded of each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        return TensorTraffic(
            self.name,
            self.numel,
            self.values_pushed + other.values_pushed,
            self.push_payload_bytes + other.push_payload_bytes,
            self.values_pulled + other.values_pulled,
            self.pull_payload_bytes + other.pull_payload_bytes,
        )


def sum_by_name(parts: Iterable[TensorTraffic]) -> tuple[TensorTraffic, ...]:
    """One entry for each tensor, in the order in which they first come."""
    sums: dict[str, TensorTraffic] = {}
    for part in parts:
        sums[part.name] = sums[part.name] + part if part.name in sums else part
    return tuple(sums.values())
