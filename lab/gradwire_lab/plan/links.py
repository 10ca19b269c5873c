"""Measures the links between the ranks of a training, as a plan needs them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from gradwire.torch.buckets.bucket_runner import LOCAL_WORLD_SIZE, count_on_each_host
from gradwire_lab.plan.cluster import HEADER_BYTES, PAYLOAD_BYTES, Cluster
from gradwire_lab.plan.meters import time_together
from gradwire_lab.plan.profile import PlanError
from gradwire_lab.train import messages

_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 30
_ROUNDS, _PINGS = 5, 15
_PAUSE_SECONDS = 0.05  # about that of a step, in which a link saves up a burst
_WITH_HEADERS = 1 + HEADER_BYTES / PAYLOAD_BYTES


@dataclass(frozen=True)
class Links:
    """What lies between the ranks.

    Attributes:
        ranks: Of the process group.
        ranks_per_machine: Consecutive ranks that share a machine and its link.
        bandwidth: Bits a second of a machine's link, each way, with TCP's headers, while all
            machines send at once; None: all ranks are on one machine.
        latency: Seconds of a small message from a machine to another, with the work at its ends.
        local_bandwidth: Bits a second that a rank sends inside its machine; None: it is alone.
        local_latency: As `latency`, inside a machine.
        burst: Bytes, with TCP's headers, that a machine's link passes at once after a pause.
    """

    ranks: int
    ranks_per_machine: int
    bandwidth: float | None
    latency: float
    local_bandwidth: float | None
    local_latency: float
    burst: int = 0

    def describe(self) -> str:
        """A line for people."""
        said = [f"{self.ranks} ranks, {self.ranks_per_machine} on each machine"]
        if self.bandwidth is not None:
            burst = f", {self.burst} bytes at once" if self.burst else ""
            said.append(f"between machines {_describe(self.bandwidth, self.latency)}{burst}")
        if self.local_bandwidth is not None:
            said.append(f"inside {_describe(self.local_bandwidth, self.local_latency)}")
        return f"links: {'; '.join(said)}"

    def cluster(self, message_seconds: float = 0.0) -> Cluster:
        """The network of a plan. message_seconds: the work of a message's sender, or receiver,
        which a profile counts by itself."""
        latency = max(0.0, self.latency - 2 * message_seconds)
        return Cluster(
            self.ranks,
            self.bandwidth,
            latency,
            self.ranks_per_machine,
            self.local_bandwidth,
            burst=self.burst,
        )


def _describe(rate: float, latency: float) -> str:
    megabits = float(f"{rate / 1e6:.4g}")  # such as 21350, which .4g writes as 2.135e+04
    return f"{megabits:g} Mbit/s, {latency * 1e3:.3g} ms"


def probe(ranks_per_machine: int | None = None, seconds: float = 0.4) -> Links:
    """Measures the links of the default process group, which must carry tensors on the CPU. All
    ranks call it together; all get the same.

    Args:
        ranks_per_machine: None: torchrun's number, or that of ranks with the same host name.
        seconds: The least that the largest messages of a measurement take.

    Raises:
        PlanError: There is one rank, or machines have different numbers of ranks.
    """
    ranks = dist.get_world_size()
    if ranks < 2:
        raise PlanError("a single rank has no links: start the ranks of the training")
    here = ranks_per_machine or _count_ranks_here()
    if ranks % here:
        raise PlanError(f"{ranks} ranks can't be {here} on each machine")
    bandwidth, latency, burst = None, 0.0, 0
    if here < ranks:
        send = _sender(lambda rank: (rank + here) % ranks)
        latency = _latency(0, here)
        rate, size = _rate(send, seconds)
        burst = round(_burst(send, rate, latency, size) * here * _WITH_HEADERS)
        bandwidth = rate * here * _WITH_HEADERS
    local_bandwidth, local_latency = None, 0.0
    if here > 1:

        def next_inside(rank: int) -> int:
            first = rank - rank % here
            return first + (rank + 1 - first) % here

        local_bandwidth, _ = _rate(_sender(next_inside), seconds)
        local_latency = _latency(0, 1)
    return Links(ranks, here, bandwidth, latency, local_bandwidth, local_latency, burst)


def _count_ranks_here() -> int:
    """Raises PlanError unless every machine has the same number of consecutive ranks."""
    said = messages.gather([socket.gethostname(), os.environ.get(LOCAL_WORLD_SIZE)])
    counts = {count for _, count in said}
    if None not in counts and len(counts) == 1:
        return int(counts.pop() or 1)
    hosts = [host for host, _ in said]
    here = count_on_each_host(hosts)
    if here is None:
        raise PlanError(
            "a plan needs the same number of consecutive ranks on every machine; ranks 0 to "
            f"{len(hosts) - 1} are on {', '.join(hosts)}"
        )
    return here


def _sender(target_of: Callable[[int], int]) -> Callable[[int], float]:
    """A function that lets every rank send so many bytes to its target, all at once, and returns
    the seconds until the last has come."""
    rank = dist.get_rank()
    to = target_of(rank)
    (source,) = (other for other in range(dist.get_world_size()) if target_of(other) == rank)

    def send(size: int) -> float:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        # Gloo asks a sender for its bytes over the connection on which it sends its own. Of two
        # ranks that began to send before they were asked, the second waits until the first is done.
        received = dist.irecv(into, source)

        def both() -> None:
            for work in (dist.isend(out, to), received):
                assert work is not None, "this rank is in the group"
                work.wait()

        return _time_of_all(both)

    return send


def _rate(send: Callable[[int], float], seconds: float) -> tuple[float, int]:
    """Bits a second that a rank sends to its target, while all ranks send at once: of the bytes by
    which large messages are longer than small ones, because links may pass a burst at once. And
    the bytes of the small ones."""
    size = _FIRST_BYTES
    send(size)  # makes connections
    while send(size) < seconds and size < _MOST_BYTES:
        size *= 2
    small = size // 4
    # Other work only ever lengthens a message, so the shortest count.
    times = [(send(size), send(small)) for _ in range(_ROUNDS)]
    longer = min(large for large, _ in times) - min(short for _, short in times)
    return 8 * (size - small) / max(longer, 1e-9), small


def _burst(send: Callable[[int], float], rate: float, latency: float, most: int) -> float:
    """Bytes, at most so many, that a link passes at once after a pause: by which messages come
    earlier than at the rate (bits a second)."""
    size, found = _FIRST_BYTES, 0.0
    while size <= most:
        times = []
        for _ in range(_ROUNDS):
            time.sleep(_PAUSE_SECONDS)
            times.append(send(size))
        found = size - rate / 8 * (min(times) - latency)
        if found < size / 2:
            break
        size *= 2
    return max(0.0, found)


def _latency(first: int, second: int) -> float:
    """Half the time of a small message there and back."""
    rank, value = dist.get_rank(), torch.zeros(1)
    dist.barrier()
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        if rank == first:
            dist.send(value, second)
            dist.recv(value, second)
        elif rank == second:
            dist.recv(value, first)
            dist.send(value, first)
        times.append(time.perf_counter() - began)
    found = torch.tensor(median(times) / 2, dtype=torch.float64)
    dist.broadcast(found, first)
    return float(found)


def _time_of_all(call: Callable[[], None]) -> float:
    """Seconds from when all ranks begin to when the last one ends."""
    taken = torch.tensor(time_together(call), dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)
