"""What `gradwire plan` predicts: against the simulation and the core's counts, and on links that
pass a burst at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradwire._core import Layout
from gradwire._core import exchange_cost as core_cost
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.costs import Volume, exchange_cost
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import CodecSpeed, Layer, MessageCosts
from gradwire_lab.plan.simulate import simulate
from gradwire_lab.plan.tokens import Tokens
from test_plan import FREE, profile_of

VALUES = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)


def test_a_layer_goes_raw_where_a_layout_sends_it_raw() -> None:
    for dims in ((256,), (16, 16), (15, 17), (1, 256), (1, 255), (10_000,), (3, 3, 64, 64)):
        layout = Layout([("layer", list(dims))], 1, "int8")
        assert Layer("layer", dims, 0.0).goes_raw == bool(layout.segments[0]["reason"]), dims


def test_buckets_are_ready_with_their_last_gradient() -> None:
    profile = profile_of(4_000_000, 8)  # 2 MB each
    buckets = cut_buckets(profile, bucket_bytes=3_000_000)
    assert [len(bucket.layers) for bucket in buckets] == [2, 2, 2, 2]
    assert [bucket.ready for bucket in buckets] == pytest.approx([0.06, 0.08, 0.10, 0.12])
    by_default = [len(bucket.layers) for bucket in cut_buckets(profile)]
    assert by_default == [1, 7], "1 MiB, then 25 MiB"


@pytest.mark.parametrize("per_machine", [1, 2, 4])
@pytest.mark.parametrize("exchange", ["sharded", "ring", "broadcast", "hierarchical"])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_the_prediction_is_that_of_the_simulation(
    exchange: str, codec: str, per_machine: int
) -> None:
    """Codecs of a fixed size, of known speed: the formulas against the exchanges themselves."""
    speed = CodecSpeed(2e-9, 1e-9, {"raw": 32.0, "bf16": 16.0}[codec])
    profile = replace(profile_of(800_000, 2), codecs={codec: speed})
    for machines in (2, 4):
        for bandwidth, latency, local in ((1e8, 1e-4, 1e9), (1e10, 1e-4, None), (1e8, 0.1, None)):
            buckets = cut_buckets(profile)
            cluster = Cluster(machines * per_machine, bandwidth, latency, per_machine, local)
            predicted = predict(profile, cluster, codec, exchange, buckets)
            simulated = simulate(
                cluster,
                codec,
                exchange,
                buckets,
                VALUES,
                cost=lambda text: (2e-9, 1e-9) if text == codec else (0.0, 0.0),
            )
            end = max(simulated.seconds, profile.forward_seconds + profile.backward_seconds)
            # Rings enter a machine at one rank, and the others send ahead to their neighbours. The
            # next bucket is encoded meanwhile, which matters where many ranks are decoded.
            within = 0.06 if exchange == "broadcast" else 0.05
            if exchange == "ring" and per_machine > 1 and latency == 0.1:
                within = 0.15
            assert predicted.seconds == pytest.approx(end + profile.rest_seconds, rel=within)
            if per_machine == 1 and exchange != "hierarchical":  # else ranks differ
                assert predicted.sent_bytes == pytest.approx(simulated.bytes_sent, rel=0.01)


@pytest.mark.parametrize("per_machine", [1, 2, 4])
def test_ddp_is_a_ring_of_raw_values(per_machine: int) -> None:
    profile = replace(profile_of(800_000, 2), codecs={})
    buckets = cut_buckets(profile, 2**40)
    for latency, local in ((0.0, 1e9), (0.1, None)):
        cluster = Cluster(4 * per_machine, 1e8, latency, per_machine, local)
        predicted = predict(profile, cluster, DDP, DDP, buckets)
        simulated = simulate(cluster, "raw", "ring", buckets, VALUES)
        whole = simulated.seconds + profile.rest_seconds
        assert predicted.seconds == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("exchange", ["sharded", "ring", "broadcast", "hierarchical"])
def test_ranks_of_one_machine_do_not_wait_for_the_network(exchange: str) -> None:
    profile = profile_of()
    near, far = (
        predict(profile, Cluster(4, 1e8, latency, 4), "raw", exchange, cut_buckets(profile))
        for latency in (0.0, 1.0)
    )
    assert near == far


@pytest.mark.parametrize(("ranks", "per_machine"), [(8, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("exchange", ["sharded", "ring"])
def test_uneven_shares_are_predicted(exchange: str, ranks: int, per_machine: int) -> None:
    """LeNet's tensors in 8 shares: one is twice as large as the mean."""
    dims = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    layers = tuple(Layer(f"layer{i}", shape, 0.0) for i, shape in enumerate(reversed(dims)))
    profile = replace(profile_of(), layers=layers, codecs={"raw": FREE})
    buckets, cluster = cut_buckets(profile), Cluster(ranks, 1e7, 0.0, per_machine, 1e9)
    predicted = predict(profile, cluster, "raw", exchange, buckets)
    simulated = simulate(cluster, "raw", exchange, buckets, VALUES)
    if per_machine == 1:
        even = 2 * 7 / 8 * 4 * profile.numel
        assert predicted.wire_seconds > 1.3 * cluster.link_seconds(even), "shares are uneven"
    whole = simulated.seconds + profile.rest_seconds
    # Pulls of small shards delay the pushes of the largest.
    within = 0.25 if (exchange, per_machine) == ("sharded", 4) else 0.1
    assert predicted.seconds == pytest.approx(whole, rel=within)


def test_messages_are_sent_ahead_over_long_links() -> None:
    """bench/long_links.py: 12 buckets, each two ways of 20 ms, took 556 ms, and 330 since."""
    profile = replace(profile_of(100_000, 12), codecs={"raw": FREE})
    cluster = Cluster(4, 1e9, 0.02)
    buckets = cut_buckets(profile, 1)
    of_all = predict(profile, cluster, "raw", "sharded", buckets)
    of_one = predict(profile, cluster, "raw", "sharded", cut_buckets(profile, 2**40))
    assert of_one.exposed_seconds == pytest.approx(0.04, rel=0.2)
    simulated = simulate(cluster, "raw", "sharded", buckets, VALUES)
    backward_end = profile.forward_seconds + profile.backward_seconds
    for exposed in (of_all.exposed_seconds, simulated.seconds - backward_end):
        assert 0.12 < exposed < 0.3, "half of 12 ways there and back, less the backward pass"


def test_an_exchange_is_hidden_by_the_backward_pass() -> None:
    """With many small buckets, only the last is exchanged after the backward pass."""
    profile, cluster = profile_of(), Cluster(2, 10e9)
    one = predict(profile, cluster, "raw", "sharded", cut_buckets(profile, 2**40))
    many = predict(profile, cluster, "raw", "sharded", cut_buckets(profile, 2_000_000))
    assert one.exposed_seconds == pytest.approx(one.wire_seconds)
    assert many.exposed_seconds == pytest.approx(one.wire_seconds / 8, rel=0.01)
    assert many.seconds == pytest.approx(profile.compute_seconds + many.exposed_seconds)


def test_more_ranks_less_bandwidth_and_more_latency_never_help() -> None:
    profile = profile_of()
    buckets = cut_buckets(profile)
    for codec, exchange in (
        (DDP, DDP),
        ("int8", "sharded"),
        ("int8", "ring"),
        ("raw", "broadcast"),
    ):
        before = 0.0
        for ranks in (2, 4, 8, 64, 512):
            now = predict(profile, Cluster(ranks, 1e8, 1e-4), codec, exchange, buckets).seconds
            slow = predict(profile, Cluster(ranks, 1e7, 1e-4), codec, exchange, buckets).seconds
            far = predict(profile, Cluster(ranks, 1e8, 1e-2), codec, exchange, buckets).seconds
            assert before <= now < slow
            assert now < far
            before = now


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("exchange", ["sharded", "ring", "broadcast", "terngrad"])
def test_work_and_bytes_are_those_that_the_core_states(exchange: str, ranks: int) -> None:
    """On ranks of equal shares; the core counts no headers."""
    volume = Volume(1000.0, 300.0, 500.0)
    cost = exchange_cost(exchange, volume, Cluster(ranks, None))
    scales = 0.0 if exchange == "terngrad" else None
    stated = core_cost(exchange, 0, ranks, 1000.0, 300.0, 500.0, scale_bytes=scales)
    assert cost.ways == stated["messages"]
    assert cost.handled == stated["messages_sent"] + stated["messages_received"]
    assert cost.encoded == pytest.approx(stated["values_encoded"])
    assert cost.decoded == pytest.approx(stated["values_decoded"])
    headers = cost.rank_bytes - stated["bytes_sent"]
    assert 0 < headers <= 47 * stated["messages_sent"] + 1e-9


def test_ddp_sends_gradients_in_their_own_dtype() -> None:
    """Of a model in bfloat16 half as many bytes, in buckets of twice as many values; gradwire's
    codecs send what they do for float32."""
    wide = profile_of()
    narrow = replace(wide, layers=tuple(replace(layer, bits=16) for layer in wide.layers))
    cluster = Cluster(4, 1e8)
    one, two = (
        [
            predict(each, cluster, codec, exchange, cut_buckets(each, 2**40))
            for codec, exchange in ((DDP, DDP), ("int8", "sharded"))
        ]
        for each in (wide, narrow)
    )
    assert (one[0].bits, two[0].bits) == (32, 16)
    assert two[0].sent_bytes == one[0].sent_bytes / 2
    assert two[0].wire_seconds == pytest.approx(one[0].wire_seconds / 2)
    assert one[1] == two[1]
    large = replace(wide, layers=tuple(replace(each, dims=(40_000, 100)) for each in wide.layers))
    half = replace(large, layers=tuple(replace(each, bits=16) for each in large.layers))
    assert [len(bucket.layers) for bucket in cut_buckets(large)] == [1, 2, 2, 2, 1]
    assert [len(bucket.layers) for bucket in cut_buckets(half)] == [1, 4, 3]


# Links with a token bucket


def test_tokens_are_saved_after_a_pause() -> None:
    """In seconds of a link whose bucket takes 4 of them to fill."""
    tokens = Tokens(4.0)
    assert tokens.save(9.0, 9.0, ways=1, pause=0.0) == 0.0, "it begins empty"
    tokens.fill(3.0)
    assert tokens.save(2.0, 2.0, ways=1, pause=0.0) == 2.0, "all bytes pass at once"
    assert tokens.held == 1.0
    tokens.fill(100.0)
    assert tokens.save(9.0, 9.0, ways=1, pause=0.0) == 4.0
    assert tokens.held == 0.0
    tokens.fill(100.0)
    assert tokens.save(21.0, 21.0, ways=3, pause=1.5) == 4.0 + 2 * 1.5, "between messages, too"
    tokens.fill(100.0)
    assert tokens.save(21.0, 21.0, ways=3, pause=50.0) == 3 * 4.0, "each message at most a burst"


def test_pushes_and_pulls_of_a_server_take_other_tokens() -> None:
    """The server receives for 10 seconds of its link, less those that it saves, and then sends."""
    tokens = Tokens(4.0)
    tokens.fill(100.0)
    assert tokens.save(20.0, 0.0, ways=2, pause=0.0) == 8.0
    # The bucket for pushes has filled during the pulls, the other one during these pushes.
    assert tokens.save(20.0, 0.0, ways=2, pause=0.0) == 8.0
    huge = Tokens(1000.0)
    huge.fill(5.0)
    # Pushes take 5 seconds, in which the bucket for pulls gets 5 more.
    assert huge.save(20.0, 0.0, ways=2, pause=0.0) == 5.0 + 10.0
    assert huge.held == 0.0
    # A quarter of the bytes goes the other way meanwhile.
    partly = Tokens(1000.0)
    assert partly.save(20.0, 5.0, ways=2, pause=0.0) == 10.0 - 2.5


def test_a_burst_is_left_out_of_an_exchange() -> None:
    profile, link = profile_of(), Cluster(2, 1e8)
    for buckets in (cut_buckets(profile, 2**40), cut_buckets(profile, 2_000_000)):
        plain = predict(profile, link, "raw", "broadcast", buckets)
        for burst in (5_000, 200_000):
            shaped = replace(link, burst=burst)
            assert shaped.burst_seconds == burst * 8 / 1e8
            quick = predict(profile, shaped, "raw", "broadcast", buckets)
            # Link seconds before the first bucket; the link is busy from then on.
            saved = min(shaped.burst_seconds, profile.rest_seconds + buckets[0].ready)
            assert plain.wire_seconds - quick.wire_seconds == pytest.approx(saved)
            assert plain.seconds - quick.seconds == pytest.approx(saved)
            assert quick.sent_bytes == plain.sent_bytes
        small = predict(profile, replace(link, burst=10**9), "raw", "broadcast", buckets)
        assert small.wire_seconds > 0, "there is no time to fill the bucket in a step"
    few = replace(profile, layers=(Layer("a", (100, 10), 0.01),))
    quick = predict(few, Cluster(2, 1e8, burst=10_000), "raw", "sharded", cut_buckets(few))
    assert quick.wire_seconds == 0.0
    assert quick.seconds == few.compute_seconds


@pytest.mark.parametrize("exchange", ["sharded", "ring", "broadcast"])
@pytest.mark.parametrize("values", [8_000, 80_000])
@pytest.mark.parametrize("message_seconds", [0.0, 2e-4])
def test_a_burst_saves_what_it_saves_in_the_simulation(
    exchange: str, values: int, message_seconds: float
) -> None:
    """Also of uneven shares: 4 layers for 3 ranks."""
    made = profile_of(values, 4)
    transport = MessageCosts(message_seconds, 0.0, 0.0, 0.0)
    profile = replace(made, codecs={"raw": FREE}, transport=transport)
    for bucket_bytes in (2**40, 2 * values):
        buckets = cut_buckets(profile, bucket_bytes)
        for latency in (0.0, 0.02):
            for burst in (1514, 4542, 30_000):
                cluster = Cluster(3, 1e7, latency, burst=burst)
                predicted = predict(profile, cluster, "raw", exchange, buckets)
                done = [
                    simulate(
                        cluster,
                        "raw",
                        exchange,
                        buckets,
                        VALUES,
                        message_seconds=message_seconds,
                        pause=profile.rest_seconds,
                        steps=steps,
                    ).seconds
                    for steps in (3, 4)
                ]
                fourth = 4 * done[1] - 3 * done[0]  # the first finds full buckets
                whole = max(fourth, profile.compute_seconds - profile.rest_seconds)
                assert predicted.seconds == pytest.approx(whole + profile.rest_seconds, rel=0.1)
