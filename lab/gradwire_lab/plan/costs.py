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
    server, S              2               2 N / S * B              (1+1/S) n   (1 + N / S) * n
    ddp (Gloo's ring)      2 (N - 1)       2 (N - 1) / N * 4 n      -           -
    tree (TernGrad, B)     log2 N          log2 N * B               -           -
    worker-aggregator      1 + log2 N      (N + log2 N) * B         -           (N - 1) * n
    ring (INCEPTIONN)      2 (N - 1)       2 (N - 1) / N * B        -           (N - 1) / N * n

In (N - 1) / N, 1 / N is the share of the rank that owns most, which is larger in small models; so
is 1 / S that of a server, which has whole tensors. The bytes of `server` are those of its link, N
pushes that come and then N pulls that go, unless a machine's link carries more. With k ranks on a
machine, a ring's messages leave it in one of k hops; its link carries what k ranks send in
`sharded`, `broadcast` and `server`. What a rank computes and sends in the first three is read from
the core (exchange_cost.h), whose tests count it in the exchanges themselves; here is what links and
machines make of it. The last three are the papers' (test_plan_papers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from gradwire._core import exchange_cost as cost_to_rank
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.train.settings import HOOKED

_PACKET_BYTES = 47  # of headers, in a packet of one segment


@dataclass(frozen=True)
class Cost:
    """What one bucket costs the rank or the link that has most to do.

    ways, way_bytes, way_local_bytes: what comes one after the other on the longest way: messages
    between machines, bytes that links carry between machines, bytes inside machines. link_bytes,
    local_bytes: that the busiest link carries each way, and the busiest rank inside its machine,
    meanwhile; link_bytes is 0 where way_bytes has all of them. idle_bytes: of way_bytes, those that
    pass while the link is idle in the direction of the next message on the longest way. handled:
    messages that a rank sends and receives, one after the other. rank_bytes: that a rank sends to
    others, wherever they are. raw_encoded, raw_decoded: values of raw messages beside the codec's.
    """

    ways: float
    way_bytes: float
    way_local_bytes: float = 0.0
    link_bytes: float = 0.0
    local_bytes: float = 0.0
    idle_bytes: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    handled: float = 0.0
    rank_bytes: float = 0.0
    raw_encoded: float = 0.0
    raw_decoded: float = 0.0


@dataclass(frozen=True)
class Volume:
    """A bucket. values: of it all. pushed, pulled: bytes of the whole bucket as it is pushed and
    pulled. shares: of each owner, which together are 1; None: all own as much. Small tensors are
    not cut, so a small model has uneven shares, and all ranks wait for the largest."""

    values: float
    pushed: float
    pulled: float
    shares: tuple[float, ...] | None = None

    def shares_of(self, owners: int) -> tuple[float, ...]:
        return (1 / owners,) * owners if self.shares is None else self.shares


def _work_of_rank(
    exchange: str, volume: Volume, ranks: int, shares: tuple[float, ...] | None = None
) -> dict[str, float]:
    """What the rank that owns most computes and sends, as the core states it, with headers.
    shares: of each owner; None: all own as much."""
    rank = 0 if shares is None else shares.index(max(shares))
    stated = cost_to_rank(
        exchange, rank, ranks, volume.values, volume.pushed, volume.pulled, shares=shares
    )
    return {
        "encoded": stated["values_encoded"],
        "decoded": stated["values_decoded"],
        "handled": stated["messages_sent"] + stated["messages_received"],
        "rank_bytes": stated["bytes_sent"] + stated["messages_sent"] * _PACKET_BYTES,
    }


def sharded(volume: Volume, cluster: Cluster) -> Cost:
    n, k, many = cluster.ranks, cluster.ranks_per_machine, cluster.machines > 1
    shares = volume.shares_of(n)
    share = max(shares)
    of_machine = max(sum(shares[first : first + k]) for first in range(0, n, k))
    both = volume.pushed + volume.pulled
    return Cost(
        ways=2 * many,
        way_bytes=(n - k) * (of_machine * both + k * 2 * _PACKET_BYTES),
        # The busiest link receives more pushes than it sends, and then sends more pulls.
        idle_bytes=(n * of_machine - k) * both * many,
        local_bytes=(k - 1) * (share * both + 2 * _PACKET_BYTES),
        **_work_of_rank("sharded", volume, n, volume.shares),
    )


def ring(volume: Volume, cluster: Cluster, packet_bytes: int = _PACKET_BYTES) -> Cost:
    n, k, many = cluster.ranks, cluster.ranks_per_machine, cluster.machines > 1
    shares = volume.shares_of(n)
    both, packets = volume.pushed + volume.pulled, 2 * (n - 1) * packet_bytes
    # From rank r to the next come the pushes of all shards but r's, and the pulls of all but the
    # next rank's.
    sent = [
        (1 - shares[r]) * volume.pushed + (1 - shares[(r + 1) % n]) * volume.pulled + packets
        for r in range(n)
    ]
    hops = 2 * (n - 1)  # of each shard
    between, after = _between_machines(hops, cluster)
    hop_bytes = max(shares) * both / 2 + packet_bytes  # of the largest shard
    way_bytes, link_bytes = (between + after) * hop_bytes, max(sent[k - 1 :: k]) * many
    return Cost(
        ways=between,
        way_bytes=way_bytes,
        way_local_bytes=(hops - between) * hop_bytes,
        link_bytes=link_bytes,
        local_bytes=max(sent) * (k > 1),
        idle_bytes=max(0.0, way_bytes - link_bytes),
        **_work_of_rank("ring", volume, n),
    )


def _between_machines(hops: int, cluster: Cluster) -> tuple[int, int]:
    """How many consecutive hops of a ring leave a machine: one of ranks_per_machine. And how many
    shards share the link with the last of these hops and go before it."""
    if cluster.machines == 1:
        return 0, 0
    k = cluster.ranks_per_machine
    return -(-hops // k), (hops - 1) % k


def broadcast(volume: Volume, cluster: Cluster) -> Cost:
    n, k = cluster.ranks, cluster.ranks_per_machine
    each = volume.pushed + _PACKET_BYTES
    return Cost(
        ways=1 * (cluster.machines > 1),
        way_bytes=k * (n - k) * each,
        local_bytes=(k - 1) * each,
        **_work_of_rank("broadcast", volume, n),
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
        way_bytes=between.way_bytes,
        way_local_bytes=local,
        idle_bytes=between.idle_bytes,
        encoded=between.encoded,
        decoded=between.decoded,
        handled=between.handled + 2 * (k - 1),
        rank_bytes=between.rank_bytes + local / 2,
        raw_encoded=2 * volume.values * (k > 1),
        raw_decoded=k * volume.values * (k > 1),
    )


def server(volume: Volume, cluster: Cluster) -> Cost:
    """Every worker pushes to all servers; the server with the largest share has its pushes last.
    Then it sends its pull to every worker. volume.shares: of the servers."""
    workers, k, servers = cluster.ranks, cluster.ranks_per_machine, cluster.servers
    share = max(volume.shares_of(servers))
    of_server = workers * (share * (volume.pushed + volume.pulled) + 2 * _PACKET_BYTES)
    of_machine = k * (volume.pushed + volume.pulled + servers * 2 * _PACKET_BYTES)
    return Cost(
        ways=2,
        way_bytes=max(of_server, of_machine),
        idle_bytes=max(of_server, of_machine),  # pushes alone, then pulls alone
        encoded=(1 + share) * volume.values,
        decoded=(1 + workers * share) * volume.values,
        handled=2 * (workers + servers),
        rank_bytes=max(
            volume.pushed + servers * _PACKET_BYTES,
            workers * (share * volume.pulled + _PACKET_BYTES),
        ),
    )


def allreduce(volume: Volume, cluster: Cluster) -> Cost:
    """DDP's, a ring of Gloo; its bytes are `pushed`, uncompressed."""
    even = Volume(volume.values, volume.pushed, volume.pushed)
    cost = ring(even, cluster, packet_bytes=0)
    sent = 2 * (cluster.ranks - 1) / cluster.ranks * volume.pushed
    return replace(cost, idle_bytes=0.0, encoded=0.0, decoded=0.0, handled=0.0, rank_bytes=sent)


def tree(volume: Volume, cluster: Cluster) -> Cost:
    """TernGrad, appendix B: pairs of neighbours reduce the whole gradient, log2 times; those of a
    machine over the local links first, then the machines over theirs."""
    between, inside = log2(cluster.machines), log2(cluster.ranks_per_machine)
    return Cost(
        ways=between, way_bytes=between * volume.pushed, way_local_bytes=inside * volume.pushed
    )


def worker_aggregator(volume: Volume, cluster: Cluster) -> Cost:
    """INCEPTIONN's baseline: one aggregator receives N gradients over its link, one after the
    other, sums them, and sends the weights back along a tree."""
    n = cluster.ranks
    return Cost(
        ways=1 + log2(n),
        way_bytes=n * volume.pushed + log2(n) * volume.pulled,
        decoded=(n - 1) * volume.values,
    )


def gradient_ring(volume: Volume, cluster: Cluster) -> Cost:
    """INCEPTIONN, algorithm 1, as its section on scalability counts it: sums alone are computed."""
    n = cluster.ranks
    return Cost(
        ways=2 * (n - 1),
        way_bytes=(n - 1) / n * (volume.pushed + volume.pulled),
        decoded=(n - 1) / n * volume.values,
    )


# By the routes of an exchange's legs, which the core states (ExchangeInfo::legs).
_BY_ROUTES = {
    ("to_owners", "from_owners"): sharded,
    ("around", "around"): ring,
    ("to_all",): broadcast,
}

# The exchanges without servers that take any codec.
EXCHANGES = tuple(name for name, info in HOOKED.items() if not info["adds_trits"])

# Those of the papers' models, which are no exchanges of gradwire.
OF_PAPERS = {"tree": tree, "worker-aggregator": worker_aggregator, "gradient-ring": gradient_ring}


def exchange_cost(exchange: str, volume: Volume, cluster: Cluster) -> Cost:
    """The cost of one of gradwire's exchanges without servers, or of one in the papers' models."""
    if exchange in OF_PAPERS:
        return OF_PAPERS[exchange](volume, cluster)
    info = HOOKED[exchange]
    if info["between_machines"]:
        return hierarchical(volume, cluster)
    cost = _BY_ROUTES[tuple(leg["route"] for leg in info["legs"])](volume, cluster)
    if info["scale_legs"]:
        # Before the trits, every rank sends the largest magnitudes to all others.
        ways = cost.ways + (cluster.machines > 1)
        return replace(cost, ways=ways, handled=cost.handled + 2 * (cluster.ranks - 1))
    return cost
