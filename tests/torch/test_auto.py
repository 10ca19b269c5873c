"""`auto` codecs: chosen from what all ranks measured, alike on every rank."""

from __future__ import annotations

from typing import Any

import pytest

import jobs
import runs
import scaled_jobs
from cluster import Cluster
from gradwire import GradwireError
from gradwire._core import AutoGoal
from gradwire.torch import GradwireState, reshard
from gradwire.torch.buckets.auto_codecs import AutoCodecs
from gradwire.torch.exchange_settings import ExchangeSettings
from runs import Case, adam, adamw, said_by, threads
from training import Options, Trained, load, save
from ways import CUT_ONCE, Way

GOAL = "auto:bits=0.8,every=6"
STATE = {"codec": GOAL, "start_iter": 1}


@pytest.fixture(scope="module", params=(2, 3))
def ranks(request: pytest.FixtureRequest, cluster: Cluster) -> list[Trained]:
    options = Options(20, STATE, CUT_ONCE)
    return [rank[0] for rank in cluster.run(request.param, jobs.train_each, [options])]


def chosen(rank: Trained) -> dict[tuple[str, str], str]:
    return {(c["direction"], c["tensor"]): c["codec"] for c in rank.stats["chosen"]}


def test_all_ranks_choose_alike(ranks: list[Trained]) -> None:
    assert len({rank.digest for rank in ranks}) == 1
    assert all(rank.stats["chosen"] == ranks[0].stats["chosen"] for rank in ranks)
    matrices = {"first.weight", "second.weight", "conv.weight", "branch.weight", "last.weight"}
    assert set(chosen(ranks[0])) == {(d, name) for d in ("push", "pull") for name in matrices}


def test_decisions_come_sooner_at_the_start(
    ranks: list[Trained],
) -> None:
    # Of 19 compressed steps: after 1, 2, 4, 6, 12 and 18.
    assert {entry["decisions"] for entry in ranks[0].stats["chosen"]} == {6}


def test_the_report_names_the_codecs(ranks: list[Trained]) -> None:
    assert f"{GOAL}, push: decided 6 times" in ranks[0].report
    assert f"  first.weight: {chosen(ranks[0])['push', 'first.weight']}, " in ranks[0].report


def test_residuals_outlast_a_change_of_codec(cluster: Cluster) -> None:
    ranks = cluster.run(3, scaled_jobs.train_scaled, 10, -1, "first.weight", STATE)
    codecs = [[entry.codec for entry in step] for step in ranks[0].chosen]
    changed = [step for step in range(3, 10) if codecs[step] != codecs[step - 1]]
    assert len(changed) > 1
    for step in changed:
        assert any(values.any() for values in ranks[0].owed[step]["push"].values())
        scaled_jobs.check_nothing_is_lost(ranks, step)


def test_a_decision_is_about_the_tensors_of_all_buckets(cluster: Cluster) -> None:
    options = Options(3, STATE, CUT_ONCE)
    assert len(cluster.run(2, jobs.train_each, [options])[0][0].buckets[-1]) > 1
    for names in cluster.run(2, jobs.train_and_note_decisions, options):
        assert names == [sorted(NUMEL)] * 4, "pushes and pulls, after 1 and 2 steps"


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    runs = [Options(16, STATE, CUT_ONCE), Options(9, STATE, CUT_ONCE)]
    ranks = cluster.run(3, jobs.train_each, runs)
    whole, stopped = ranks[0]
    saved = [rank[1].residuals or b"" for rank in ranks]
    forgetful = [save({**load(state), "auto": None}) for state in saved]
    rest = [
        Options(7, STATE, CUT_ONCE, start=9, residuals=states, weights=stopped.weights)
        for states in (saved, forgetful)
    ]
    for continued, without_choice in cluster.run(3, jobs.train_each, rest):
        assert continued.digest == whole.digest
        assert continued.stats["chosen"] == whole.stats["chosen"]
        assert without_choice.digest != whole.digest


@pytest.mark.parametrize("first", [{}, {"rules": [("first.w*", "auto:bits=1")]}])
def test_a_restart_with_other_goals(cluster: Cluster, first: dict[str, Any]) -> None:
    """first: further settings of the state that is loaded."""
    generous = {"codec": "auto:bits=6", "start_iter": 1, **first}
    saved = [
        rank[0].residuals or b""
        for rank in cluster.run(2, jobs.train_each, [Options(9, generous, CUT_ONCE)])
    ]
    state = {"codec": "auto:bits=1", "start_iter": 1}
    if first:
        state["rules"] = [("second.w*", "auto:bits=6")]
    moved = reshard([load(rank) for rank in saved], 2, codec="auto:bits=1")
    residuals = [save(rank) for rank in moved]
    rest = Options(4, state, CUT_ONCE, start=9, residuals=residuals)
    for (continued,) in cluster.run(2, jobs.train_each, [rest]):
        goals = {(c["direction"], c["tensor"]): c["goal"] for c in continued.stats["chosen"]}
        assert len(continued.stats["chosen"]) == len(goals) == 2 * len(NUMEL)
        for (_, tensor), goal in goals.items():
            assert goal == (
                "auto:bits=6" if first and tensor == "second.weight" else state["codec"]
            )
        if not first:
            assert continued.last_steps[-1]["push_bits_per_value"] < 3
            assert {c["decisions"] for c in continued.stats["chosen"]} == {3}, "as at the start"


def test_a_choice_that_is_dropped_is_named(ranks: list[Trained]) -> None:
    state = load(ranks[0].residuals or b"")["auto"]
    said = f"chosen for {GOAL} is dropped.*now chosen for auto:bits"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        AutoCodecs(ExchangeSettings("auto:bits=1.0")).load_state_dict(state)
    assert [one.filename for one in caught] == [__file__]


def test_a_budget_that_is_exceeded_is_remarked(cluster: Cluster) -> None:
    options = Options(3, {"codec": "auto:bits=0.02", "start_iter": 0}, CUT_ONCE)
    (rank, *_) = cluster.run(2, jobs.train_each, [options])
    push, pull = rank[0].stats["remarks"][-2:]
    assert push.startswith("auto:bits=0.02, push: exceeds its limit, because the codecs that send")
    assert pull.startswith("auto:bits=0.02, pull: exceeds its limit, because the codecs that send")


def test_ranks_with_other_choices_are_named(cluster: Cluster) -> None:
    options = Options(9, STATE, CUT_ONCE)
    saved = [rank[0].residuals or b"" for rank in cluster.run(2, jobs.train_each, [options])]
    state = load(saved[1])
    tensor = state["auto"]["choosers"][0]["tensors"][0]
    tensor["codec"] = "int8:bucket=512"
    rest = Options(2, STATE, CUT_ONCE, start=9, residuals=[saved[0], save(state)])
    cluster.start(2, jobs.train_each, [rest])
    for answer in cluster.collect(range(2)).values():
        assert "can't exchange" in answer.message
        assert "int8:bucket=512 (auto:bits=0.8,every=6)" in answer.message


@pytest.mark.parametrize(
    "case",
    [
        Case(Way("sharded", {"codec": "auto:bits=1,every=4"}), adam, 9),
        Case(Way("local", {"codec": "auto:error=0.5,every=4"}), adamw, 9),
        Case(Way("local", {"codec": "int8", "pull_codec": "auto:bits=1", "every": 2})),
        Case(Way("local", {"rules": [("first*", "auto:bits=2", "push")], "every": 2})),
    ],
    ids=["sharded", "local", "pull alone", "a rule"],
)
def test_optimizers_take_it(case: Case) -> None:
    ranks = runs.run_one(3, case)
    for rank in ranks:
        assert rank.digests[-1] == ranks[0].digests[-1]
        assert rank.stats["chosen"] == ranks[0].stats["chosen"] != ()


def test_pushes_and_pulls_are_within_the_budget(cluster: Cluster) -> None:
    """Each value is pushed by one of two ranks, and pulled by the other."""
    options = Options(120, {"codec": "auto:bits=1.2,every=20", "start_iter": 0}, CUT_ONCE)
    ranks = [rank[0].stats for rank in cluster.run(2, jobs.train_each, [options])]
    raw = sum(tensor["numel"] for tensor in ranks[0]["raw_tensors"])
    for way in ("push_bytes", "pull_bytes"):
        sent = sum(stats[way] for stats in ranks) / 120 - 4 * raw
        assert 1.0 < 8 * sent / sum(NUMEL.values()) < 1.3, "1.2 and headers"
    for way in ("compressed_bits_push", "compressed_bits_pull"):
        assert 1.0 < sum(stats[way] for stats in ranks) / 2 < 1.3, "without headers"


def test_local_steps_advise_fewer_exchanges() -> None:
    case = Case(Way("local", {"codec": "auto:bits=0.01"}), adamw, 60)
    for said in threads(2, lambda rank: said_by(lambda: runs.run(case))):
        assert "give at least bits=" in said
        assert "To send less in all, exchange less often: every=2" in said
        assert "s=1.5" not in said


NUMEL = {
    "first.weight": 48 * 160,
    "second.weight": 160 * 144,
    "conv.weight": 9 * 12 * 3,
    "branch.weight": 144 * 24,
    "last.weight": 12 * 14 * 5,
}


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("auto", "give either bits, a budget in bits a value, or error, a bound"),
        ("auto:bits=1,error=0.1", "give either bits"),
        ("auto:bits=0.001", r"bits=0.001 is not valid; give a number from 0.01 to 16$"),
        ("auto:bits=40", r"bits=40 is not valid"),
        ("auto:error=0.0001", r"give a number from 0.000244 \(that of float16\) to 1000$"),
        ("nonsense", "valid names are: raw, .*, auto$"),
        ("auto:bits=1,every=0", "every=0 is not valid; give a whole number from 1 to"),
        ("auto:bits=1,s=2", r"s=2 is not valid; give a number in \[1, 2\)"),
        ("auto:bits=1,k=2", "no parameter 'k'; valid: bits="),
        ("auto:bits=1,ef=off", "leave ef out"),
    ],
)
def test_a_bad_text_lists_what_is_valid(codec: str, message: str) -> None:
    with pytest.raises(GradwireError, match=message):
        GradwireState(codec)


@pytest.mark.parametrize(("codec", "coarse"), [("auto:bits=1", True), ("auto:bits=6", False)])
def test_small_budgets_are_coarse(codec: str, coarse: bool) -> None:
    assert AutoGoal(codec).is_coarse == coarse


@pytest.mark.parametrize("exchange", ["ring", "hierarchical:between=sharded,ranks=1", "terngrad"])
def test_other_exchanges_refuse_it(exchange: str) -> None:
    with pytest.raises(ValueError, match="goes with exchange='sharded' alone"):
        GradwireState("auto:bits=1", exchange=exchange)
