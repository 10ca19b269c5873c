"""The network of a training: ranks, machines, links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire_lab.plan.profile import PlanError

# TCP with time stamps over IPv4 over Ethernet: bytes of a message and of headers in a frame. The
# simulated engine has the same numbers (src/engines/simulated/links.h).
PAYLOAD_BYTES, HEADER_BYTES = 1448, 66

# Of `gradwire simulate`; the exchanges themselves go further.
MOST_RANKS = 1024

_MOST_BURST = 10**12


@dataclass(frozen=True)
class Cluster:
    """Every machine has a full-duplex link to a switch without limits.

    ranks: those that train, the workers of an exchange with servers.
    bandwidth: bits a second of a link, each way; None: no limit. latency: seconds from a machine to
    another. ranks_per_machine: consecutive ranks, which share the link of their machine.
    local_bandwidth: bits a second that a rank sends, and receives, inside its machine; None: no
    limit. servers: further ranks for the exchange `server`, each on a machine of its own. burst:
    bytes, headers included, that a link passes at once, each way, after it was idle: a token bucket
    of this size, which fills at the rate of the link.
    """

    ranks: int
    bandwidth: float | None
    latency: float = 0.0
    ranks_per_machine: int = 1
    local_bandwidth: float | None = None
    servers: int = 0
    burst: int = 0

    def __post_init__(self) -> None:
        """Raises PlanError for a network on which nothing can be exchanged."""
        check_rank_count(self.ranks)
        for name, rate in (
            ("--bandwidth", self.bandwidth),
            ("--local-bandwidth", self.local_bandwidth),
        ):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise PlanError(
                    f"{name} {rate:g}: a link needs more than 0 bits a second, such as 100mbit; "
                    "none has no limit"
                )
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise PlanError(
                f"--latency {self.latency * 1e3:g}: a message takes 0 milliseconds or more"
            )
        if self.ranks_per_machine < 1 or self.ranks % self.ranks_per_machine:
            raise PlanError(
                f"{self.ranks} ranks cannot be {self.ranks_per_machine} on each machine: give "
                "--ranks-per-machine a number that divides --ranks"
            )
        if self.servers < 0:
            raise PlanError(f"--servers {self.servers}: there are 1 or more, or none")
        if not 0 <= self.burst <= _MOST_BURST:
            raise PlanError(
                f"--burst {self.burst}: a link passes 0 bytes or more at once, up to {_MOST_BURST}"
            )
        if self.burst > 0 and self.bandwidth is None:
            raise PlanError(
                f"--burst {self.burst}: without a limit a link passes everything at once; give "
                "--bandwidth a rate, such as 100mbit, or leave --burst out"
            )

    @property
    def machines(self) -> int:
        """Without those of the servers."""
        return self.ranks // self.ranks_per_machine

    def link_seconds(self, payload: float) -> float:
        """How long a link sends so many bytes of messages, with the headers of full frames."""
        if self.bandwidth is None:
            return 0.0
        return payload * (1 + HEADER_BYTES / PAYLOAD_BYTES) * 8 / self.bandwidth

    @property
    def burst_seconds(self) -> float:
        """How long an empty token bucket fills: what a full one saves."""
        return 0.0 if self.bandwidth is None else self.burst * 8 / self.bandwidth

    def local_seconds(self, payload: float) -> float:
        return 0.0 if self.local_bandwidth is None else payload * 8 / self.local_bandwidth


def check_rank_count(ranks: int) -> None:
    """Raises PlanError for fewer than two."""
    if ranks < 2:
        why = "1 rank exchanges nothing" if ranks == 1 else f"there cannot be {ranks} ranks"
        raise PlanError(f"{why}: give --ranks, the number of processes that train together, from 2")


def count_servers(servers: int) -> str:
    return "1 server" if servers == 1 else f"{servers} servers"
