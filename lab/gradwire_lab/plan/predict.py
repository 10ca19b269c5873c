"""The time of a step in which buckets are exchanged during the backward pass.

DDP collects gradients in buckets, in the order in which they come. A bucket is exchanged when its
last gradient is there and the bucket before it is done, while the backward pass goes on:

    begin(k) = max(ready(k), end(k - 1))        ready: the time of the bucket's last gradient
    end(k)   = begin(k) + seconds(k)            seconds: costs.py
    step     = max(end(last), end of backward) + rest of the step

gradwire sends a bucket's first messages while the bucket before it, which is done `ahead` later,
waits for others:

    begin(k) = max(ready(k), end(k - 2), end(k - 1) - ahead)

While links are idle, their token buckets fill (tokens.py).

Dedicated servers get the gradients of the whole model when the backward pass has ended. Local steps
exchange the changes of the whole model, or of its fragments, in some steps alone (waiting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire._core import Layout
from gradwire.local_schedule import EVERY_STEP, Schedule, deal_by_size
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.costs import Cost, Volume, allreduce, exchange_cost, server
from gradwire_lab.plan.profile import CodecSpeed, Layer, PlanError, Profile
from gradwire_lab.plan.tokens import Tokens
from gradwire_lab.plan.waiting import exposed_seconds
from gradwire_lab.train.settings import HOOKED, SERVED, shares_scales

DDP = "ddp"  # without gradwire

# DDP's default sizes of the first bucket, so that an exchange begins early, and of all others.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
_RAW_BITS = 32


@dataclass(frozen=True)
class LayerBucket:
    """Layers that are exchanged together. ready: seconds from the beginning of the step to the last
    of their gradients."""

    layers: tuple[Layer, ...]
    ready: float

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)


@dataclass(frozen=True)
class Prediction:
    """seconds: of a step. codec_seconds, wire_seconds, message_seconds: of all buckets of a step.
    exposed_seconds: of the exchange, after the backward pass has ended. sent_bytes: of a rank, to
    other ranks; with servers, of the rank that sends most. every: steps from one exchange to the
    next; all else is a mean over these steps."""

    codec: str
    exchange: str
    seconds: float
    codec_seconds: float
    wire_seconds: float
    message_seconds: float
    exposed_seconds: float
    sent_bytes: float
    bits: float  # a value, each way
    every: int = 1


def cut_buckets(profile: Profile, bucket_bytes: int | None = None) -> list[LayerBucket]:
    """As DDP cuts gradients after its first step: a bucket is full when it has reached its
    size. bucket_bytes: DDP's bucket_cap_mb; None: not given, so that the first bucket is small."""
    first, others = (
        (FIRST_BUCKET_BYTES, BUCKET_BYTES) if bucket_bytes is None else 2 * (bucket_bytes,)
    )
    buckets: list[LayerBucket] = []
    layers: list[Layer] = []
    now = profile.forward_seconds
    for layer in profile.layers:
        now += layer.backward_seconds
        layers.append(layer)
        limit = others if buckets else first
        if sum(one.nbytes for one in layers) >= limit or layer is profile.layers[-1]:
            buckets.append(LayerBucket(tuple(layers), now))
            layers = []
    return buckets


def join(buckets: Sequence[LayerBucket]) -> LayerBucket:
    """All layers in one bucket."""
    return LayerBucket(tuple(layer for one in buckets for layer in one.layers), buckets[-1].ready)


def predict(
    profile: Profile,
    cluster: Cluster,
    codec: str,
    exchange: str,
    buckets: Sequence[LayerBucket],
    schedule: Schedule | None = None,
) -> Prediction:
    """The step of a codec of the profile in an exchange: one of gradwire's, one of
    costs.OF_PAPERS, `server` with its parameters, where the cluster has servers, or `ddp`, which
    with the codec `ddp` is DDP without gradwire. schedule: of LocalSteps; None: buckets are
    exchanged during the backward pass of each step.

    Raises PlanError for a codec that was not measured, and for more fragments than layers."""
    local, schedule = schedule is not None, schedule or EVERY_STEP
    if local:
        buckets = _fragments(join(buckets), schedule.fragments)
    elif exchange in SERVED:
        buckets = [join(buckets)]
    speed = CodecSpeed(0.0, 0.0, _RAW_BITS) if codec == DDP else profile.codec(codec)
    raw = profile.codecs.get("raw", CodecSpeed(0.0, 0.0, _RAW_BITS))
    codec_seconds = wire_seconds = message_seconds = sent = 0.0
    before = end = -profile.rest_seconds  # of the last exchanges of the step before
    seconds = []  # of each bucket
    tokens = Tokens(cluster.burst_seconds)
    compute = profile.compute_seconds + (profile.local.step_seconds if local else 0.0)
    # Local steps between one fragment's exchange and the next one's.
    between = compute * schedule.every / schedule.fragments
    for bucket in buckets:
        cost = _cost(bucket, codec, speed, cluster, exchange)
        coding = cost.encoded * speed.encode_seconds + cost.decoded * speed.decode_seconds
        coding += cost.raw_encoded * raw.encode_seconds + cost.raw_decoded * raw.decode_seconds
        handling, stack = _transport(profile, cluster, cost, exchange)
        if not local and codec != DDP:
            handling += profile.transport.exchange_seconds
        ahead = _seconds_ahead(cluster, cost) if exchange in HOOKED and not local else 0.0
        begin = max(bucket.ready, before, end - ahead)
        tokens.fill(between if local else max(0.0, begin - end))
        wire = _wire_seconds(cluster, cost, stack, tokens, coding + handling)
        codec_seconds += coding
        wire_seconds += wire
        message_seconds += handling
        sent += cost.rank_bytes
        seconds.append(coding + wire + handling)
        before, end = end, begin + seconds[-1]
    backward_end = profile.forward_seconds + profile.backward_seconds
    exposed = max(0.0, end - backward_end)
    if local:
        exposed = exposed_seconds(schedule, compute, seconds)
        exposed += profile.local.exchange_seconds / schedule.every
    every = schedule.every
    return Prediction(
        codec=codec,
        exchange=exchange,
        seconds=compute + exposed,
        codec_seconds=codec_seconds / every,
        wire_seconds=wire_seconds / every,
        message_seconds=message_seconds / every,
        exposed_seconds=exposed,
        sent_bytes=sent / every,
        bits=8 * sum(_sent_bytes(each.layers, codec, speed) for each in buckets) / profile.numel,
        every=every,
    )


def _fragments(whole: LayerBucket, fragments: int) -> list[LayerBucket]:
    sizes = [(layer.name, layer.numel) for layer in whole.layers]
    try:
        dealt = deal_by_size(sizes, fragments)
    except ValueError as error:
        raise PlanError(f"--fragments: {error}") from error
    return [LayerBucket(tuple(whole.layers[place] for place in of), whole.ready) for of in dealt]


def _seconds_ahead(cluster: Cluster, cost: Cost) -> float:
    """How much earlier an exchange begins, the first messages of which are sent while the bucket
    before waits: they travel, and take the link while it is idle, between the other messages of
    that bucket. Inside machines, all of it goes on beside the messages between them."""
    network = cluster.link_seconds(cost.way_bytes)
    if cost.way_local_bytes:
        return min(network, cluster.local_seconds(cost.way_local_bytes))
    if not cost.ways:
        return 0.0
    idle = cluster.latency if cost.ways > 1 else 0.0
    return cluster.latency + min(idle, network / cost.ways)


def _wire_seconds(cluster: Cluster, cost: Cost, stack: float, tokens: Tokens, work: float) -> float:
    """The longest way, unless a link, a rank's local messages or the system (stack: its seconds)
    are busy for longer. tokens: of the busiest link, which is idle for the latency of each message
    and for its share of the ranks' work."""
    way, link = cluster.link_seconds(cost.way_bytes), cluster.link_seconds(cost.link_bytes)
    link -= min(link, tokens.held)
    way -= tokens.save(
        way,
        cluster.link_seconds(cost.way_bytes - cost.idle_bytes),
        cost.ways,
        cluster.latency + work / max(1.0, cost.ways),
    )
    way += cluster.local_seconds(cost.way_local_bytes)
    link += min(1.0, cost.ways) * cluster.latency
    return max(
        max(way, stack) + cost.ways * cluster.latency, link, cluster.local_seconds(cost.local_bytes)
    )


def _cost(
    bucket: LayerBucket, codec: str, speed: CodecSpeed, cluster: Cluster, exchange: str
) -> Cost:
    pushed = pulled = _sent_bytes(bucket.layers, codec, speed)
    if exchange == DDP:
        return allreduce(Volume(bucket.numel, pushed, pulled), cluster)
    if exchange in SERVED:
        if speed.pull_bits is not None:
            pulled = _bytes(bucket.layers, speed.pull_bits)
        adds_trits = SERVED[exchange] == "gradients" and shares_scales(codec)
        if adds_trits:
            pulled = _sum_bytes(bucket, cluster)
        of_servers = _shares(bucket, codec, speed.bits, cluster.ranks, cluster.servers)
        cost = server(Volume(bucket.numel, pushed, pulled, of_servers), cluster)
        if adds_trits:  # the servers collect and return the scales first
            cost = replace(cost, ways=2 * cost.ways, handled=2 * cost.handled)
        return cost
    shares, info = None, HOOKED.get(exchange)  # None: an exchange of a paper's model
    if info is not None and info["has_owners"]:
        owners = cluster.machines if info["between_machines"] else cluster.ranks
        shares = _shares(bucket, codec, speed.bits, owners)
    if info is not None and info["adds_trits"]:
        pulled = _sum_bytes(bucket, cluster)
    return exchange_cost(exchange, Volume(bucket.numel, pushed, pulled, shares), cluster)


def _sum_bytes(bucket: LayerBucket, cluster: Cluster) -> float:
    """Sums of N trits are pulled in whole bits."""
    return _bytes(bucket.layers, (2 * cluster.ranks).bit_length())


def _shares(
    bucket: LayerBucket, codec: str, bits: float, ranks: int, servers: int = 0
) -> tuple[float, ...]:
    """Which share of the bucket's bytes the layout gives each owner: servers, or all ranks."""
    tensors = [(layer.name, list(layer.dims)) for layer in bucket.layers]
    bits_of = [0.0] * (ranks + servers)
    for segment in Layout(tensors, ranks + servers, codec, servers=servers).segments:
        bits_of[segment["owner"]] += segment["numel"] * (_RAW_BITS if segment["reason"] else bits)
    return tuple(bits / sum(bits_of) for bits in bits_of[ranks if servers else 0 :])


def _sent_bytes(layers: Sequence[Layer], codec: str, speed: CodecSpeed) -> float:
    """What a rank sends of its gradients: DDP in their dtype, gradwire's codecs in their bits."""
    if codec == DDP:
        return sum(layer.nbytes for layer in layers)
    return _bytes(layers, speed.bits)


def _bytes(layers: Sequence[Layer], bits: float) -> float:
    return sum(layer.numel * (_RAW_BITS if layer.goes_raw else bits) for layer in layers) / 8


def _transport(
    profile: Profile, cluster: Cluster, cost: Cost, exchange: str
) -> tuple[float, float]:
    """Seconds of handling messages, and of moving bytes through the system (which goes on while
    the link sends)."""
    transport = profile.transport
    if exchange != DDP:
        return (
            cost.handled * transport.message_seconds,
            cost.rank_bytes * transport.byte_seconds,
        )
    # A ring of more ranks takes more hops than that of the profile's workers.
    hops = (cluster.ranks - 1) / max(1, profile.workers - 1)
    return (
        hops * transport.allreduce_seconds,
        cost.rank_bytes * transport.allreduce_byte_seconds,
    )
