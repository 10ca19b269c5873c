"""The judge of cells, with made-up outcomes: each wrong one must be found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import running
from faults import BY_NAME, NONE
from judge import Outcome, Seen, find_problems
from running import Cluster, Rank

WAY = "hook-ring"
KILLED = Seen(-9, 0.1, None, [], None, 100)
STOPPED = Seen(1, 3.0, "PeerLostError: rank 2 is gone; rank 0, step 100", [], None, 100, 1.2)
FINISHED = Seen(0, 9.0, None, [], "abc", 200, gap=0.4)
# Of a way that goes on.
WARNED = replace(FINISHED, warned=["RankLostWarning: rank 2 is gone"], digest="of three")
# Of a fault with a timeout of 15 s; the victim is continued after 17 s.
SILENT = Seen(1, 17.0, "PeerSilentError: rank 2 sent nothing", [], None, 100, 16.0)
CONTINUED = Seen(1, 28.0, "PeerLostError: rank 0 is gone", [], None, 100, 27.0)


def judge(name: str, ranks: list[Seen], way: str = WAY) -> list[str]:
    fault = BY_NAME[name]
    return find_problems(Outcome(way, name, 2, fault.timeout, 100, ranks), fault, "abc")


def with_changes(seen: Seen, changed: dict[str, Any]) -> Seen:
    return replace(seen, **changed)


def test_a_right_outcome_has_no_problem() -> None:
    assert judge("killed", [STOPPED, STOPPED, KILLED, STOPPED]) == []
    assert judge("stopped", [SILENT, SILENT, CONTINUED, SILENT]) == []
    assert judge("link-cut", [FINISHED] * 4) == []
    assert judge("bit-flipped", [FINISHED] * 4) == []
    assert judge("bit-flipped", [STOPPED] * 4) == []
    assert judge("old-checkpoint", [STOPPED] * 4) == []
    assert judge("none", [FINISHED] * 4) == []
    for way in ("servers-go-on", "local-steps-go-on"):
        assert judge("killed", [WARNED, WARNED, KILLED, WARNED], way) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"status": 0, "said": None}, "rank 0 ends with exit status 0"),
        ({"said": "PeerLostError: rank 1 is gone"}, "rank 0 does not name rank 2"),
        ({"said": "PeerLostError: ranks 1, 2 are gone"}, "rank 0 also blames [1, 2]"),
        ({"said": None}, "rank 0 does not name rank 2"),
        ({"status": -6}, "rank 0 is ended by signal 6"),
        ({"spoke": 40.0}, "rank 0 has its error 40.0 s after the fault"),
        ({"seconds": 60.0}, "rank 0 ends 58.8 s after its error"),
        ({"seconds": 60.0, "spoke": None}, "rank 0 ends 60.0 s after the fault"),
        ({"seconds": 36.0, "said": None}, "rank 0 ends 36.0 s after the fault"),
        ({"hung": True}, "rank 0 hangs"),
    ],
)
def test_a_wrong_stop_is_found(changed: dict[str, Any], problem: str) -> None:
    wrong = with_changes(STOPPED, changed)
    assert problem in judge("killed", [wrong, STOPPED, KILLED, STOPPED])


def test_a_wrong_model_is_found() -> None:
    other = replace(FINISHED, digest="other")
    assert judge("link-cut", [FINISHED, FINISHED, FINISHED, other]) == ["the ranks' models differ"]
    expected = "the model is not that of the run without the fault"
    assert judge("stopped-20s", [other] * 4) == [expected]
    assert judge("bit-flipped", [other] * 4) == [expected]
    assert judge("link-cut", [STOPPED, FINISHED, FINISHED, FINISHED]) != []


def test_a_process_that_outlives_its_error_is_found() -> None:
    late = replace(SILENT, seconds=29.9)  # 15 s and what is allowed beyond that are not over
    victim = replace(CONTINUED, seconds=31.0, spoke=30.5)
    assert judge("stopped", [late, SILENT, victim, SILENT]) == [
        "rank 0 ends 13.9 s after its error"
    ]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"spoke": 49.0, "seconds": 50.0}, "rank 2 has its error 32.0 s after it was continued"),
        ({"seconds": 60.0}, "rank 2 ends 33.0 s after its error"),
        (
            {"seconds": 38.0, "said": None, "spoke": None, "status": -6},
            "rank 2 ends 21.0 s after it was continued",
        ),
    ],
)
def test_a_victim_that_was_continued_must_end_in_time(
    changed: dict[str, Any], problem: str
) -> None:
    wrong = with_changes(CONTINUED, changed)
    assert judge("stopped", [SILENT, SILENT, wrong, SILENT]) == [problem]


def test_a_victim_that_lives_must_end_in_time() -> None:
    said = "ValueError: the data of this rank cannot be read"
    victim = Seen(1, 41.0, said, [], None, 100, 40.0)
    assert judge("exception", [STOPPED, STOPPED, victim, STOPPED]) == [
        "rank 2 has its error 40.0 s after the fault"
    ]


def test_after_a_restart_ranks_must_stop_in_time() -> None:
    late = replace(STOPPED, seconds=299.0, spoke=298.0)
    assert judge("old-checkpoint", [late, STOPPED, STOPPED, STOPPED]) == [
        "rank 0 has its error 298.0 s after the fault"
    ]
    assert judge("old-checkpoint", [STOPPED, STOPPED, late, STOPPED]) == [
        "rank 2 has its error 298.0 s after the fault"
    ]


def test_ranks_that_go_on_must_not_wait_for_long() -> None:
    def judge_one(seen: Seen, name: str = "killed") -> list[str]:
        victim = KILLED if name == "killed" else CONTINUED
        return judge(name, [WARNED, seen, victim, WARNED], "local-steps-go-on")

    assert judge_one(replace(WARNED, seconds=45.0, gap=34.9)) == []
    assert judge_one(replace(WARNED, seconds=45.0, gap=35.2)) == ["rank 1 takes no step for 35.2 s"]
    assert judge_one(replace(WARNED, gap=20.2), "stopped") == ["rank 1 takes no step for 20.2 s"]
    older = replace(WARNED, seconds=290.0, gap=None)
    assert judge_one(older) == ["rank 1 finishes 290.0 s after the fault"]


def test_a_rank_that_stops_where_others_go_on_must_end_in_time() -> None:
    late = replace(STOPPED, seconds=50.0, spoke=40.0)
    assert judge("bit-flipped", [late, WARNED, WARNED, WARNED], "local-steps-go-on") == [
        "rank 0 has its error 40.0 s after the fault"
    ]


@pytest.mark.parametrize(
    ("name", "changed", "problem"),
    [
        ("link-cut", {"seconds": 295.0}, "finishes 295.0 s after the fault"),
        ("link-cut", {"gap": 21.5}, "takes no step for 21.5 s"),
        ("stopped-20s", {"seconds": 130.0}, "finishes 130.0 s after the fault"),
        ("stopped-20s", {"gap": 25.5}, "takes no step for 25.5 s"),
        ("link-slow", {"gap": 35.5}, "takes no step for 35.5 s"),
        ("clock-jumps", {"gap": 8.5}, "takes no step for 8.5 s"),
        ("restarted", {"gap": 15.5}, "takes no step for 15.5 s"),
        ("bit-flipped", {"gap": 35.5}, "takes no step for 35.5 s"),
        ("none", {"gap": 15.5}, "takes no step for 15.5 s"),
    ],
)
def test_what_changes_nothing_must_not_take_long(
    name: str, changed: dict[str, Any], problem: str
) -> None:
    wrong = with_changes(FINISHED, changed)
    assert judge(name, [FINISHED, FINISHED, FINISHED, wrong]) == [f"rank 3 {problem}"]


def test_an_outcome_of_an_older_run_can_be_read() -> None:
    values = Outcome(WAY, NONE.name, 2, 30.0, 200, [FINISHED] * 4).as_dict()
    for seen in values["ranks"]:
        del seen["gap"]
    read = Outcome.from_dict(values)
    assert [seen.gap for seen in read.ranks] == [None] * 4
    assert find_problems(read, NONE, "abc") == []


class NoLauncher:
    """Stands for the launcher of ranks that were started already."""

    def ask(self, job: dict[str, Any]) -> None:
        raise AssertionError(job)

    def said(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None: ...


class Clock:
    """In the place of the module time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_longest_time_without_a_step_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "time", Clock())
    cluster = Cluster(NoLauncher(), tmp_path, [Rank(pid=1), Rank(pid=2)])

    def step_after(seconds: float, rank: int, number: int) -> None:
        cluster.sleep(seconds)
        (tmp_path / f"progress-{rank}").write_text(f"{number:8}")
        cluster.look()

    step_after(0.1, 0, 100)
    step_after(0.1, 1, 100)
    cluster.sleep(9.0)  # before the fault: this does not count
    cluster.watch_steps()
    began = cluster.ranks[1].stepped
    step_after(1.0, 0, 101)
    step_after(2.0, 0, 102)
    step_after(0.5, 0, 103)
    cluster.sleep(7.0)
    ranks = cluster.ranks
    assert [rank.longest_gap for rank in ranks] == [pytest.approx(2.0, abs=0.2), 0.0]
    assert [rank.step for rank in ranks] == [103, 100]
    assert [rank.stepped - began for rank in ranks] == [pytest.approx(3.5, abs=0.2), 0.0]


@pytest.mark.parametrize(("slowness", "right"), [(1.0, False), (2.0, True)])
def test_a_loaded_machine_may_take_longer(slowness: float, right: bool) -> None:
    ranks = [replace(FINISHED, gap=18.3)] * 4
    outcome = Outcome(WAY, "none", 2, NONE.timeout, 0, ranks, slowness=slowness)
    assert (find_problems(outcome, NONE, "abc") == []) is right
