"""LocalSteps in fragments: exchanges take turns, travel while the ranks step on, and are mixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import runs
from averages_by_hand import nesterov, train_by_hand
from cluster import Cluster
from gradwire.torch import outer_nesterov
from gradwire.torch.optimizers.fragment import deal_layers
from learning import learn
from runs import Case, Run, adam, adamw, sgd
from training import loss_of, make_model
from ways import Inner, Way, build

NAMED = list(make_model().named_parameters())
THREE: dict[str, Any] = {"every": 6, "fragments": 3}


def streamed(delay: int, mix: float, inner: Inner = sgd, **options: Any) -> Case:
    options = {**THREE, "codec": "3lc:s=1", "delay": delay, "mix": mix, **options}
    return Case(Way("local", options), inner, steps=12, model=make_model)


def count_layouts(training: Any) -> None:
    """Those that the ranks compared and kept."""
    training.layouts = len(training.source._peers.session.runner._buckets)


SLOW = {"outer": outer_nesterov(0.1)}
CASES = {
    "at once": streamed(0, 0.0),
    "late": replace(streamed(3, 0.0, **SLOW), after={12: count_layouts}),
    "mixed": streamed(3, 0.5, **SLOW),
    "back to back": streamed(6, 0.0),
    "adam": streamed(6, 0.0, adamw),
    "adam, late": streamed(2, 0.0, adamw, clip_norm=0.5),
    "adam, mixed": streamed(2, 0.5, adamw, clip_norm=0.5),
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Run]]:
    return runs.run_each(3, CASES)


def names_of_fragments(fragments: int) -> list[list[str]]:
    return [[NAMED[place][0] for place in places] for places in deal_layers(NAMED, fragments)]


def first_applied(index: int, every: int, delay: int) -> int:
    """The first turn of the fragment before which an exchange can travel for the whole delay."""
    turn = (index + 1) * every // 3
    return turn if turn > delay else turn + every


def test_a_fragment_is_the_same_on_all_ranks_when_its_exchange_is_applied(
    ranks: list[dict[str, Run]],
) -> None:
    for name, case in CASES.items():
        every, delay, mix = (case.way.options[key] for key in ("every", "delay", "mix"))
        for index, names in enumerate(names_of_fragments(3)):
            first = first_applied(index, every, delay % every)
            for step in range(1, case.steps + 1):
                applied = step >= first and (step - first) % every == 0
                for tensor in names:
                    values = {rank[name].tensors[step - 1][tensor] for rank in ranks}
                    assert len(values) == (1 if applied and mix == 0 else 3), (name, step, tensor)


def test_the_anchors_are_always_the_same_on_all_ranks(ranks: list[dict[str, Run]]) -> None:
    for name, case in CASES.items():
        anchors = [rank[name].anchors for rank in ranks]
        assert anchors[0] == anchors[1] == anchors[2]
        every, delay = case.way.options["every"], case.way.options["delay"]
        first = min(first_applied(index, every, delay) for index in range(3))
        changed = [step for step, (a, b) in enumerate(pairwise(anchors[0]), 2) if a != b]
        assert changed == list(range(first, case.steps + 1, 2)), name


@pytest.mark.parametrize("options", [(0, 0.0), (2, 0.0), (3, 0.5), (0, 0.25)])
def test_raw_exchanges_are_streaming_diloco_written_down(options: tuple[int, float]) -> None:
    case = replace(streamed(*options, codec="raw", outer=outer_nesterov()), steps=15)
    expected = train_by_hand(case, 3, outer=nesterov())
    for run, values in zip(runs.run_one(3, case), expected, strict=True):
        for name, mine in run.training.values().items():
            np.testing.assert_allclose(mine, values[name], rtol=1e-4, atol=1e-5)


def step_before_the_peer() -> list[bool]:
    """Rank 0 returns from the steps of a whole delay before rank 1 takes the step that begins the
    exchange; the exchanges that the steps of rank 0 had applied by then."""
    way = Way("local", {"every": 4, "fragments": 2, "delay": 2, "timeout": 20.0})
    training = build(way, make_model())
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
    applied = []

    def note(steps: int) -> None:
        applied.append(training.source.last_step()["step"] >= 0)
        if dist.get_rank() == 0 and steps == 3:  # an exchange began one step ago
            dist.send(torch.zeros(1), 1)

    training.run(4, loss_of, note)
    training.close()
    return applied


def test_an_exchange_travels_while_the_ranks_step_on(cluster: Cluster) -> None:
    applied = cluster.run(2, step_before_the_peer)
    assert applied == [[False, False, False, True]] * 2


def test_fragments_divide_the_bytes_at_one_moment() -> None:
    def pushed(fragments: int) -> list[int]:
        case = Case(
            Way("local", {"every": 4, "fragments": fragments, "codec": "raw"}),
            steps=9,
            loss=lambda model, rank, step: model(torch.ones(4, 64)).square().mean(),
            model=lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]),
        )
        return runs.run_one(2, case)[0].push_bytes

    whole = pushed(1)
    assert [step + 1 for step, sent in enumerate(whole) if sent] == [4, 8]
    for fragments in (2, 4):
        each = pushed(fragments)
        assert max(each) == pytest.approx(max(whole) / fragments, rel=0.01)
        begun = [step for step in range(1, 10) if step % (4 // fragments) == 0]
        assert [step + 1 for step, sent in enumerate(each) if sent] == begun
        assert sum(each[4:8]) == pytest.approx(whole[7], rel=0.01)


@pytest.mark.parametrize("name", list(CASES))
def test_a_restart_equals_the_uninterrupted_run(ranks: list[dict[str, Run]], name: str) -> None:
    """The state is saved while exchanges are under way; that changes nothing, either."""
    case = CASES[name]
    first = runs.run_one(3, replace(case, steps=7, notes=range(8)))
    continued = runs.run_one(3, runs.restarted(case, first, 7))
    for rank, begun, ended in zip(ranks, first, continued, strict=True):
        assert begun.tensors + ended.tensors == rank[name].tensors


def test_synchronize_ends_all_exchanges_and_mixes_nothing() -> None:
    """After the 8th step; then the turns begin anew."""
    for name in ("at once", "mixed", "back to back", "adam, late"):
        ranks = runs.run_one(3, replace(CASES[name], after={8: runs.settle}, steps=11))
        assert ranks[0].tensors[7] == ranks[1].tensors[7] == ranks[2].tensors[7]
        assert ranks[0].tensors[7] == ranks[0].anchors[7]
        assert ranks[0].tensors[8] != ranks[1].tensors[8]
        state = ranks[0].state["optimizer"]
        assert state["clock"] == 3
        assert [part["steps"] < 3 for part in state["fragments"]].count(True) <= 1


@pytest.mark.parametrize("codec", ["3lc:s=1", "raw"])
@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (2, 0.0), (2, 0.5), (6, 0.0)])
def test_a_change_that_is_not_finite_is_undone(codec: str, delay: int, mix: float) -> None:
    """A rank's whole model becomes NaN. It goes back to all anchors when it takes part in the next
    exchange, which is skipped; exchanges of other fragments go on."""
    plain = replace(streamed(delay, mix, adam, codec=codec), steps=18)
    infinite = replace(plain, with_gradients={8: runs.make_infinite})
    ranks = [[*rank.values()] for rank in runs.run_each(3, {"infinite": infinite, "plain": plain})]
    for run, usual in ranks:
        assert run.stats["skipped_steps"] == 1
        assert run.stats["steps"] == usual.stats["steps"] == 9
        assert sum("is not finite" in str(warning) for warning in run.warnings) == 1
        assert np.isfinite(run.losses[10:]).all()
        assert all(values.isfinite().all() for values in run.training.values().values())
        assert run.anchors == ranks[0][0].anchors
    assert not np.isfinite(ranks[2][0].losses[9])
    # The skipped exchange began with step 10, and leaves the anchors as they are.
    applied = 10 + delay
    assert ranks[0][0].anchors[applied - 1] == ranks[0][0].anchors[applied - 2]
    assert ranks[0][1].anchors[applied - 1] != ranks[0][1].anchors[applied - 2]


def test_streaming_learns_as_plain_local_steps_do() -> None:
    """The margin is 10 % of the loss, averaged over several lengths, because a training goes up and
    down by as much."""

    def loss_after(**options: Any) -> float:
        return float(np.mean([learn(steps, **options)[0] for steps in (350, 400, 450)]))

    plain: dict[str, Any] = {"every": 8, "codec": "raw", "outer": outer_nesterov()}
    mixed = plain | {"fragments": 4, "delay": 2, "mix": 0.5}
    usual = loss_after(**plain)
    assert usual < 0.6 * learn(0, **plain)[0]
    for options in (plain | {"fragments": 4}, mixed, mixed | {"outer": None}):
        assert loss_after(**options) < 1.1 * usual, options


def test_a_pattern_may_match_in_one_fragment_alone() -> None:
    def warned(pattern: str) -> list[str]:
        case = replace(streamed(0, 0.0, rules=[(pattern, "raw")]), steps=7)
        return [w for w in map(str, runs.run_one(2, case)[0].warnings) if "matches" in w]

    assert warned("last.*") == []
    (text,) = warned("lost.*")
    assert "no tensor of the model matches 'lost.*'" in text


def test_fragments_are_reported(ranks: list[dict[str, Any]]) -> None:
    sizes = [sum(dict(NAMED)[n].numel() for n in names) for names in names_of_fragments(3)]
    for rank in ranks:
        assert rank["late"].training.layouts == 3
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
