"""LocalSteps: ranks step alone, and their models are equal again after every k-th step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import optimizer_jobs
from cluster import Cluster, Died
from gradwire.torch.optimizers.late_momentum import LateMomentum
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.stats import Totals, summarize
from optimizer_jobs import INFINITE_NAME, Run, Wrapped
from training import digest, make_model

RAW = {"codec": "raw", "every": 2}
RUNS = {
    "plain raw": Wrapped("local", options=RAW),
    "outer raw": Wrapped("diloco", options=RAW),
    "plain 3lc": Wrapped("local", options={"codec": "3lc", "every": 2}),
    "outer 3lc": Wrapped("slow", "adamw", options={"codec": "3lc", "every": 3}),
    "ring": Wrapped("local", options={"codec": "3lc:s=1.0", "exchange": "ring", "every": 2}),
    "terngrad": Wrapped("local", options={"exchange": "terngrad", "every": 2}),
    "machines": Wrapped(
        "local", options={"exchange": "hierarchical", "ranks_per_machine": 1, "every": 2}
    ),
    "scheduled": Wrapped("local", options=RAW, scheduled=True),
    "every step": Wrapped("local", options={"codec": "raw", "every": 1}),
    "corrected": Wrapped("local", "adamw", options={"codec": "3lc:s=1", "every": 1}),
    "late": Wrapped("local", "adamw", {"codec": "3lc:s=1", "every": 1, "delay": 1}),
    "late momentum": Wrapped("local", "adamw", {"codec": "3lc:s=1", "every": 3}),
    "late both": Wrapped("local", "adamw", {"codec": "3lc:s=1", "every": 2, "delay": 2}),
    "late outer": Wrapped("slow", options={"codec": "3lc:s=1", "every": 2, "delay": 2}),
    "scaled": Wrapped("local", options={"codec": "raw", "every": 1}, scale=2.0**8),
    "called": Wrapped("local", options={"codec": "3lc", "every": 4}, synchronize_at=5),
}


@pytest.fixture(scope="module", params=(1, 3))
def ranks(request: pytest.FixtureRequest, cluster: Cluster) -> list[dict[str, Run]]:
    trained = cluster.run(request.param, optimizer_jobs.run_each, list(RUNS.values()))
    return [dict(zip(RUNS, rank, strict=True)) for rank in trained]


def test_replicas_are_equal_after_every_exchange_and_then_alone(
    ranks: list[dict[str, Run]],
) -> None:
    for name, options in RUNS.items():
        every = options.options["every"]
        for step in range(options.steps):
            different = len({rank[name].digests[step] for rank in ranks})
            exchanged = (step + 1) % every == 0 or step == options.synchronize_at
            assert different == (1 if exchanged else len(ranks)), (name, step)


@pytest.mark.parametrize("name", ["plain raw", "outer raw"])
def test_raw_exchanges_are_the_algorithm_written_down(cluster: Cluster, name: str) -> None:
    run = cluster.run(3, optimizer_jobs.run_each, [RUNS[name]])[0][0]
    outer = name.startswith("outer")
    expected = cluster.run(3, optimizer_jobs.average_by_hand, RUNS[name], 2, outer)[0]
    for parameter, values in run.parameters.items():
        np.testing.assert_allclose(values, expected[parameter], rtol=1e-4, atol=1e-5)


def test_bytes_go_with_the_exchanges(ranks: list[dict[str, Run]]) -> None:
    sent = {name: ranks[0][name].stats for name in RUNS}
    assert [sent[name]["steps"] for name in ("every step", "plain raw", "outer 3lc", "called")] == [
        6,
        3,
        2,
        2,
    ]
    assert sent["outer 3lc"]["local_steps"] == 6
    assert sent["outer 3lc"]["every"] == 3
    assert "6 steps, an exchange every 3" in ranks[0]["outer 3lc"].report
    if len(ranks) > 1:
        assert sent["every step"]["push_bytes"] == 2 * sent["plain raw"]["push_bytes"] > 0
        assert [b > 0 for b in ranks[0]["plain raw"].push_bytes] == [False, True] * 3
        assert 8 * sent["plain 3lc"]["push_bytes"] < sent["plain raw"]["push_bytes"]
        whole = sent["every step"]["ratio"] * sent["every step"]["push_bytes"]
        assert sent["plain raw"]["ratio"] == pytest.approx(
            whole / sent["plain raw"]["push_bytes"], rel=0.01
        )
        assert sent["outer 3lc"]["ratio"] == pytest.approx(
            3 * sent["outer 3lc"]["ratio_of_exchanges"], rel=0.01
        )
        assert "x less than raw in each step; an exchange " in ranks[0]["outer 3lc"].report


def test_reports_begin_with_what_the_user_should_know() -> None:
    empty = summarize(Totals(), codec="3lc", world_size=1, raw_tensors=(), remarks=("look",))
    stats = LocalStats(2, (9,), 4, 0, (), empty, None, 1, (1, 2), (0,))
    assert stats.report().splitlines()[0] == empty.report().splitlines()[0] == "note: look"
    assert "1, 2 in generation 1, lost member 0" in stats.report()


def test_schedulers_change_the_local_steps(ranks: list[dict[str, Run]]) -> None:
    assert ranks[0]["scheduled"].digests[1] == ranks[0]["plain raw"].digests[1]
    assert ranks[0]["scheduled"].digests[3] != ranks[0]["plain raw"].digests[3]


@pytest.mark.parametrize("codec", ["3lc:s=1.75", "raw"])
def test_a_change_that_is_not_finite_is_undone(cluster: Cluster, codec: str) -> None:
    """The change before the second exchange is infinite, so all ranks go back to the anchor."""
    options = Wrapped("local", "adam", {"codec": codec, "every": 2}, steps=8, infinite_step=3)
    ranks = [rank[0] for rank in cluster.run(3, optimizer_jobs.run_each, [options])]
    for rank in ranks:
        assert rank.digests[3] == ranks[0].digests[1]
        assert rank.digests[5] == ranks[0].digests[5] != rank.digests[3]
        assert rank.digests[7] == ranks[0].digests[7] != rank.digests[5]
        assert rank.stats["skipped_steps"] == 1
        assert np.isfinite(rank.losses[4:]).all()
        assert len(rank.warnings) == 1
    assert (
        f"gradient of rank 2 is not finite at element 3 of {INFINITE_NAME}"
        in (ranks[2].warnings[0])
    )


@pytest.mark.parametrize(
    ("make", "local", "chosen"),
    [
        ("local", "sgd", {}),
        ("slow", "sgd", {}),
        ("local", "adamw", {"clip_norm": 0.5}),
        ("local", "adamw", {"delay": 3, "clip_norm": 0.5}),
        ("local", "adamw", {"every": 1}),
    ],
)
def test_a_restart_equals_the_uninterrupted_run(
    cluster: Cluster, make: str, local: str, chosen: dict[str, Any]
) -> None:
    """The state is saved between two exchanges, when the ranks differ. With a delay, an exchange is
    under way then."""

    def options(steps: int, **restart: Any) -> Wrapped:
        return Wrapped(make, local, {"every": 3, **chosen}, steps=steps, scheduled=True, **restart)

    ranks = cluster.run(3, optimizer_jobs.run_each, [options(9), options(4)])
    saved = [rank[1].saved for rank in ranks]
    rest = options(5, start=4, saved=saved)
    for (whole, _), (continued,) in zip(
        ranks, cluster.run(3, optimizer_jobs.run_each, [rest]), strict=True
    ):
        assert continued.digests == whole.digests[4:]


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_an_earlier_state_can_be_loaded_during_a_training(
    cluster: Cluster, saved_after: int, delay: int
) -> None:
    """With a delay, an exchange is under way at that time; it is given up."""
    options = Wrapped("local", "adamw", {"codec": "3lc", "delay": delay}, steps=5)
    ranks = cluster.run(2, optimizer_jobs.roll_back, options, saved_after)
    for before, again in ranks:
        assert before == again == ranks[0][0]


def test_a_restart_has_the_momentum_of_the_state(cluster: Cluster) -> None:
    whole = Wrapped("local", "calm", {"every": 2}, steps=6)
    ((run, begun),) = cluster.run(1, optimizer_jobs.run_each, [whole, replace(whole, steps=3)])
    rest = replace(whole, local="adam", steps=3, start=3, saved=[begun.saved])
    ((continued,),) = cluster.run(1, optimizer_jobs.run_each, [rest])
    assert continued.digests == run.digests[3:]


def test_a_killed_rank_is_named(fragile_cluster: Cluster) -> None:
    options = Wrapped("local", options={"every": 2}, steps=1000)
    fragile_cluster.start(3, optimizer_jobs.run_and_die, options, 1, 5)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers.pop(1), Died)
    for answer in answers.values():
        assert "PeerLostError: rank 1 is gone" in answer.message, answer.trace


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Wrapped("local", options={"every": 3}), "'local steps, exchanged every 3'"),
        (Wrapped("slow", options={"every": 2}), "'plain average'"),
    ],
    ids=["every", "outer"],
)
def test_ranks_that_differ_are_named(fragile_cluster: Cluster, other: Wrapped, said: str) -> None:
    usual = Wrapped("local", options={"every": 2})
    fragile_cluster.start(2, optimizer_jobs.run_unlike, [usual, other])
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert "PeerMismatchError: ranks" in answer.message, answer.trace
        assert said in answer.message


def test_what_cannot_be_done_is_refused(cluster: Cluster) -> None:
    (said,) = cluster.run(1, optimizer_jobs.refusals_of_local_steps)
    expected = {
        "every": "ValueError: every is 0; an exchange every 1 step or more is needed",
        "momentum": "ValueError: late_momentum is that of torch.optim.Adam or AdamW",
        "betas": "If a scheduler sets it, give the scheduler cycle_momentum=False",
        "order": "TypeError: the first argument is the optimizer, and the second is the model; "
        "the first is a TwoPaths",
        "norm": "ValueError: clip_norm is 0.0; a positive norm is needed",
        "sparse": "TypeError: the gradient of last.weight is sparse",
        "group": "RuntimeError: LocalSteps takes no further parameters",
        "rank": "ValueError: the state is that of rank 5 of 1",
        "outer": "ValueError: an outer optimizer: the state has True, this rank has False",
        "saved every": "ValueError: every: the state has 2, this rank has 1",
        "twice": "TypeError: LocalSteps exchanges already: give the optimizer that it",
        "earlier version": "ValueError: the state is of LocalSteps of an earlier version",
        "delay": "ValueError: delay: the state has 1, this rank has 0",
        "class": "ValueError: the state is that of the optimizer AdamW, this one wraps SGD",
        "no fragment": "ValueError: fragments is 0; 1 or more are needed",
        "layers": "ValueError: fragments is 6, but the model has 5 layers, and a layer is not cut: "
        "take fragments=5 or fewer",
        "steps": "every is 2: take fragments=2 or fewer, or every=3 or more",
        "long delay": "ValueError: delay is 3; 0 to every=2 steps are possible",
        "all mixed": "ValueError: mix is 1.0; a share from 0 to below 1 is needed",
        "back to back": "mix=0.5 with delay=every=2 would send some changes twice: take delay=1 or",
        "mixed momentum": "correct_noise and late_momentum need whole changes",
        "mixed gains": "correct_noise and late_momentum need whole changes",
        "auto": "chooses codecs for the tensors of a whole model, which fragments exchange apart",
        "lbfgs": "ValueError: LBFGS computes several gradients in a step",
        "noise": "ValueError: the gradient's noise: the state has False, this rank has True",
    }
    assert said.keys() == expected.keys()
    for what, text in expected.items():
        assert text in said[what], what


def test_sparse_gradients_are_the_local_optimizers(cluster: Cluster) -> None:
    (digest, changed), other = cluster.run(2, optimizer_jobs.step_with_sparse_gradients)
    assert other == (digest, changed)
    assert changed == 6  # rows 0 and 1 of the ranks, and rows 20 to 23


def test_threads_end_with_their_optimizers(cluster: Cluster) -> None:
    assert cluster.run(2, optimizer_jobs.drop_optimizers) == [(2, 0), (2, 0)]


def test_a_scale_of_a_grad_scaler_changes_nothing(ranks: list[dict[str, Run]]) -> None:
    for rank in ranks:
        assert rank["scaled"].digests == rank["every step"].digests


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_a_rank_whose_scaler_finds_infinity_leaves_out_its_own_step(
    cluster: Cluster, every: int, is_late: bool
) -> None:
    """With every=3, in the second of the steps between two exchanges."""
    chosen = {"every": every, "delay": every if is_late else 0}
    options = Wrapped("local", "adamw", chosen, steps=9, infinite_step=4, scale=4.0)
    ranks = [rank[0] for rank in cluster.run(3, optimizer_jobs.run_each, [options])]
    assert [rank.stats["left_out"] for rank in ranks] == [0, 0, 1]
    assert "9 steps, 1 left out by a GradScaler" in ranks[2].report
    for rank in ranks:
        assert rank.digests[every - 1 :: every] == ranks[0].digests[every - 1 :: every]
        stayed = every > 1 and rank is ranks[2]  # between exchanges its model did not change
        assert (rank.digests[4] == rank.digests[3]) == stayed
        assert len(set(rank.digests)) == 9 - stayed
        assert not rank.warnings
        assert all(np.isfinite(values).all() for values in rank.parameters.values())


def test_clip_norm_of_one_rank_is_that_of_clip_grad_norm(cluster: Cluster) -> None:
    (clipped,) = cluster.run(1, optimizer_jobs.models_after_steps, "sgd", {"clip_norm": 1.0}, 4)
    (expected,) = cluster.run(1, optimizer_jobs.models_after_steps, "sgd", None, 4)
    for mine, other in zip(clipped[-1], expected[-1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_a_step_is_applied_late_or_by_synchronize(cluster: Cluster) -> None:
    late = Wrapped("local", options={"codec": "raw", "every": 1, "delay": 1}, steps=1)
    flushed = Wrapped(
        "local", options={"codec": "raw", "every": 1, "delay": 1}, steps=1, synchronize_at=0
    )
    at_once = Wrapped("local", options={"codec": "raw", "every": 1}, steps=1)
    for first, then, usual in cluster.run(3, optimizer_jobs.run_each, [late, flushed, at_once]):
        assert first.digests[0] == digest(make_model())
        assert then.digests[0] == usual.digests[0] != first.digests[0]


def test_gains_leave_decoupled_weight_decay_alone(cluster: Cluster) -> None:
    def change(gain: float) -> list[np.ndarray]:
        options = {"correct_noise": True}
        args = ("adamw", options, 1, gain)
        ((after,),) = cluster.run(1, optimizer_jobs.models_after_steps, *args)
        return [now - was for now, was in zip(after, initial, strict=True)]

    initial = [p.detach().numpy() for p in make_model().parameters()]
    for once, twice, was in zip(change(1.0), change(2.0), initial, strict=True):
        decayed = -2e-3 * 0.1 * was
        np.testing.assert_allclose(twice - decayed, 2.0 * (once - decayed), atol=1e-6)


def test_a_parameter_without_gradient_stays_as_it_is(cluster: Cluster) -> None:
    ((first, last),) = cluster.run(1, optimizer_jobs.step_and_freeze, 2.0)
    np.testing.assert_array_equal(first, last)


def test_corrected_changes_are_reported(ranks: list[dict[str, Run]]) -> None:
    for rank in ranks:
        gains = rank["corrected"].stats["gains"]
        assert len(gains) == len(list(make_model().parameters()))
        assert min(gains) >= 1.0
        assert max(gains) <= len(ranks) ** 0.5
        assert ("for the gradient's noise" in rank["corrected"].report) == (len(gains) > 0)
        assert "statistics of the gradient" not in rank["corrected"].report, "no tensor of the user"
        assert rank["plain 3lc"].stats["gains"] == []
    if len(ranks) > 1:
        assert max(ranks[0]["corrected"].stats["gains"]) > 1.2


def test_late_momentum_is_adams_average(cluster: Cluster) -> None:
    """With a second moment that does not change, Adam's quotient may be averaged before or after
    the exchange."""
    settings = {"late_momentum": False}, {"late_momentum": True}, {"every": 6}
    (early,), (late,), (local,) = (
        cluster.run(1, optimizer_jobs.models_after_steps, "steady", each, 5) for each in settings
    )
    for step, expected in enumerate(early):
        for mine in (late, local):
            for values, other in zip(mine[step], expected, strict=True):
                np.testing.assert_allclose(values, other, rtol=1e-3, atol=1e-6)


def test_late_momentum_of_some_steps_is_that_of_their_mean_in_each() -> None:
    sums = [torch.tensor([3.0, -6.0]), torch.tensor([0.0, 9.0])]
    at_once, each = (LateMomentum([0.9], [sums[0]]) for _ in range(2))
    for total in sums:
        change = total.clone()
        at_once.smooth([change], steps=3)
        parts = [total / 3 for _ in range(3)]
        for part in parts:
            each.smooth([part])
        torch.testing.assert_close(change, sum(parts))
        torch.testing.assert_close(at_once.state_dict(), each.state_dict())
