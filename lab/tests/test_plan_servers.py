"""Dedicated servers in `gradwire plan`: their costs against those of the exchange, the advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cli_runner
from gradwire_lab.plan.advise import make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.costs import Volume, server
from gradwire_lab.plan.predict import cut_buckets, join, predict
from gradwire_lab.plan.profile import CodecSpeed, Layer, PlanError, Profile
from gradwire_lab.plan.simulate import Simulated, simulate
from test_plan import FREE, profile_of

VALUES = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
NUMEL = 800_000


def simulated(
    profile: Profile, cluster: Cluster, codec: str = "raw", exchange: str = "server", **cost: float
) -> Simulated:
    """Gradients are there at once; the codec takes so many seconds a value."""
    each = (cost.get("encode", 0.0), cost.get("decode", 0.0))
    whole = replace(join(cut_buckets(profile)), ready=0.0)
    return simulate(cluster, codec, exchange, [whole], VALUES, cost=lambda _: each)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (4, 2), (2, 4), (8, 4)])
def test_costs_are_those_of_the_exchange(workers: int, servers: int) -> None:
    """The layers are equal, so the servers' shares are."""
    profile, cluster = profile_of(NUMEL, 8), Cluster(workers, None, servers=servers)
    cost = server(Volume(NUMEL, 4 * NUMEL, 4 * NUMEL), cluster)
    done = simulated(profile, cluster)
    assert cost.ways == done.longest_way
    assert done.messages == 2 * workers * servers
    assert cost.rank_bytes == pytest.approx(done.bytes_sent, rel=1e-3)
    # Without a limit of the network, a step is what comes one after the other in the codecs.
    assert simulated(profile, cluster, encode=1.0).seconds == pytest.approx(cost.encoded)
    assert simulated(profile, cluster, decode=1.0).seconds == pytest.approx(cost.decoded)
    # The busiest link: here nothing but bytes takes time.
    slow = replace(cluster, bandwidth=1e6)
    assert slow.link_seconds(cost.way_bytes) == pytest.approx(
        simulated(profile, slow).seconds, rel=0.02
    )


@pytest.mark.parametrize("per_machine", [1, 2, 4])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_prediction_is_that_of_the_simulation(
    servers: int, codec: str, per_machine: int
) -> None:
    speed = CodecSpeed(2e-9, 1e-9, {"raw": 32.0, "bf16": 16.0}[codec])
    profile = replace(profile_of(NUMEL, 4), codecs={codec: speed})
    buckets = cut_buckets(profile)
    for machines in (2, 4):
        for bandwidth, latency in ((1e8, 1e-4), (1e10, 1e-4), (1e8, 0.1)):
            ranks = machines * per_machine
            cluster = Cluster(ranks, bandwidth, latency, per_machine, servers=servers)
            predicted = predict(profile, cluster, codec, "server", buckets)
            done = simulated(profile, cluster, codec, encode=2e-9, decode=1e-9)
            whole = profile.compute_seconds + done.seconds
            assert predicted.seconds == pytest.approx(whole, rel=0.05)


def test_pulls_of_servers_have_their_own_bits() -> None:
    for cluster, exchange, share in (
        (Cluster(4, 1e6, servers=1), "server", 0.75),
        (Cluster(4, 1e6), "sharded", 1.0),
    ):
        seconds = []
        for pull_bits in (None, 1.0):
            codec = replace(FREE, bits=2.0, pull_bits=pull_bits)
            profile = replace(profile_of(NUMEL), codecs={"raw": FREE, "3lc": codec})
            done = predict(profile, cluster, "3lc", exchange, cut_buckets(profile))
            seconds.append(done.wire_seconds)
        assert seconds[1] == pytest.approx(share * seconds[0], rel=0.01)


@pytest.mark.parametrize("burst", [4542, 100_000, 10**7])
def test_a_burst_is_for_pushes_and_for_pulls(burst: int) -> None:
    """A server's link takes nothing but pushes, and then sends nothing but pulls. The workers'
    steps compute long enough to fill all buckets, but for the largest."""
    profile = replace(profile_of(NUMEL, 4), codecs={"raw": FREE})
    cluster = Cluster(4, 1e8, servers=2, burst=burst)
    predicted = predict(profile, cluster, "raw", "server", cut_buckets(profile))
    whole = join(cut_buckets(profile))
    done = [
        simulate(
            cluster, "raw", "server", [whole], VALUES, steps=steps, pause=profile.rest_seconds
        ).seconds
        for steps in (3, 4)
    ]
    fourth = 4 * done[1] - 3 * done[0]
    assert predicted.seconds == pytest.approx(fourth + profile.rest_seconds, rel=0.05)


def test_servers_do_not_share_machines() -> None:
    """So workers of one machine wait for the network, too."""
    profile = profile_of()
    near, far = (
        predict(profile, Cluster(4, 1e8, latency, 4, servers=1), "raw", "server", [join(b)])
        for latency, b in ((0.0, cut_buckets(profile)), (1.0, cut_buckets(profile)))
    )
    assert far.seconds - near.seconds == pytest.approx(2.0)


@pytest.mark.parametrize("latency", [0.0, 0.1])
def test_sums_of_trits_and_their_scales_are_predicted(latency: float) -> None:
    profile = replace(profile_of(NUMEL, 4), codecs={"terngrad": replace(FREE, bits=2.0)})
    cluster = Cluster(4, 1e7, latency, servers=2)
    buckets = cut_buckets(profile)
    exchange = "server:pulls=gradients"
    predicted = predict(profile, cluster, "terngrad", exchange, buckets)
    done = simulated(profile, cluster, "terngrad", exchange)
    assert done.longest_way == 4
    assert predicted.seconds == pytest.approx(profile.compute_seconds + done.seconds, rel=0.03)
    other = predict(profile, cluster, "terngrad", "server", buckets)
    assert other.wire_seconds < predicted.wire_seconds, "trits both ways"


def test_uneven_shares_are_predicted() -> None:
    """LeNet's largest tensor is 78 % of it, and whole on one of 3 servers."""
    dims = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    layers = tuple(Layer(f"layer{i}", shape, 0.0) for i, shape in enumerate(reversed(dims)))
    profile = replace(profile_of(), layers=layers, codecs={"raw": FREE})
    one, three = (
        predict(profile, Cluster(8, 1e7, servers=n), "raw", "server", cut_buckets(profile))
        for n in (1, 3)
    )
    assert three.wire_seconds == pytest.approx(48000 / profile.numel * one.wire_seconds, rel=0.01)
    done = simulated(profile, Cluster(8, 1e7, servers=3))
    assert three.wire_seconds == pytest.approx(done.seconds, rel=0.1)


def test_servers_take_part_in_the_advice_only_where_there_are_some() -> None:
    profile = profile_of(800_000, 8)
    assert "server" not in {p.exchange for p in make_plan(profile, Cluster(8, 1e8)).predictions}
    plan = make_plan(profile, Cluster(8, 1e8, servers=2))
    assert {p.codec for p in plan.predictions if p.exchange == "server"} == set(profile.codecs)
    asked = make_plan(profile, Cluster(8, 1e8, servers=2), ["bf16"], ["server:pulls=gradients"])
    assert {p.exchange for p in asked.predictions} == {"server:pulls=gradients", "ddp"}
    many = make_plan(profile, Cluster(2, 1e8, servers=8), ["int8"], ["server"])
    assert "with exchange server and 8 servers: " in many.advice()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile_of().write(path)
    return path


def test_the_command_takes_servers(file: Path) -> None:
    arguments = ["plan", "--profile", file, "--bandwidth", "100mbit", "--ranks", 4]
    result = cli_runner.run(*arguments, "--servers", 2, "--codec", "int8")
    assert "4 ranks on 4 machines and 2 servers" in result.out
    document = cli_runner.run(
        *arguments, "--servers", 2, "--exchange", "server", "-c", "int8", "--json"
    ).json
    assert document["cluster"]["servers"] == 2
    assert {p["exchange"] for p in document["predictions"]} == {"server", "ddp"}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--exchange", "server"], "--servers 1, or more"),
        (["--exchange", "server", "--servers", "0"], "greater than or equal to 1"),
        (["--exchange", "server", "--servers", "101"], "less than or equal to 100"),
        (["--servers", "9"], "has 8: take 8 or fewer"),
        (["--exchange", "ring", "--servers", "2"], "--exchange server, not with ring"),
        (["--servers", "2", "--every", "4"], "exchange in every step"),
        (["--exchange", "server", "--every", "4"], "exchange in every step"),
        (["--exchange", "server:staleness=1", "--servers", "1"], "staleness and --barrier tensor"),
    ],
)
def test_nonsense_is_an_error_that_says_what_it_needs(
    file: Path, arguments: list[str], needed: str
) -> None:
    result = cli_runner.run("plan", "--profile", file, "--bandwidth", "1gbit", *arguments)
    assert result.code in (1, 2)
    said = " ".join(result.err.replace("│", " ").split())
    assert needed in said
    assert "Traceback" not in said


def test_a_negative_number_of_servers_is_refused() -> None:
    with pytest.raises(PlanError, match="--servers -1"):
        Cluster(2, 1e8, servers=-1)
