"""Messages, bytes and values of an exchange of one bucket: the alpha, beta and gamma of its time.

The cost of collective communication is a sum (Thakur, Rabenseifner, Gropp 2005; INCEPTIONN, section
VIII, takes it for its scalability):

    seconds = alpha * messages on the longest way        alpha: latency of a message
            + beta * bytes of the busiest link           beta: seconds of a byte on the link
            + gamma * values encoded, decoded, summed    gamma: seconds of a value

For N ranks and a bucket of n values that take B bytes:

    exchange               messages        bytes of a rank          encoded     decoded
    sharded                2               2 (N - 1) / N * B        n           2 (N - 1) / N * n
    ring                   2 (N - 1)       2 (N - 1) / N * B        n           2 (N - 1) / N * n
    broadcast              1               (N - 1) * B              n           N * n
    hierarchical, M        4               2 (M - 1) / M * B        n           2 (M - 1) / M * n
    ddp (Gloo's ring)      2 (N - 1)       2 (N - 1) / N * 4 n      -           -
    tree (TernGrad, B)     log2 N          log2 N * B               -           -
    worker-aggregator      1 + log2 N      (N + log2 N) * B         -           (N - 1) * n
    ring (INCEPTIONN)      2 (N - 1)       2 (N - 1) / N * B        -           (N - 1) / N * n

In (N - 1) / N, 1 / N is the share of the rank that owns most, which is larger in small models. The
first rows are those of include/gradwire/exchange.h, which tests compare with the exchanges
themselves. The last three are the papers' (test_plan_papers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from gradwire.plan.cluster import Cluster

_PACKET_BYTES = 47  # of headers, in a packet of one segment


@dataclass(frozen=True)
class Cost:
    """Of one bucket, for the rank or the link that has most to do.

    ways: messages on the longest way between machines. link_bytes: that a machine's link carries
    each way. local_bytes: that a rank sends inside its machine. handled: messages that a rank sends
    and receives, one after the other. rank_bytes: that a rank sends to
    others, wherever they are. raw_encoded, raw_decoded: values of raw messages beside the codec's.
    """

    ways: float
    link_bytes: float
    encoded: float = 0.0
    decoded: float = 0.0
    local_bytes: float = 0.0
    handled: float = 0.0
    rank_bytes: float = 0.0
    raw_encoded: float = 0.0
    raw_decoded: float = 0.0


@dataclass(frozen=True)
class Volume:
    """A bucket. values: of it all. pushed, pulled: bytes of the whole bucket as it is pushed and
    pulled. share: of the rank that owns most; None: all own as much. Small tensors are not cut, so
    a small model has uneven shares, and all ranks wait for the largest."""

    values: float
    pushed: float
    pulled: float
    share: float | None = None

    def largest(self, owners: int) -> float:
        """The share of the rank that owns most."""
        return 1 / owners if self.share is None else self.share


def sharded(volume: Volume, cluster: Cluster) -> Cost:
    n, k = cluster.ranks, cluster.ranks_per_machine
    share = volume.largest(n)
    shard = share * (volume.pushed + volume.pulled) + 2 * _PACKET_BYTES
    return Cost(
        ways=2,
        link_bytes=k * (n - k) * shard,
        encoded=volume.values,
        decoded=(1 + (n - 2) * share) * volume.values,
        local_bytes=(k - 1) * shard,
        handled=4 * (n - 1),
        rank_bytes=(1 - share) * volume.pushed
        + (n - 1) * (share * volume.pulled + 2 * _PACKET_BYTES),
    )


def ring(volume: Volume, cluster: Cluster) -> Cost:
    n, many = cluster.ranks, cluster.machines > 1
    both, packets = volume.pushed + volume.pulled, 2 * _PACKET_BYTES
    slowest = (n - 1) * (volume.largest(n) * both + packets)  # the largest shard takes every hop
    return Cost(
        ways=2 * (n - 1) * many,
        link_bytes=slowest * many,
        encoded=volume.values,
        decoded=2 * (n - 1) / n * volume.values,
        local_bytes=slowest * (cluster.ranks_per_machine > 1),
        handled=4 * (n - 1),
        rank_bytes=(n - 1) * (both / n + packets),
    )


def broadcast(volume: Volume, cluster: Cluster) -> Cost:
    n, k = cluster.ranks, cluster.ranks_per_machine
    each = volume.pushed + _PACKET_BYTES
    return Cost(
        ways=1,
        link_bytes=k * (n - k) * each,
        encoded=volume.values,
        decoded=n * volume.values,
        local_bytes=(k - 1) * each,
        handled=2 * (n - 1),
        rank_bytes=(n - 1) * each,
    )


def hierarchical(volume: Volume, cluster: Cluster) -> Cost:
    """Ranks send raw values to the speaker of their machine and get raw results; the speakers
    exchange as in `sharded`. Only the speakers encode."""
    k = cluster.ranks_per_machine
    between = (
        sharded(volume, Cluster(cluster.machines, None)) if cluster.machines > 1 else Cost(0, 0)
    )
    local = 2 * (k - 1) * (4 * volume.values + _PACKET_BYTES)
    return Cost(
        ways=between.ways,
        link_bytes=between.link_bytes,
        encoded=between.encoded,
        decoded=between.decoded,
        local_bytes=local,
        handled=between.handled + 2 * (k - 1),
        rank_bytes=between.rank_bytes + local / 2,
        raw_encoded=2 * volume.values * (k > 1),
        raw_decoded=k * volume.values * (k > 1),
    )


def allreduce(volume: Volume, cluster: Cluster) -> Cost:
    """DDP's, a ring of Gloo; its bytes are `pushed`, uncompressed."""
    n = cluster.ranks
    sent = 2 * (n - 1) / n * volume.pushed
    many = cluster.machines > 1
    return Cost(
        ways=2 * (n - 1) * many,
        link_bytes=sent * many,
        local_bytes=sent * (cluster.ranks_per_machine > 1),
        rank_bytes=sent,
    )


def tree(volume: Volume, cluster: Cluster) -> Cost:
    """TernGrad, appendix B: pairs of neighbours reduce the whole gradient, log2 times; those of a
    machine over the local links first, then the machines over theirs."""
    between, inside = log2(cluster.machines), log2(cluster.ranks_per_machine)
    return Cost(
        ways=between, link_bytes=between * volume.pushed, local_bytes=inside * volume.pushed
    )


def worker_aggregator(volume: Volume, cluster: Cluster) -> Cost:
    """INCEPTIONN's baseline: one aggregator receives N gradients over its link, one after the
    other, sums them, and sends the weights back along a tree."""
    n = cluster.ranks
    return Cost(
        ways=1 + log2(n),
        link_bytes=n * volume.pushed + log2(n) * volume.pulled,
        decoded=(n - 1) * volume.values,
    )


def gradient_ring(volume: Volume, cluster: Cluster) -> Cost:
    """INCEPTIONN, algorithm 1, as its section on scalability counts it: sums alone are computed."""
    n = cluster.ranks
    return Cost(
        ways=2 * (n - 1),
        link_bytes=(n - 1) / n * (volume.pushed + volume.pulled),
        decoded=(n - 1) / n * volume.values,
    )


EXCHANGES = {
    "sharded": sharded,
    "ring": ring,
    "broadcast": broadcast,
    "hierarchical": hierarchical,
}

# Those of the papers' models, which are no exchanges of gradwire.
OF_PAPERS = {"tree": tree, "worker-aggregator": worker_aggregator, "gradient-ring": gradient_ring}
