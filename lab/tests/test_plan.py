"""`gradwire plan`: predictions, advice, and what it says about nonsense."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import cli_runner
from gradwire import machine
from gradwire._core import Layout
from gradwire._core import exchange_cost as core_cost
from gradwire_lab.cli import plan as plan_command
from gradwire_lab.plan import assumed, measure, recorder
from gradwire_lab.plan.advise import MARGIN, make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.costs import Volume, exchange_cost
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import (
    CodecSpeed,
    Layer,
    MessageCosts,
    PlanError,
    Profile,
    read_profile,
)
from gradwire_lab.plan.simulate import simulate
from gradwire_lab.plan.tokens import Tokens

FREE = CodecSpeed(0.0, 0.0, 32.0)


def profile_of(values: int = 4_000_000, layers: int = 8) -> Profile:
    """Layers of equal size, each with 10 ms of backward pass; codecs that take no time."""
    return Profile(
        model="made",
        workers=4,
        forward_seconds=0.04,
        rest_seconds=0.01,
        layers=tuple(
            Layer(f"layer{i}", (values // layers // 100, 100), 0.01) for i in range(layers)
        ),
        codecs={
            "raw": FREE,
            "bf16": replace(FREE, bits=16.0),
            "int8": replace(FREE, bits=8.0),
            "3lc:s=1.00,coder=rice": replace(FREE, bits=0.4, pull_bits=0.3),
        },
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A profile as `gradwire plan --model` makes it, but for its numbers."""
    path = tmp_path / "profile.json"
    replace(profile_of(), how={"steps": 20}).write(path)
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = replace(
        profile_of(), transport=MessageCosts(1e-4, 1e-9, 2e-4, 1e-9), how={"steps": 5}
    )
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


LAYER = {"name": "x", "dims": [1], "backward_seconds": 1}
SPEED = {"encode_seconds": 0, "decode_seconds": 0, "bits": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "other"}, "its `kind` is other, not gradwire-profile"),
        ({"kind": None}, "`kind` is null, not a text"),
        ({"layers": []}, "no layers"),
        ({"layers": [LAYER, LAYER]}, "two of its layers have the name x"),
        ({"layers": {}}, "`layers` is an object, not a list"),
        ({"layers": [{"name": "x"}]}, "`dims` of layer 1 is missing"),
        ({"layers": ["x"]}, "layer 1 is a text, not an object"),
        ({"layers": [LAYER | {"dims": 3}]}, "`dims` of layer 1 is a whole number, not a list"),
        ({"layers": [LAYER | {"dims": [0]}]}, r"`dims` of layer x is \[0\], not a list of numbers"),
        ({"layers": [LAYER | {"dims": [2.5]}]}, r"`dims` of layer x is \[2.5\]"),
        ({"layers": [LAYER | {"more": 1}]}, "`more` is no field of layer 1"),
        ({"forward_seconds": -1}, "`forward_seconds` is -1"),
        ({"forward_seconds": "1"}, "`forward_seconds` is a text, not a number"),
        ({"rest_seconds": math.nan}, "`rest_seconds` is nan"),
        ({"rest_seconds": 10**400}, "`rest_seconds` is 1000"),
        ({"codecs": []}, "`codecs` is a list, not an object"),
        ({"codecs": {"raw": 3}}, "codec raw is a whole number, not an object"),
        ({"codecs": {"raw": {"encode_seconds": 0}}}, "`decode_seconds` of codec raw is missing"),
        ({"codecs": {"raw": SPEED | {"bits": None}}}, "`bits` of codec raw is null, not a number"),
        ({"codecs": {"raw": SPEED | {"bits": -3}}}, "`bits` of codec raw is -3"),
        ({"codecs": {"raw": SPEED | {"bits": 0}}}, "`bits` of codec raw is 0"),
        ({"codecs": {"raw": SPEED | {"pull_bits": -1}}}, "`pull_bits` of codec raw is -1"),
        ({"codecs": {"raw": SPEED | {"pull_bits": "1"}}}, "`pull_bits` of codec raw is a text"),
        ({"transport": {"byte_seconds": True}}, "`byte_seconds` of transport is true or false"),
        ({"transport": 4}, "`transport` is a whole number, not an object"),
        ({"how": "quickly"}, "`how` is a text, not an object"),
        ({"workers": "x"}, "`workers` is a text, not a whole number"),
        ({"workers": 0}, "`workers` is 0"),
        ({"unknown": 1}, "`unknown` is no field of a profile"),
    ],
)
def test_a_file_with_nonsense_is_no_profile(
    file: Path, change: dict[str, object], why: str
) -> None:
    document = json.loads(file.read_text()) | change
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=why) as error:
        read_profile(file)
    assert "--profile-out" in str(error.value), "it says how to make one"


@pytest.mark.parametrize("name", ["kind", "layers", "codecs", "workers", "forward_seconds"])
def test_a_field_that_is_missing_is_named(file: Path, name: str) -> None:
    document = json.loads(file.read_text())
    del document[name]
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=f"is no profile: `{name}` is missing; "):
        read_profile(file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is cut off or no JSON .*"),
        (b'{"kind": "gradwire-prof', "it is cut off or no JSON .*"),
        (b"\xff\xfe", "it is cut off or no JSON .*"),
        (b"[1]", "it holds a list, not an object of JSON"),
        (b'{"kind": 1, "kind": 2}', "it is cut off or no JSON .a key occurs twice in an object."),
    ],
)
def test_a_file_that_is_no_json_is_no_profile(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    with pytest.raises(PlanError, match=f"is no profile: {why}; "):
        read_profile(file)


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


VALUES = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)


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
            # A rank that is done begins the next bucket, which plan does not know.
            buckets = cut_buckets(profile, 2**40 if latency == 0.1 else None)
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
            assert predicted.seconds == pytest.approx(end + profile.rest_seconds, rel=0.05)
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


def test_it_says_do_not_compress_where_it_does_not_pay() -> None:
    plan = make_plan(profile_of(), Cluster(4, 1e11))
    assert not plan.pays
    assert plan.advice().startswith("do not compress")
    slow = {"bf16": CodecSpeed(1e-6, 1e-6, 16.0)}
    advice = make_plan(replace(profile_of(), codecs=slow), Cluster(4, 1e11)).advice()
    assert advice.endswith("no codec is faster")
    # bf16 halves an exchange, but that is less than the margin of the step.
    profile = profile_of()
    fast = next(b for b in (1e8 * 1.1**i for i in range(200)) if not _pays(profile, b))
    assert (
        predict(profile, Cluster(4, fast), "bf16", "sharded", cut_buckets(profile)).seconds
        < predict(profile, Cluster(4, fast), DDP, DDP, cut_buckets(profile)).seconds
    )


def test_it_names_a_gain_that_is_too_small() -> None:
    plan = make_plan(profile_of(), Cluster(4, 2.5e10), ["bf16"])
    assert plan.predictions[0] is not plan.baseline
    assert "bf16 in" in plan.advice()
    assert "a gain below 10%" in plan.advice()


def _pays(profile: Profile, bandwidth: float) -> bool:
    return make_plan(profile, Cluster(4, bandwidth), ["bf16"]).pays


def test_of_equally_fast_codecs_it_takes_the_gentlest() -> None:
    profile = profile_of()
    for bandwidth in (1e7, 1e8, 1e9, 3e9):
        plan = make_plan(profile, Cluster(4, bandwidth))
        assert plan.pays
        assert plan.choice.seconds <= (1 + MARGIN) * plan.predictions[0].seconds
        for other in plan.predictions:
            if other.bits > plan.choice.bits:
                assert other.seconds > (1 + MARGIN) * plan.predictions[0].seconds
    choices = [make_plan(profile, Cluster(4, 1e7 * 1.3**i)).choice for i in range(36)]
    bits = [choice.bits for choice in choices]
    assert bits == sorted(bits), "the faster the network, the more bits"
    assert {"3lc:s=1.00,coder=rice", "int8", DDP} <= {choice.codec for choice in choices}


def test_a_ring_is_not_for_sparse_codecs_unless_asked_for() -> None:
    profile = profile_of()
    profile = replace(
        profile, codecs={**profile.codecs, "qgd": replace(FREE, bits=0.1), "small": FREE}
    )
    plan = make_plan(profile, Cluster(8, 1e8))
    rings = {p.codec for p in plan.predictions if p.exchange == "ring"}
    assert rings == {"raw", "bf16", "int8"}
    asked = make_plan(profile_of(), Cluster(8, 1e8), ["3lc:s=1.00,coder=rice"], ["ring"])
    assert [p.exchange for p in asked.predictions] == ["ring", DDP]


def test_the_exchange_terngrad_takes_its_codec_alone() -> None:
    profile = profile_of()
    profile = replace(profile, codecs={"bf16": FREE, "terngrad": replace(FREE, bits=2.0)})
    plan = make_plan(profile, Cluster(8, 1e8), exchanges=["terngrad", "sharded"])
    found = {(p.codec, p.exchange) for p in plan.predictions}
    pairs = {("terngrad", "terngrad"), ("terngrad", "sharded"), ("bf16", "sharded"), (DDP, DDP)}
    assert found == pairs


# The command


def test_the_command_prints_a_table_and_an_advice(file: Path) -> None:
    result = cli_runner.run("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8)
    assert result.code == 0, result.err
    assert "take codec 3lc:s=1.00,coder=rice with exchange" in result.out
    document = cli_runner.run(
        *("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8, "--json")
    ).json
    seconds = [prediction["seconds"] for prediction in document["predictions"]]
    assert seconds == sorted(seconds)
    assert document["pays"]
    assert document["choice"]["codec"] == "3lc:s=1.00,coder=rice"
    assert document["cluster"]["burst"] == 0
    shaped = cli_runner.run(
        *("plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 8, "--json"),
        *("--burst", 12_500),
    ).json
    assert shaped["cluster"] == document["cluster"] | {"burst": 12_500}
    fastest, before = shaped["predictions"][0], document["predictions"][0]
    assert fastest["wire_seconds"] < before["wire_seconds"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--bandwidth", "1gbit"], "--profile FILE"),
        (["--bandwidth", "1gbit"], "or --values 7B --compute 800ms"),
        (["--values", "7B", "--bandwidth", "1gbit"], "--values and --compute go together"),
        (["--profile", "FILE", "--compute", "1s"], "--values and --compute go together"),
        (["--profile", "FILE", "--values=7B", "--compute=1s"], "or one of --profile and --model"),
        (["--values", "7B", "--compute", "1s", "--workers=2"], "--workers goes with --model"),
        (["--values", "7B", "--compute", "1s"], "--bandwidth 100mbit"),
        (["--values", "7T", "--compute", "1s"], "--values: 7T is no number from 1, such as"),
        (["--values", "1.5", "--compute", "1s"], "1.5 is no number from 1"),
        (["--values", "-7B", "--compute", "1s"], "-7B is no number from 1"),
        (["--values", "7B", "--compute", "800"], "--compute: 800 is no time above 0 with its un"),
        (["--values", "7B", "--compute", "0ms"], "0ms is no time above 0"),
        (["--values", "7B", "--compute", "1h"], "such as 800ms, 1.5s or 2min"),
        (["--profile", "FILE", "--model", "lenet"], "give one of --profile and --model"),
        (["--profile", "FILE", "--workers", "4"], "--workers goes with --model"),
        (["--profile", "FILE", "--profile-steps=20"], "--profile-steps goes with --model"),
        (
            ["--model", "lenet", "--workers", "0", "--profile-out", "z.json"],
            "greater than or equal to 1",
        ),
        (["--model", "lenet", "--ranks", "0", "--profile-out", "z.json"], "cannot be 0 ranks"),
        (["--model", "lenet", "--codec", "foo", "--profile-out", "z.json"], "unknown codec"),
        (["--profile", "FILE"], "--bandwidth 100mbit"),
        (["--profile", "missing.json", "--bandwidth", "1gbit"], "missing.json"),
        (["--profile", "FILE", "--bandwidth", "0mbit"], "between 64kbit and 100gbit"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--ranks", "1"], "1 rank exchanges nothing"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--ranks=-3"], "cannot be -3 ranks: give"),
        (
            ["--profile", "FILE", "--bandwidth", "1gbit", "--latency", "-1"],
            "--latency -1: a message takes 0 m",
        ),
        (
            [*("--profile", "FILE", "--bandwidth", "1gbit"), "--ranks=8", "--ranks-per-machine=3"],
            "divides",
        ),
        (
            ["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "onebit"],
            "again with --codec onebit",
        ),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "foo"], "terngrad, stoch3"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--codec", "3lc:s=9"], "number in [1, 2)"),
        (["--profile", "FILE", "--bandwidth", "1gbit", "--exchange", "star"], "hierarchical"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--local-bandwidth=9"], "--local-bandwidth"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=-1"], "--burst -1: a link passes 0"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=10000000000000"], "up to 10000000000"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--burst=lots"], "as an integer"),
        (["--profile", "FILE", "--bandwidth=none", "--burst=5000"], "or leave --burst out"),
        (["--model", "lenet", "--profile-out", "no/folder/x.json"], "no/folder/x.json"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=tree", "-c", "bf16"], "sharded"),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=ddp", "-c", "bf16"], "sharded"),
        (
            ["--profile", "FILE", "--bandwidth=1gbit", "--exchange=terngrad", "-c", "bf16"],
            "takes the codec terngrad, not bf16",
        ),
        (["--profile", "FILE", "--bandwidth=1gbit", "--exchange=terngrad"], "--codec terngrad"),
        (["--model", "lenet", "--workers", "1", "--bandwidth", "1gbit"], "give --ranks"),
    ],
)
def test_nonsense_is_an_error_that_says_what_it_needs(
    file: Path, arguments: list[str], needed: str
) -> None:
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    result = cli_runner.run("plan", *given)
    assert result.code in (1, 2)
    said = " ".join(result.err.replace("│", " ").split())
    assert needed in said
    assert "Traceback" not in said


def test_a_model_that_is_not_here_is_planned_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = MessageCosts(1e-4, 1e-10, 1e-4, 1e-10)
    monkeypatch.setattr(measure, "measure_transport", lambda *_: measured)
    arguments = [
        *("plan", "--values", "7B", "--compute", "800ms", "--bandwidth", "10gbit"),
        *("--ranks", 8, "-c", "bf16", "-c", "int8"),
    ]
    made = cli_runner.run(*arguments, "--json").json
    assert (made["values"], made["compute_seconds"]) == (7_000_000_000, pytest.approx(0.8))
    by_way = {(p["codec"], p["exchange"]): p for p in made["predictions"]}
    half = by_way["bf16", "sharded"]
    assert half["bits"] == pytest.approx(16, abs=0.01)
    assert 1e-11 < half["codec_seconds"] / 7e9 < 1e-7, "the codecs are measured"
    assert by_way[DDP, DDP]["wire_seconds"] == pytest.approx(2 * 7 / 8 * 28e9 * 8 / 1e10, rel=0.1)
    shown = cli_runner.run(*arguments)
    assert shown.code == 0, shown.err
    assert "7,000,000,000 values, 8 ranks on 8 machines; a step computes 800 ms" in shown.out
    assert "assumed: a third of the step is the forward pass" in shown.out
    assert "messages cost nothing" not in shown.out
    # Without PyTorch nobody knows what messages cost.
    monkeypatch.setattr(assumed, "find_spec", lambda _: None)
    assert "In doubt: in the profile gradwire's messages cost" in cli_runner.run(*arguments).out


@pytest.mark.parametrize("values", [1, 4095, 270_001, 25_600_000, 7_000_000_000, 10**12])
def test_the_layers_of_an_assumed_model_have_all_its_values(values: int) -> None:
    layers = assumed._equal_layers(values, 2.0)
    assert sum(layer.numel for layer in layers) == values
    assert sum(layer.backward_seconds for layer in layers) == pytest.approx(2.0)
    assert len(layers) <= 1024
    assert len(layers) >= 8 or values < 8 * 4096


def test_doubts_stand_in_the_advice() -> None:
    """A meter that found nothing made `raw` look faster than DDP."""
    found_nothing = replace(
        profile_of(), transport=MessageCosts(0.0, 0.0, 0.05, 0.0), how={"steps": 20}
    )
    plan = make_plan(found_nothing, Cluster(4, 1e10), ["raw"])
    assert plan.choice.codec == "raw"
    assert "1.33 times as fast" not in plan.advice().partition("In doubt: ")[2]
    assert "In doubt: in the profile gradwire's messages cost nothing" in plan.advice()
    assert plan.advice().endswith("measure the model again, on an idle machine")
    lacking = make_plan(profile_of(), Cluster(4, 1e7))
    assert lacking.advice().endswith("`gradwire plan --model` made on that machine")
    measured = replace(profile_of(), transport=MessageCosts(1e-5, 0.0, 1e-5, 0.0))
    assert make_plan(measured, Cluster(4, 1e7)).doubts == ()
    # DDP is the one that looks too fast.
    slow = replace(profile_of(), transport=MessageCosts(1e-3, 0.0, 0.0, 0.0))
    plan = make_plan(slow, Cluster(4, 1e11))
    assert not plan.pays
    assert "DDP's messages cost nothing" in plan.advice()


def test_a_profile_that_nobody_measured_gets_a_codec_by_hand(file: Path) -> None:
    profile_of().write(file)
    for given, codec in ((["--codec", "onebit"], "onebit"), (["--exchange=terngrad"], "terngrad")):
        result = cli_runner.run("plan", "--profile", file, "--bandwidth", "1gbit", *given)
        assert result.err.endswith(f"add {codec} to `codecs` of the file\n")
        assert result.code == 1


def test_a_busy_machine_is_said(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its profile is used, and in every plan with it."""
    cores = len(os.sched_getaffinity(0))
    made = tmp_path / "made.json"
    for load, is_busy in ((cores / 2, False), (cores / 2 + 0.25, True)):
        how = {"load_average": load, "machine": {"cores": cores}}
        measured = replace(profile_of(), how=how)
        monkeypatch.setattr(plan_command, "load_average", lambda load=load: load)
        monkeypatch.setattr(measure, "measure_profile", lambda *_, measured=measured: measured)
        result = cli_runner.run("plan", "--model", "lenet", "--workers", 1, "--profile-out", made)
        assert result.code == 0, result.err
        assert ("keeps this machine busy" in result.err) == is_busy
        said = cli_runner.run("plan", "--profile", made, "--bandwidth", "1gbit").out
        assert ("its times are too long" in said) == is_busy
        assert ("In doubt: other work kept the machine busy" in said) == is_busy
    assert machine.load_average() is not None


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


def test_a_profile_has_the_dtype_of_each_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    names = [name for name, _ in model.named_parameters()]
    marks = {recorder._FORWARD: 1.0, recorder._END: 3.0}
    marks |= {recorder._GRADIENT + name: 2.0 for name in names}
    found = recorder.profile_of("m", model, [[marks] * 4])
    assert {layer.name: layer.bits for layer in found.layers} == {
        name: 16 if name.startswith("1") else 32 for name in names
    }
