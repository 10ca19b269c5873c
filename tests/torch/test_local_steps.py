"""LocalSteps: ranks step alone, and their models are equal again after every k-th step."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import runs
from averages_by_hand import nesterov, train_by_hand, unchanged
from cluster import Cluster, Died
from gradwire._core import spell_out_codec
from gradwire.local_schedule import GATED_CODEC, Schedule
from gradwire.torch import (
    LocalSteps,
    ShardedOptimizer,
    loopback,
    outer_nesterov,
    pulse_loco,
    sparse_loco,
)
from gradwire.torch.errors import CoarseGradientsWarning, NonFiniteStepWarning
from gradwire.torch.optimizers.late_momentum import LateMomentum
from gradwire.torch.optimizers.local_rules import LocalRules
from gradwire.torch.optimizers.local_stats import LocalStats
from gradwire.torch.options import grouped
from gradwire.torch.stats import Totals, summarize
from runs import INFINITE_NAME, Case, Run, adam, adamw, said_by, sgd, threads
from training import batch, digest, loss_of, make_model
from ways import Inner, Training, Way, build


def local(inner: Inner = sgd, **options: Any) -> Case:
    return Case(Way("local", options), inner)


calm = partial(Adam, lr=2e-3, betas=(0.5, 0.99))
steady = partial(Adam, lr=1e3, eps=1e6)  # its divisor is eps
SLOW: dict[str, Any] = {"outer": outer_nesterov(0.1)}
PLAIN = local(codec="raw", every=2)
CASES = {
    "plain raw": PLAIN,
    "outer raw": local(codec="raw", every=2, outer=outer_nesterov()),
    "plain 3lc": local(codec="3lc", every=2),
    "outer 3lc": local(adamw, codec="3lc", every=3, **SLOW),
    "ring": local(codec="3lc:s=1.0", exchange="ring", every=2),
    "terngrad": local(exchange="terngrad", every=2),
    "machines": local(exchange="hierarchical", ranks_per_machine=1, every=2),
    "scheduled": replace(PLAIN, scheduled=True),
    "every step": local(codec="raw", every=1),
    "corrected": local(adamw, codec="3lc:s=1", every=1),
    "late": local(adamw, codec="3lc:s=1", every=1, delay=1),
    "late momentum": local(adamw, codec="3lc:s=1", every=3),
    "late both": local(adamw, codec="3lc:s=1", every=2, delay=2),
    "late outer": local(codec="3lc:s=1", every=2, delay=2, **SLOW),
    "scaled": replace(local(codec="raw", every=1), scale=2.0**8),
    "called": replace(local(codec="3lc", every=4), after={6: runs.settle}),
}


@pytest.fixture(scope="module", params=(1, 3))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    return runs.run_each(request.param, CASES)


def test_replicas_are_equal_after_every_exchange_and_then_alone(
    ranks: list[dict[str, Run]],
) -> None:
    for name, case in CASES.items():
        for steps in range(1, case.steps + 1):
            different = len({rank[name].digests[steps - 1] for rank in ranks})
            exchanged = steps % case.way.options["every"] == 0 or steps in case.after
            assert different == (1 if exchanged else len(ranks)), (name, steps)


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        ({}, "small"),
        ({"every": 4}, "small"),
        ({"every": 5}, "half-byte"),
        ({"outer": outer_nesterov()}, "half-byte"),
        ({"outer": outer_nesterov(), "codec": "small"}, "small"),
        ({"outer": outer_nesterov(), "exchange": "ring"}, "int8"),
        (pulse_loco(), GATED_CODEC),
    ],
)
def test_default_codecs(options: dict[str, Any], codec: str) -> None:
    def choose(rank: int) -> str:
        model = make_model()
        optimizer = LocalSteps(sgd(model.parameters()), model, **{"every": 2, **options})
        return optimizer.stats().exchanges.codec

    assert loopback.run(1, choose) == [spell_out_codec(codec)]


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"codec": "small"}, False),
        ({"codec": "small", "every": 30}, True),
        ({"codec": "small", "schedule": Schedule(every=30)}, True),
        ({"codec": "small", "outer": outer_nesterov()}, True),
        ({"codec": "auto:bits=0.5", "every": 30}, True),
        ({"codec": "half-byte", "every": 30}, False),
        ({"codec": "terngrad", "outer": outer_nesterov()}, False),  # its errors are not sent late
        ({"every": 30, **sparse_loco()}, False),
        ({"every": 30, **pulse_loco()}, False),
    ],
)
def test_late_changes_do_not_go_with_seldom_exchanges(options: dict[str, Any], warns: bool) -> None:
    def make(rank: int) -> list[Any]:
        model = make_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LocalSteps(sgd(model.parameters()), model, **options).close()
        return [(w.category, Path(w.filename).name) for w in caught]

    said = [(CoarseGradientsWarning, Path(__file__).name)] if warns else []
    assert loopback.run(1, make) == [said]


@pytest.mark.parametrize("name", ["plain raw", "outer raw"])
def test_raw_exchanges_are_the_algorithm_written_down(name: str) -> None:
    run = runs.run_one(3, CASES[name])[0]
    outer = nesterov() if name == "outer raw" else unchanged
    expected = train_by_hand(CASES[name], 3, outer=outer)[0]
    for parameter, values in run.training.values().items():
        np.testing.assert_allclose(values, expected[parameter], rtol=1e-4, atol=1e-5)


def test_bytes_go_with_the_exchanges(ranks: list[dict[str, Run]]) -> None:
    sent = {name: ranks[0][name].stats for name in CASES}
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


class Early(torch.optim.Optimizer):
    """Has its state before the first step, and needs it there, as Adagrad of PyTorch 2.6."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        for parameter in self.param_groups[0]["params"]:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self.state[parameter] |= {"step": 0, "seen": zeros + 1e-3}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] += 1
                state["seen"].addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, state["seen"].sqrt(), value=-0.01)


@pytest.mark.parametrize(("inner", "codec"), [(adam, "3lc:s=1.75"), (adam, "raw"), (Early, "int8")])
def test_a_change_that_is_not_finite_is_undone(inner: Inner, codec: str) -> None:
    """The change before the second exchange is infinite, so all ranks go back to the anchor."""
    deeds = {3: runs.make_infinite}
    case = replace(local(inner, codec=codec, every=2), steps=8, with_gradients=deeds)
    ranks = runs.run_one(3, case)
    for rank in ranks:
        assert rank.digests[3] == ranks[0].digests[1]
        assert rank.digests[5] == ranks[0].digests[5] != rank.digests[3]
        assert rank.digests[7] == ranks[0].digests[7] != rank.digests[5]
        assert rank.stats["skipped_steps"] == 1
        assert np.isfinite(rank.losses[4:]).all()
        (said,) = rank.said(NonFiniteStepWarning)
    assert f"the change of rank 2 is not finite at element 3 of {INFINITE_NAME}" in said
    assert "all ranks go back to the values of the exchange before" in said


@pytest.mark.parametrize(
    "case",
    [
        local(every=3),
        local(every=3, **SLOW),
        local(adamw, every=3, clip_norm=0.5),
        local(adamw, every=3, delay=3, clip_norm=0.5),
        local(adamw, every=1),
    ],
    ids=["plain", "outer", "clipped", "late", "every step"],
)
def test_a_restart_equals_the_uninterrupted_run(case: Case) -> None:
    """The state is saved between two exchanges, when the ranks differ. With a delay, an exchange is
    under way then."""
    case = replace(case, steps=9, scheduled=True, notes=(4,))
    ranks = runs.run_one(3, case)
    again = runs.run_one(3, runs.restarted(case, ranks, 4))
    for whole, continued in zip(ranks, again, strict=True):
        assert continued.digests == whole.digests[4:]


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_an_earlier_state_can_be_loaded_during_a_training(saved_after: int, delay: int) -> None:
    """With a delay, an exchange is under way at that time; it is given up."""

    def roll_back(rank: int) -> tuple[list[str], list[str]]:
        """The digests after each of the steps that follow a state, and again after loading it."""
        training = build(local(codec="3lc", delay=delay).way, make_model(), adamw)
        training.run(saved_after, loss_of)
        state = training.state()
        digests: list[str] = []
        for _ in range(2):
            training.run(5 - saved_after, loss_of, lambda _: digests.append(digest(training.model)))
            training.load(state, saved_after)
        training.close()
        return digests[: 5 - saved_after], digests[5 - saved_after :]

    ranks = threads(2, roll_back)
    for before, again in ranks:
        assert before == again == ranks[0][0]


def test_a_restart_has_the_momentum_of_the_state() -> None:
    whole = replace(local(calm, every=2), notes=(3,))
    (run,) = runs.run_one(1, whole)
    rest = replace(runs.restarted(whole, [run], 3), inner=adam)
    (continued,) = runs.run_one(1, rest)
    assert continued.digests == run.digests[3:]


def test_a_killed_rank_is_named(fragile_cluster: Cluster) -> None:
    case = replace(local(every=2), steps=1000, after={5: partial(runs.kill, 1)})
    fragile_cluster.start(3, runs.run, case)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers.pop(1), Died)
    for answer in answers.values():
        assert "PeerLostError: rank 1 is gone" in answer.message, answer.trace


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (local(every=3), "'local steps, exchanged every 3'"),
        (local(every=2, **SLOW), "'plain average'"),
    ],
    ids=["every", "outer"],
)
def test_ranks_that_differ_are_named(other: Case, said: str) -> None:
    cases = [local(every=2), other]
    for answer in threads(2, lambda rank: said_by(lambda: runs.run(cases[rank]))):
        assert "PeerMismatchError: ranks" in answer
        assert said in answer


def test_what_cannot_be_done_is_refused() -> None:
    threads(1, lambda rank: refuse())


def refuse() -> None:
    model = make_model()

    def make(inner: Inner = sgd, **options: Any) -> LocalSteps:
        return LocalSteps(inner(list(model.parameters())), model, **grouped(options))

    def check(said: str, call: Callable[[], Any]) -> None:
        assert said in said_by(call)

    def check_options(said: str, inner: Inner = adamw, **options: Any) -> None:
        check(said, lambda: make(inner, **options))

    check_options("ValueError: every is 0; an exchange every 1 step or more is needed", every=0)
    check_options("ValueError: late_momentum is that of torch.optim.Adam", sgd, late_momentum=True)
    check_options("ValueError: clip_norm is 0.0; a positive norm is needed", clip_norm=0.0)
    check_options("ValueError: fragments is 0; 1 or more are needed", fragments=0)
    layers = "ValueError: fragments is 6, but the model has 5 layers, and a layer is not cut: "
    check_options(f"{layers}take fragments=5 or fewer", every=9, fragments=6)
    said = "every is 2: take fragments=2 or fewer, or every=3 or more"
    check_options(said, every=2, fragments=3)
    check_options("ValueError: delay is 3; 0 to every=2 steps are possible", every=2, delay=3)
    check_options("ValueError: mix is 1.0; a share from 0 to below 1 is needed", every=2, mix=1.0)
    said = "mix=0.5 with delay=every=2 would send some changes twice: take delay=1 or"
    check_options(said, every=2, delay=2, mix=0.5)
    said = "correct_noise and late_momentum need whole changes"
    check_options(said, every=2, delay=1, mix=0.5, late_momentum=True)
    check_options(said, every=2, delay=1, mix=0.5, correct_noise=True)
    said = "chooses codecs for the tensors of a whole model, which fragments exchange apart"
    check_options(said, every=2, fragments=2, codec="auto:bits=1")
    said = "ValueError: LBFGS computes several gradients in a step"
    check_options(said, torch.optim.LBFGS, clip_norm=1.0)

    plain, often = make(every=2), make(every=1, outer=outer_nesterov(), codec="small")
    inner = adam(model.parameters())
    cycled = LocalSteps(inner, model)
    inner.param_groups[0]["betas"] = (0.85, 0.99)
    check("If a scheduler sets it, give the scheduler cycle_momentum=False", cycled.step)
    order = "TypeError: the first argument is the optimizer, and the second is the model; "
    swapped: Any = model, inner
    check(f"{order}the first is a TwoPaths", lambda: LocalSteps(*swapped))
    said = "TypeError: LocalSteps exchanges already: give the optimizer that it"
    check(said, lambda: LocalSteps(plain, model))
    group: dict[str, Any] = {"params": [nn.Parameter(torch.ones(2))]}
    said = "RuntimeError: LocalSteps takes no further parameters"
    check(said, lambda: plain.add_param_group(group))
    clipped = make(adam, clip_norm=1.0)
    model.last.weight.grad = torch.ones_like(model.last.weight).to_sparse()
    check("TypeError: the gradient of last.weight is sparse", clipped.step)

    def check_state(said: str, loading: LocalSteps, state: dict[str, Any]) -> None:
        check(f"ValueError: {said}", lambda: loading.load_state_dict(state))

    state = make(every=2, outer=outer_nesterov(), codec="small").state_dict()
    check_state("the state is that of rank 5 of 1", often, state | {"rank": 5})
    check_state("an outer optimizer: the state has True, this rank has False", plain, state)
    check_state("every: the state has 2, this rank has 1", often, state)
    earlier = often.state_dict()
    del earlier["fragments"][0]["used"]
    check_state("the state is of LocalSteps of an earlier version", often, earlier)
    late = plain.state_dict()
    late["schedule"] = {**late["schedule"], "delay": 1}
    check_state("delay: the state has 1, this rank has 0", plain, late)
    other = {**often.state_dict(), "optimizer_class": "AdamW", "optimizer": inner.state_dict()}
    check_state("the state is that of the optimizer AdamW, this one wraps SGD", often, other)
    noisy = plain.state_dict()
    noisy["schedule"] = {**noisy["schedule"], "every": 1}
    noisy["fragments"] = [{**noisy["fragments"][0], "momentum": {}}]
    said = "the gradient's noise: the state has False, this rank has True"
    check_state(said, clipped, noisy)


def test_sparse_gradients_are_the_local_optimizers() -> None:
    """LocalSteps sends changes of parameters, so the local optimizer may take sparse gradients."""

    def train(rank: int) -> tuple[str, float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.EmbeddingBag(40, 8, sparse=True), nn.Linear(8, 2))
        before = model[0].weight.detach().clone()
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9)  # whose state is sparse
        optimizer = LocalSteps(inner, model, every=2, codec="raw")
        for step in range(4):
            optimizer.zero_grad()
            model(torch.tensor([[rank, 20 + step]])).square().sum().backward()
            optimizer.step()
        changed = (model[0].weight - before).abs().sum(dim=1).count_nonzero()
        return digest(model), changed.item()

    (digested, changed), other = threads(2, train)
    assert other == (digested, changed)
    assert changed == 6  # rows 0 and 1 of the ranks, and rows 20 to 23


def drop_optimizers() -> tuple[int, int]:
    """Number of gradwire threads: with two optimizers, and after the last reference is gone."""

    def own_threads() -> int:
        return sum(thread.name == "gradwire" for thread in threading.enumerate())

    gc.collect()
    before = own_threads()
    model = make_model()
    kept: list[Any] = [
        ShardedOptimizer(sgd(model.parameters()), model),
        LocalSteps(sgd(model.parameters()), model, every=1),
    ]
    for optimizer in kept:
        model(batch(0, 0)[0]).sum().backward()
        optimizer.step()
    running = own_threads() - before
    del optimizer
    kept.clear()
    gc.collect()
    return running, own_threads() - before


def test_threads_end_with_their_optimizers(cluster: Cluster) -> None:
    assert cluster.run(2, drop_optimizers) == [(2, 0), (2, 0)]


def test_a_scale_of_a_grad_scaler_changes_nothing(ranks: list[dict[str, Run]]) -> None:
    for rank in ranks:
        assert rank["scaled"].digests == rank["every step"].digests


def test_gradients_count_that_the_optimizer_takes_off() -> None:
    """Their noise was that of zeros, and the decay a part of what is corrected for it."""

    def train(rank: int, clears: bool) -> str:
        training = build("LocalSteps, clipped", make_model(), adamw)
        if clears:
            training.inner.register_step_post_hook(lambda sgd, *_: sgd.zero_grad())
        training.run(6, loss_of)
        training.close()
        return digest(training.model)

    assert threads(2, lambda rank: train(rank, True)) == threads(2, lambda rank: train(rank, False))


def test_a_rank_without_any_gradient_takes_a_scaled_step() -> None:
    """PyTorch multiplies no empty list of gradients."""

    def train(rank: int) -> str:
        training, other = build("LocalSteps, every step", make_model()), nn.Linear(2, 1)
        of_other = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", 8.0)
        loss = other(torch.ones(1, 2)).sum()
        if rank == 0:
            loss = loss + loss_of(training.model, rank, 0)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.step(of_other)
        scaler.update()
        training.close()
        return digest(training.model)

    first, second = threads(2, train)
    assert first == second != digest(make_model())


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_a_rank_whose_scaler_finds_infinity_leaves_out_its_own_step(
    every: int, is_late: bool
) -> None:
    """With every=3, in the second of the steps between two exchanges."""
    case = local(adamw, every=every, delay=every if is_late else 0)
    case = replace(case, steps=9, with_gradients={4: runs.make_infinite}, scale=4.0)
    ranks = runs.run_one(3, case)
    assert [rank.stats["left_out"] for rank in ranks] == [0, 0, 1]
    assert "9 steps, 1 left out by a GradScaler" in ranks[2].report
    for rank in ranks:
        assert rank.digests[every - 1 :: every] == ranks[0].digests[every - 1 :: every]
        stayed = every > 1 and rank is ranks[2]  # between exchanges its model did not change
        assert (rank.digests[4] == rank.digests[3]) == stayed
        assert len(set(rank.digests)) == 9 - stayed
        assert not rank.said(NonFiniteStepWarning)
        assert all(values.isfinite().all() for values in rank.training.values().values())


def models_after_steps(
    inner: Inner, way: Way, steps: int, gain: float = 1.0
) -> list[list[torch.Tensor]]:
    """The parameters after each step of one rank. gain: in the place of each estimated gain."""
    after: list[list[torch.Tensor]] = []

    def train(rank: int) -> None:
        training = build(way, make_model(), inner)
        parameters = list(training.model.parameters())
        if way.kind == "plain":
            training.use_gradients = lambda _: nn.utils.clip_grad_norm_(parameters, 1.0)
        else:
            replace_gains(training, gain)
        training.run(
            steps,
            lambda *args: 50.0 * loss_of(*args),
            lambda _: after.append([p.detach().clone() for p in parameters]),
        )

    threads(1, train)
    return after


def replace_gains(training: Training, gain: float) -> None:
    (fragment,) = training.source._averaging.fragments
    if fragment.noise is not None:
        fragment.noise.gains = lambda: [gain] * len(list(training.model.parameters()))


def raw(**options: Any) -> Way:
    return Way("local", {"codec": "raw", **options})


def test_clip_norm_of_one_rank_is_that_of_clip_grad_norm() -> None:
    clipped = models_after_steps(sgd, raw(clip_norm=1.0), 4)[-1]
    expected = models_after_steps(sgd, Way("plain"), 4)[-1]
    for mine, other in zip(clipped, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_a_step_is_applied_late_or_by_synchronize() -> None:
    late = replace(local(codec="raw", every=1, delay=1), steps=1)
    flushed = replace(late, after={1: runs.settle})
    at_once = replace(local(codec="raw", every=1), steps=1)
    for rank in runs.run_each(3, {"late": late, "flushed": flushed, "at once": at_once}):
        first, then, usual = rank.values()
        assert first.tensors[0] == runs.digests_of(dict(make_model().named_parameters()))
        assert then.digests[0] == usual.digests[0] != first.digests[0]


@pytest.mark.parametrize(("every", "corrects"), [(1, True), (4, True), (5, False)])
def test_only_short_changes_have_the_gain_for_noise(every: int, corrects: bool) -> None:
    model = make_model()
    inner, schedule = adamw(model.parameters()), Schedule(every)
    for given, found in ((None, corrects), (True, True), (False, False)):
        rules = LocalRules.choose(
            inner,
            schedule,
            outer=None,
            clip_norm=None,
            correct_noise=given,
            late_momentum=None,
            residual_decay=1.0,
            is_elastic=False,
        )
        assert rules.correct_noise == found


def test_gains_leave_decoupled_weight_decay_alone() -> None:
    def change(gain: float) -> list[torch.Tensor]:
        (after,) = models_after_steps(adamw, raw(correct_noise=True), 1, gain)
        return [now - was for now, was in zip(after, initial, strict=True)]

    initial = [p.detach() for p in make_model().parameters()]
    for once, twice, was in zip(change(1.0), change(2.0), initial, strict=True):
        decayed = -2e-3 * 0.1 * was
        np.testing.assert_allclose(twice - decayed, 2.0 * (once - decayed), atol=1e-6)


def test_a_parameter_without_gradient_stays_as_it_is() -> None:
    """It had a gradient in the first step alone."""
    seen: list[torch.Tensor] = []

    def train(rank: int) -> None:
        inner = partial(AdamW, lr=1e-2, weight_decay=0.1, betas=(0.0, 0.99))
        training = build(raw(), make_model(), inner)
        replace_gains(training, 2.0)
        training.run(
            4,
            lambda module, rank, step: module(batch(rank, step)[0], step == 0).square().sum(),
            lambda _: seen.append(training.model.get_parameter("branch.weight").detach().clone()),
        )

    threads(1, train)
    np.testing.assert_array_equal(seen[0], seen[-1])


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


def test_late_momentum_is_adams_average() -> None:
    """With a second moment that does not change, Adam's quotient may be averaged before or after
    the exchange."""
    settings: list[dict[str, Any]] = [
        {"late_momentum": False},
        {"late_momentum": True},
        {"every": 6},
    ]
    early, late, local = (models_after_steps(steady, raw(**each), 5) for each in settings)
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
