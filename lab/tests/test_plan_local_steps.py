"""Local steps in `gradwire plan`: the mean step, fragments, delay, and the advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cli_runner
from gradwire.errors import sends_late
from gradwire.local_schedule import Schedule
from gradwire_lab.plan.advise import make_plan
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.predict import DDP, cut_buckets, predict
from gradwire_lab.plan.profile import Profile
from gradwire_lab.plan.waiting import exposed_seconds
from test_plan import profile_of

CLUSTER = Cluster(4, 1e8, 1e-3)


def layered() -> Profile:
    """A layer for each tensor, as the names of a module's parameters are."""
    profile = profile_of()
    layers = [vars(layer) | {"name": f"{layer.name}.weight"} for layer in profile.layers]
    return Profile(
        **vars(profile) | {"layers": tuple(type(profile.layers[0])(**each) for each in layers)}
    )


def test_an_exchange_is_shared_by_the_steps_until_the_next() -> None:
    profile = profile_of()
    together = cut_buckets(profile, 2**40)
    plain = predict(profile, CLUSTER, "int8", "sharded", together)
    for every in (2, 5, 100):
        local = predict(profile, CLUSTER, "int8", "sharded", together, Schedule(every))
        assert local.seconds - profile.compute_seconds == pytest.approx(
            plain.exposed_seconds / every
        )
        assert local.sent_bytes == pytest.approx(plain.sent_bytes / every)
        assert local.wire_seconds == pytest.approx(plain.wire_seconds / every)
        assert (plain.every, local.every) == (1, every)


def test_every_exchange_finds_full_token_buckets() -> None:
    profile, schedule = layered(), Schedule(4, fragments=2)
    shaped = replace(CLUSTER, burst=12_500)  # filled in a millisecond
    for exchange, ways in (("broadcast", 1), ("sharded", 2)):
        plain, quick = (
            predict(profile, cluster, "int8", exchange, cut_buckets(profile), schedule)
            for cluster in (CLUSTER, shaped)
        )
        # The latency of a message is a millisecond, too.
        saved = 2 * ways * shaped.burst_seconds / 4
        assert plain.exposed_seconds - quick.exposed_seconds == pytest.approx(saved)


def test_the_buckets_of_ddp_do_not_matter() -> None:
    """The whole model is exchanged after the backward pass, which hides nothing."""
    profile = profile_of()
    some, one = (
        predict(profile, CLUSTER, "raw", "ring", cut_buckets(profile, size), Schedule(4))
        for size in (2_000_000, 2**40)
    )
    assert some == one


@pytest.mark.parametrize(
    ("schedule", "seconds", "waiting"),
    [
        (Schedule(4), [2.0], 2.0 / 4),
        (Schedule(4, fragments=2), [2.0, 3.0], 5.0 / 4),
        (Schedule(4, delay=1), [0.5], 0.0),  # hidden by the next step, of 1 s
        (Schedule(4, delay=1), [3.0], 2.0 / 4),
        (Schedule(4, delay=4), [3.0], 0.0),
        (Schedule(4, delay=4), [6.0], 2.0 / 4),  # back to back: a cycle is 6 s
        (Schedule(4, fragments=2, delay=2), [2.0, 2.0], 0.0),
        # After step 2 and step 4, both due 3 steps later: a cycle is the thread's 8 s.
        (Schedule(4, fragments=2, delay=3), [4.0, 4.0], 4.0 / 4),
    ],
)
def test_waiting_follows_from_the_schedule(
    schedule: Schedule, seconds: list[float], waiting: float
) -> None:
    assert exposed_seconds(schedule, 1.0, seconds) == pytest.approx(waiting)


def test_delay_hides_and_fragments_even_out() -> None:
    profile, buckets = layered(), cut_buckets(layered())

    def step(**schedule: Any) -> float:
        taken = Schedule(8, **schedule)
        return predict(profile, CLUSTER, "bf16", "sharded", buckets, taken).seconds

    assert step(delay=8) < step(delay=1) < step()
    assert step(fragments=4, delay=2) < step(delay=2)
    assert step(fragments=4) == pytest.approx(step(), rel=0.01)


def test_all_rows_but_ddps_are_local_steps() -> None:
    plan = make_plan(profile_of(), CLUSTER, schedule=Schedule(8))
    assert {p.every for p in plan.predictions if p.codec != DDP} == {8}
    assert plan.baseline.every == 1
    assert plan.baseline == make_plan(profile_of(), CLUSTER).baseline
    advice = plan.advice()
    assert "every 8 steps" in advice
    assert "local steps train in another way than DDP" in advice
    assert "local steps" not in make_plan(profile_of(), CLUSTER).advice()


@pytest.mark.parametrize(("every", "there"), [(4, True), (5, False)])
def test_codecs_that_hold_back_are_left_out_of_seldom_exchanges(every: int, there: bool) -> None:
    profile, schedule = profile_of(), Schedule(every)
    late = [codec for codec in profile.codecs if sends_late(codec)]
    assert late
    found = {p.codec for p in make_plan(profile, CLUSTER, schedule=schedule).predictions}
    assert {codec in found for codec in late} == {there}
    asked = make_plan(profile, CLUSTER, late, schedule=schedule).predictions
    assert {p.codec for p in asked} == {DDP, *late}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    layered().write(path)
    return path


def test_the_command_says_how_often_is_exchanged(file: Path) -> None:
    arguments = ["plan", "--profile", file, "--bandwidth", "100mbit", "--every", 4, "-c", "bf16"]
    assert "sharded every 4 steps" in cli_runner.run(*arguments).out
    whole, parts = (
        cli_runner.run(*arguments, "--exchange=sharded", "--json", *further).json["choice"]
        for further in ([], ["--fragments", "4", "--delay", "1"])
    )
    assert whole["every"] == 4
    assert parts["seconds"] < whole["seconds"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--every", "0"], "greater than or equal to 1"),
        (["--every", "4", "--fragments", "5"], "take fragments=4 or fewer"),
        (["--every", "9", "--fragments", "9"], "the model has 8 layers"),
        (["--every", "4", "--delay", "5"], "0 to every=4 steps"),
        (["--fragments", "2"], "give --every, a number from 2"),
        (["--delay", "1"], "give --every, a number from 2"),
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
