"""How `advise` fits the model of time to steps that were taken, and what it makes of messages. All
times are injected."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from gradwire.local_schedule import Schedule
from gradwire_lab.plan import links
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.fit import ALONE, HOOK, LOCAL, fit
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import CodecSpeed, LocalCosts, MessageCosts, Profile
from test_plan import profile_of

CODEC = "3lc:s=1.00,coder=rice"
CLUSTERS = [Cluster(n, r, 1e-4, burst=5000) for n in (2, 4) for r in (1e7, 1e8, 1e9)]
SPEEDS = {
    "int8": CodecSpeed(1e-9, 5e-10, 8.0),
    CODEC: CodecSpeed(2e-9, 5e-10, 0.4),
}
PARTS = replace(profile_of(), codecs=SPEEDS, transport=MessageCosts(1e-4, 1e-10, 1e-4, 1e-10))


def step_of(profile: Profile, cluster: Cluster, codec: str, schedule: Schedule | None) -> float:
    exchange = DDP if codec == DDP else "sharded"
    return predict(profile, cluster, codec, exchange, cut_buckets(profile), schedule).seconds


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_the_parts_lack_is_found_in_steps(cluster: Cluster) -> None:
    """Exchanges and all-reduces that take longer in a step than alone."""
    costs = replace(PARTS.transport, exchange_seconds=3e-3, allreduce_seconds=7e-3)
    truth = replace(PARTS, transport=costs)
    taken = {
        ALONE: [truth.compute_seconds] * 5,
        DDP: [step_of(truth, cluster, DDP, None)] * 5,
        HOOK: [step_of(truth, cluster, CODEC, None)] * 5,
    }
    fitted = fit(PARTS, cluster, CODEC, taken)
    for codec in (DDP, "int8", CODEC):
        expected = step_of(truth, cluster, codec, None)
        assert step_of(fitted, cluster, codec, None) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_local_steps_add_is_found_in_steps(cluster: Cluster, every: int) -> None:
    schedule = Schedule(every)
    costs = LocalCosts(step_seconds=4e-3 if every > 1 else 0.0, exchange_seconds=2e-2)
    truth = replace(PARTS, local=costs)
    step = truth.compute_seconds + costs.step_seconds
    mean = step_of(truth, cluster, CODEC, schedule)
    last = every * mean - (every - 1) * step
    taken = {ALONE: [truth.compute_seconds] * 5, LOCAL: ([step] * (every - 1) + [last]) * 5}
    fitted = fit(PARTS, cluster, CODEC, taken, every)
    assert fitted.local.step_seconds == pytest.approx(costs.step_seconds, abs=1e-6)
    assert fitted.local.exchange_seconds == pytest.approx(costs.exchange_seconds, abs=1e-3)
    for codec in ("int8", CODEC):
        expected = step_of(truth, cluster, codec, schedule)
        assert step_of(fitted, cluster, codec, schedule) == pytest.approx(expected, rel=0.01)


def test_local_steps_cost_what_they_add() -> None:
    for every in (1, 2, 8):
        plain = step_of(PARTS, CLUSTERS[1], "int8", Schedule(every))
        costs = LocalCosts(step_seconds=4e-3, exchange_seconds=2e-2)
        added = step_of(replace(PARTS, local=costs), CLUSTERS[1], "int8", Schedule(every)) - plain
        # A link with a token bucket fills it in the longer steps.
        assert added == pytest.approx(4e-3 + 2e-2 / every, rel=0.05)
        assert step_of(replace(PARTS, local=costs), CLUSTERS[1], "int8", None) == step_of(
            PARTS, CLUSTERS[1], "int8", None
        )


def test_other_work_on_the_machine_changes_little() -> None:
    """Fewer than half of the steps were held up: two that all ways share, and one of the hook."""
    cluster = CLUSTERS[1]
    costs = replace(PARTS.transport, exchange_seconds=3e-3)
    step = step_of(replace(PARTS, transport=costs), cluster, CODEC, None)
    alone, hook = [PARTS.compute_seconds] * 7, [step] * 7
    quiet = fit(PARTS, cluster, CODEC, {ALONE: alone, HOOK: hook})
    for i in (0, 1):
        alone[i], hook[i] = alone[i] + step, hook[i] + step
    hook[3] *= 20
    busy = fit(PARTS, cluster, CODEC, {ALONE: alone, HOOK: hook})
    assert quiet.transport.exchange_seconds == pytest.approx(3e-3, rel=1e-3)
    assert busy.transport.exchange_seconds == pytest.approx(3e-3, rel=1e-3)


def test_steps_that_were_quicker_than_their_parts_change_nothing() -> None:
    alone = PARTS.compute_seconds
    quick = [alone] * 4
    assert fit(PARTS, CLUSTERS[0], CODEC, {ALONE: quick, DDP: quick, HOOK: quick}) == PARTS
    assert fit(PARTS, CLUSTERS[0], CODEC, {ALONE: quick, LOCAL: quick * 2}, 2) == PARTS
    assert fit(PARTS, CLUSTERS[0], CODEC, {ALONE: quick}) == PARTS, "no other way was short enough"


# Links


def shaped(rate: float, latency: float, burst: int) -> Callable[[int], float]:
    """Seconds of a message over a link with a full token bucket. rate: bytes a second."""
    return lambda size: latency + max(0, size - burst) / rate


@pytest.mark.parametrize("burst", [0, 4_000, 12_000, 120_000])
@pytest.mark.parametrize("latency", [1e-4, 3e-2])
@pytest.mark.parametrize("rate", [1.25e6, 1.25e7, 1.25e8])
def test_rate_and_burst_of_a_link_are_found(
    monkeypatch: pytest.MonkeyPatch, rate: float, latency: float, burst: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    send = shaped(rate, latency, burst)
    found, size = links._rate(send, 0.4)
    assert found == pytest.approx(8 * rate)
    assert links._burst(send, 8 * rate, latency, size) == pytest.approx(burst, abs=1)


def test_a_rank_asks_for_the_bytes_of_another_before_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise two ranks of Gloo send one after the other, and a link seems half as fast."""
    done: list[str] = []

    class Work:
        def wait(self) -> None:
            done.append("wait")

    class Ranks:
        ReduceOp = dist.ReduceOp

        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                done.append(name)
                return {"get_rank": 0, "get_world_size": 2}.get(name, Work())

            return call

    ranks = Ranks()
    monkeypatch.setattr(links, "dist", ranks)
    monkeypatch.setattr(links, "time_together", lambda call: (ranks.barrier(), call(), 0.5)[-1])
    assert links._sender(lambda rank: 1 - rank)(1000) == 0.5
    order: Sequence[str] = [name for name in done if name in ("irecv", "barrier", "isend")]
    assert order == ["irecv", "barrier", "isend"]
