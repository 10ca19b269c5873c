"""The exchanges themselves, of up to 1024 ranks, on a simulated network."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradwire
from gradwire._core import Layout, Simulation
from gradwire_lab.plan.cluster import MOST_RANKS, Cluster, count_servers
from gradwire_lab.plan.predict import LayerBucket
from gradwire_lab.plan.profile import PlanError
from gradwire_lab.train.network import share_bytes
from gradwire_lab.train.settings import HOOKED, SERVED

CostOfCodec = Callable[[str], tuple[float, float]]  # seconds a value of encode and of decode

# Memory of the engine beside the arrays, for each rank and shard and for each message (measured
# by lab/tests/test_simulate.py).
_BYTES_PER_SHARD = 2000
_TURN_WITHOUT_LIMIT = 65536
_STRIDE = 104_729  # a prime, so that ranks seldom have the same values


@dataclass(frozen=True)
class Simulated:
    """Steps of so many ranks, beside the servers. seconds: of a step, until the last rank has the
    last bucket; means of all steps. Bytes are those of the packets of the rank that has most, a
    step. longest_way: messages that wait for each other."""

    ranks: int
    seconds: float
    codec_seconds: float
    longest_way: int
    messages: int  # of all ranks, in a step
    bytes_sent: float
    bytes_received: float
    local_bytes_sent: float
    bytes_of_all: float  # between machines


def simulate(
    cluster: Cluster,
    codec: str,
    exchange: str,
    buckets: Sequence[LayerBucket],
    values: NDArray[np.float32],
    *,
    cost: CostOfCodec | None = None,
    message_seconds: float = 0.0,
    pause: float = 0.0,
    steps: int = 1,
    memory: int | None = None,
    stride: int = _STRIDE,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Simulated:
    """Runs `steps` steps. values: float32, repeated as gradients; rank r begins step s at place
    (r + s * ranks) * stride, so a stride of the model's size takes recorded gradients. pause:
    seconds from a step's end to the next, in which the links' token buckets fill. memory: bytes
    that it may take; None: those that the system has free. on_step: called after each step.

    With the exchange `server`, workers pull the averages as the change of the servers' model.

    Raises PlanError for more ranks than the simulation or the memory takes and for gradients that
    are not finite, GradwireError for an unknown codec or exchange, or two that do not go together.
    """
    check_ranks(cluster, codec, exchange, buckets, memory)
    if not np.isfinite(values).all():
        raise PlanError("gradients with NaN or Inf: such steps are skipped, so they have no time")
    ranks, servers, owners = _world(cluster, exchange)
    bits = cluster.bandwidth
    running = Simulation(
        exchange,
        ranks,
        [(_layout(bucket, codec, owners, servers), bucket.ready) for bucket in buckets],
        values,
        bits_per_second=float("inf") if bits is None else bits,
        latency=cluster.latency,
        ranks_per_machine=cluster.ranks_per_machine,
        local_bits_per_second=cluster.local_bandwidth or float("inf"),
        turn_bytes=_TURN_WITHOUT_LIMIT if bits is None else share_bytes(round(bits)),
        burst_bytes=cluster.burst,
        cost=cost,
        per_message=message_seconds,
        pause=pause,
        stride=stride,
        seed=seed,
    )
    done = []
    for _ in range(steps):
        done.append(running.step())
        on_step()
    of_ranks = [rank for step in done for rank in step["ranks"]]
    return Simulated(
        ranks=cluster.ranks,
        seconds=fmean(step["seconds"] for step in done),
        codec_seconds=fmean(step["codec_seconds"] for step in done),
        longest_way=max(step["longest_way"] for step in done),
        messages=sum(rank["messages_sent"] for rank in of_ranks) // steps,
        bytes_sent=_most(done, "bytes_sent"),
        bytes_received=_most(done, "bytes_received"),
        local_bytes_sent=_most(done, "local_bytes_sent"),
        bytes_of_all=sum(rank["bytes_sent"] for rank in of_ranks) / steps,
    )


def _world(cluster: Cluster, exchange: str) -> tuple[int, int, int]:
    """Numbers of all ranks, of the servers among them, and of the ranks of a layout."""
    if exchange in SERVED:
        ranks = cluster.ranks + cluster.servers
        return ranks, cluster.servers, ranks
    between = HOOKED[gradwire.parse_exchange(exchange)["name"]]["between_machines"]
    return cluster.ranks, 0, cluster.machines if between else cluster.ranks


def _most(steps: Sequence[dict[str, Any]], name: str) -> float:
    """The mean over the steps of the rank that has most."""
    of_steps = ([rank[name] for rank in step["ranks"]] for step in steps)
    return max(fmean(sizes) for sizes in zip(*of_steps, strict=True))


def _layout(bucket: LayerBucket, codec: str, owners: int, servers: int) -> Layout:
    tensors = [(layer.name, list(layer.dims)) for layer in bucket.layers]
    return Layout(tensors, owners, codec, servers=servers)


def needed_memory(ranks: int, codec: str, exchange: str, buckets: Sequence[LayerBucket]) -> int:
    """An estimate of the bytes that a simulation takes, from above."""
    values = sum(bucket.numel for bucket in buckets)
    encoded = sum(gradwire.max_encoded_size(codec, bucket.numel) for bucket in buckets)
    of_rank = 8 * values + 2 * encoded  # gradients and residuals; packets on both sides
    shards = (ranks + sum(len(bucket.layers) for bucket in buckets)) * len(buckets)
    return ranks * (of_rank + shards * _BYTES_PER_SHARD)


def check_ranks(
    cluster: Cluster,
    codec: str,
    exchange: str,
    buckets: Sequence[LayerBucket],
    memory: int | None = None,
) -> None:
    """memory: bytes that are allowed; None: those that are free. Raises PlanError that says how
    many ranks there can be, and servers."""
    memory, state = (free_memory(), "free") if memory is None else (memory, "allowed")
    servers = cluster.servers
    ranks = cluster.ranks + servers
    beside = f" and {count_servers(servers)}" if servers else ""
    if ranks > MOST_RANKS:
        fit = f" together; {MOST_RANKS - servers} workers fit" if servers else ""
        raise PlanError(
            f"{cluster.ranks} ranks{beside}: gradwire simulate takes up to {MOST_RANKS}{fit}"
        )
    tensors = min(len(bucket.layers) for bucket in buckets)
    if servers > tensors:
        raise PlanError(
            f"--servers {servers}: a tensor lies whole on one server, and the model has {tensors}: "
            "take as many servers or fewer, or --profile, a model with more tensors"
        )
    needed = needed_memory(ranks, codec, exchange, buckets)
    if needed <= memory:
        return
    fitting = -servers + max(
        (n for n in range(MOST_RANKS + 1) if needed_memory(n, codec, exchange, buckets) <= memory),
        default=0,
    )
    values = sum(bucket.numel for bucket in buckets)
    advice = (
        "not even 2 ranks fit; take fewer --values"
        if fitting < 2
        else f"{fitting} ranks fit; take fewer ranks or --values"
    )
    raise PlanError(
        f"{cluster.ranks} ranks{beside} of {values:,} values need about {needed / 1e9:.3g} GB of "
        f"memory, and {memory / 1e9:.3g} GB are {state}: {advice}"
    )


def free_memory() -> int:
    """Bytes that the system can give without swapping, within the limit of its control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            free = int(rest.split()[0]) * 1024
    limits = [line for line in _lines(Path("/sys/fs/cgroup/memory.max")) if line.isdigit()]
    used = [int(line) for line in _lines(Path("/sys/fs/cgroup/memory.current"))]
    if limits and used:
        free = min(free, max(0, int(limits[0]) - used[0]))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
