"""LocalSteps in fragments: exchanges take turns, travel while the ranks step on, and are mixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import streaming_jobs
from cluster import Cluster
from gradwire.torch.optimizers.fragment import deal_layers
from streaming_jobs import Course, Streamed
from training import load, make_model

NAMED = list(make_model().named_parameters())
THREE: dict[str, Any] = {"every": 6, "fragments": 3}
CODED = THREE | {"codec": "3lc:s=1"}
RUNS = {
    "at once": Streamed(CODED | {"delay": 0, "mix": 0.0}),
    "late": Streamed(CODED | {"delay": 3, "mix": 0.0}, outer="slow"),
    "mixed": Streamed(CODED | {"delay": 3, "mix": 0.5}, outer="slow"),
    "back to back": Streamed(CODED | {"delay": 6, "mix": 0.0}),
    "adam": Streamed(CODED | {"delay": 6, "mix": 0.0}, "adamw"),
    "adam, late": Streamed(CODED | {"delay": 2, "mix": 0.0, "clip_norm": 0.5}, "adamw"),
    "adam, mixed": Streamed(CODED | {"delay": 2, "mix": 0.5, "clip_norm": 0.5}, "adamw"),
}


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> list[dict[str, Course]]:
    trained = cluster.run(3, streaming_jobs.train_each, list(RUNS.values()))
    return [dict(zip(RUNS, rank, strict=True)) for rank in trained]


def names_of_fragments(fragments: int) -> list[list[str]]:
    return [[NAMED[place][0] for place in places] for places in deal_layers(NAMED, fragments)]


def test_a_fragment_is_the_same_on_all_ranks_when_its_exchange_is_applied(
    ranks: list[dict[str, Course]],
) -> None:
    for name, run in RUNS.items():
        every, delay, mix = (run.options[key] for key in ("every", "delay", "mix"))
        for index, names in enumerate(names_of_fragments(3)):
            turn = (index + 1) * every // 3
            for step in range(1, run.steps + 1):
                applied = step >= turn + delay % every and (step - turn - delay) % every == 0
                for tensor in names:
                    values = {rank[name].tensors[step - 1][tensor] for rank in ranks}
                    assert len(values) == (1 if applied and mix == 0 else 3), (name, step, tensor)


def test_the_anchors_are_always_the_same_on_all_ranks(ranks: list[dict[str, Course]]) -> None:
    for name, run in RUNS.items():
        anchors = [rank[name].anchors for rank in ranks]
        assert anchors[0] == anchors[1] == anchors[2]
        first = run.options["every"] // 3 + run.options["delay"]
        changed = [step for step, (a, b) in enumerate(pairwise(anchors[0]), 2) if a != b]
        assert changed == list(range(first, run.steps + 1, 2)), name


@pytest.mark.parametrize("options", [(0, 0.0), (2, 0.0), (3, 0.5), (0, 0.25)])
def test_raw_exchanges_are_streaming_diloco_written_down(
    cluster: Cluster, options: tuple[int, float]
) -> None:
    chosen = THREE | {"codec": "raw", "delay": options[0], "mix": options[1]}
    run = Streamed(chosen, outer="diloco", steps=15)
    trained = cluster.run(3, streaming_jobs.train_each, [run])
    expected = cluster.run(1, streaming_jobs.stream_by_hand, run, 3)[0]
    for (course,), values in zip(trained, expected, strict=True):
        for name, mine in course.parameters.items():
            np.testing.assert_allclose(mine, values[name], rtol=1e-4, atol=1e-5)


def test_an_exchange_travels_while_the_ranks_step_on(cluster: Cluster) -> None:
    applied = cluster.run(2, streaming_jobs.step_before_the_peer)
    assert applied == [[False, False, False, True]] * 2


def test_fragments_divide_the_bytes_at_one_moment(cluster: Cluster) -> None:
    def pushed(fragments: int) -> list[int]:
        options = {"every": 4, "fragments": fragments, "codec": "raw"}
        (first, _) = cluster.run(2, streaming_jobs.push_bytes_of_layers, 8, options, 9)
        return first

    whole = pushed(1)
    assert [step + 1 for step, sent in enumerate(whole) if sent] == [4, 8]
    for fragments in (2, 4):
        each = pushed(fragments)
        assert max(each) == pytest.approx(max(whole) / fragments, rel=0.01)
        begun = [step for step in range(1, 10) if step % (4 // fragments) == 0]
        assert [step + 1 for step, sent in enumerate(each) if sent] == begun
        assert sum(each[4:8]) == pytest.approx(whole[7], rel=0.01)


@pytest.mark.parametrize("name", list(RUNS))
def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster, name: str) -> None:
    """The state is saved while exchanges are under way; that changes nothing, either."""
    run = RUNS[name]
    first = replace(run, steps=7, saves_each_step=True)
    ranks = cluster.run(3, streaming_jobs.train_each, [run, first])
    saved = [rank[1].saved for rank in ranks]
    rest = replace(run, start=7, steps=run.steps - 7, saved=saved)
    continued = cluster.run(3, streaming_jobs.train_each, [rest])
    for (whole, begun), (ended,) in zip(ranks, continued, strict=True):
        assert begun.tensors + ended.tensors == whole.tensors


def test_synchronize_ends_all_exchanges_and_mixes_nothing(cluster: Cluster) -> None:
    """After the 8th step; then the turns begin anew."""
    for name in ("at once", "mixed", "back to back", "adam, late"):
        run = replace(RUNS[name], synchronize_at=7, steps=11)
        ranks = [rank[0] for rank in cluster.run(3, streaming_jobs.train_each, [run])]
        assert ranks[0].tensors[7] == ranks[1].tensors[7] == ranks[2].tensors[7]
        assert ranks[0].tensors[7] == ranks[0].anchors[7]
        assert ranks[0].tensors[8] != ranks[1].tensors[8]
        state = load(ranks[0].saved)["optimizer"]
        assert state["clock"] == 3
        assert [part["steps"] < 3 for part in state["fragments"]].count(True) <= 1


@pytest.mark.parametrize("codec", ["3lc:s=1", "raw"])
@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (3, 0.0), (3, 0.5), (6, 0.0)])
def test_a_change_that_is_not_finite_is_undone(
    cluster: Cluster, codec: str, delay: int, mix: float
) -> None:
    """A rank's whole model becomes NaN. It goes back to all anchors when it takes part in the next
    exchange, which is skipped; exchanges of other fragments go on."""
    options = THREE | {"codec": codec, "delay": delay, "mix": mix}
    run = Streamed(options, "adam", steps=18, infinite_step=8)
    plain = replace(run, infinite_step=None)
    ranks = cluster.run(3, streaming_jobs.train_each, [run, plain])
    for course, usual in ranks:
        assert course.stats["skipped_steps"] == 1
        assert course.stats["steps"] == usual.stats["steps"] == 9
        assert sum("is not finite" in text for text in course.warnings) == 1
        assert np.isfinite(course.losses[10:]).all()
        assert all(np.isfinite(values).all() for values in course.parameters.values())
        assert course.anchors == ranks[0][0].anchors
    assert not np.isfinite(ranks[2][0].losses[9])
    # The skipped exchange began with step 10, and leaves the anchors as they are.
    applied = 10 + delay
    assert ranks[0][0].anchors[applied - 1] == ranks[0][0].anchors[applied - 2]
    assert ranks[0][1].anchors[applied - 1] != ranks[0][1].anchors[applied - 2]


def test_streaming_learns_as_plain_local_steps_do(cluster: Cluster) -> None:
    """The margin is 10 % of the loss."""
    plain = {"every": 8, "codec": "raw"}
    streams = [
        ("diloco", plain | {"fragments": 4}),
        ("diloco", plain | {"fragments": 4, "delay": 2, "mix": 0.5}),
        ("none", plain | {"fragments": 4, "delay": 2, "mix": 0.5}),
    ]

    def learn(outer: str, options: dict[str, Any], steps: int = 400) -> float:
        return cluster.run(2, streaming_jobs.learn, outer, options, steps)[0][0]

    first, usual = learn("diloco", plain, 0), learn("diloco", plain)
    assert usual < 0.6 * first
    for outer, options in streams:
        assert learn(outer, options) < 1.1 * usual, (outer, options)


def test_a_pattern_may_match_in_one_fragment_alone(cluster: Cluster) -> None:
    def warned(pattern: str) -> list[str]:
        run = Streamed(CODED | {"rules": [(pattern, "raw")]}, steps=7)
        return [w for w in cluster.run(2, streaming_jobs.train, run)[0].warnings if "matches" in w]

    assert warned("last.*") == []
    (text,) = warned("lost.*")
    assert "no tensor of the model matches 'lost.*'" in text


def test_fragments_are_reported(ranks: list[dict[str, Course]]) -> None:
    sizes = [sum(dict(NAMED)[n].numel() for n in names) for names in names_of_fragments(3)]
    for rank in ranks:
        assert rank["late"].layouts == 3
        assert rank["late"].stats["fragments"] == sizes
        assert "an exchange every 6 of each of 3 fragments" in rank["late"].report
        assert f"of {min(sizes):,} to {max(sizes):,} values" in rank["late"].report


def stack(widths: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{layer}.{kind}", torch.zeros(numel))
        for layer, width in enumerate(widths)
        for kind, numel in (("weight", width), ("bias", 2))
    ]


def test_equal_layers_are_dealt_in_turn() -> None:
    assert deal_layers(stack([8] * 6), 3) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert deal_layers(stack([8] * 3), 1) == [list(range(6))]


def test_unequal_layers_make_fragments_of_about_one_size() -> None:
    named = stack([1000, 100, 400, 400, 150, 30, 0])
    sizes = [sum(named[p][1].numel() for p in places) for places in deal_layers(named, 2)]
    assert sum(sizes) == sum(values.numel() for _, values in named)
    assert max(sizes) < 1.1 * min(sizes)
    assert all(len(places) == 2 for places in deal_layers(stack([0] * 4), 4))
