"""ShardedOptimizer: the local optimizer's steps, equal replicas, a share of the states."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import runs
from cluster import Cluster, Died, Failed
from gradwire.torch import ShardedOptimizer
from gradwire.torch.errors import NonFiniteStepWarning, PeerMismatchError
from owed import total_owed
from runs import INFINITE_NAME, Case, Run, adagrad, adam, adamw, said_by, sgd, threads
from training import batch, digest, loss_of, make_model
from ways import Way, build

USUAL = Case(Way("sharded"))
RAW = Case(Way("sharded", {"codec": "raw"}))
CODECS = ("raw", "bf16", "3lc:s=1.75", "onebit", "qsgd")
GROUPS = replace(RAW, inner=runs.sgd_of_two_groups, scheduled=True)
CASES = {
    **{codec: Case(Way("sharded", {"codec": codec})) for codec in CODECS},
    "adam": Case(Way("sharded", {"codec": "3lc:s=1.5"}), adam),
    "groups": GROUPS,
    "adamw raw": replace(RAW, inner=adamw),
    "plain": Case(Way("plain")),
    "plain groups": replace(GROUPS, way=Way("plain")),
    "plain adamw": Case(Way("plain"), adamw),
    "adagrad raw": replace(RAW, inner=adagrad),
    "plain adagrad": Case(Way("plain"), adagrad),
}


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    return runs.run_each(request.param, CASES)


def test_replicas_are_equal_after_every_step(ranks: list[dict[str, Run]]) -> None:
    for name in CASES:
        digests = ranks[0][name].digests
        assert all(rank[name].digests == digests for rank in ranks)
        assert len(set(digests)) == len(digests), "every step must change something"


@pytest.mark.parametrize(
    ("sharded", "plain"),
    [
        ("raw", "plain"),
        ("groups", "plain groups"),
        ("adamw raw", "plain adamw"),
        ("adagrad raw", "plain adagrad"),
    ],
)
def test_raw_steps_are_those_of_the_local_optimizer(
    ranks: list[dict[str, Run]], sharded: str, plain: str
) -> None:
    """The groups' options and a scheduler's learning rates take effect."""
    expected = ranks[0][plain].training.values()
    for name, values in ranks[0][sharded].training.values().items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=2e-5, err_msg=name)


def exact(run: Run) -> list[tuple[str, int, np.ndarray]]:
    pieces = run.state["optimizer"]["shard"]["pieces"]
    return [(piece["name"], piece["offset"], piece["values"].numpy()) for piece in pieces]


def test_what_the_replicas_lack_is_owed(ranks: list[dict[str, Run]]) -> None:
    """The owner's exact values are the sum of the replica's values and the pull residual."""
    for rank in ranks:
        run = rank["3lc:s=1.75"]
        parameters = run.training.values()
        for name, offset, values in exact(run):
            part = slice(offset, offset + values.size)
            replica = parameters[name].reshape(-1)[part].double().numpy()
            owed = run.owed(6)["pull"].get(name, np.zeros(0))
            lacking = owed[part] if owed.size else 0.0
            np.testing.assert_allclose(values, replica + lacking, rtol=1e-5, atol=1e-6)
            assert len(ranks) == 1 or owed.any() == (parameters[name].dim() > 1)


NUMEL = sum(values.numel() for values in make_model().parameters())


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Run]]) -> None:
    """Each rank sends (N - 1) / N * n * b / 8 bytes each way, plus headers."""
    for way in ("push_bytes", "pull_bytes"):
        sent = sum(rank["raw"].stats[way] for rank in ranks)
        expected = RAW.steps * (len(ranks) - 1) * NUMEL * 4
        assert expected <= sent <= 1.02 * expected


def test_bytes_are_counted(ranks: list[dict[str, Run]]) -> None:
    raw, compressed = ranks[0]["raw"], ranks[0]["3lc:s=1.75"]
    assert raw.stats["steps"] == len(raw.losses)
    assert sum(raw.push_bytes) == raw.stats["push_bytes"]
    if len(ranks) > 1:
        assert 0 < 8 * compressed.stats["push_bytes"] < raw.stats["push_bytes"]
        assert "last.bias" in {tensor["name"] for tensor in compressed.stats["raw_tensors"]}
    assert compressed.stats["codec"] == "3lc:s=1.75"


def test_every_element_is_owned_once(ranks: list[dict[str, Run]]) -> None:
    assert sum(v.size for rank in ranks for _, _, v in exact(rank["raw"])) == NUMEL
    assert sum(rank["adam"].training.source.state_bytes() for rank in ranks) == 2 * 4 * NUMEL


def test_memory_of_states_falls_with_the_ranks() -> None:
    """Adam's two moments of 8 layers of 64 x 64: 8 bytes a value."""

    def state_bytes(rank: int) -> int:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        optimizer = ShardedOptimizer(torch.optim.Adam(model.parameters()), model)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return optimizer.state_bytes()

    whole = 8 * 8 * (64 * 64 + 64)
    for world_size in (1, 2, 4):
        held = threads(world_size, state_bytes)
        assert sum(held) == whole
        assert max(held) <= 1.02 * whole / world_size


@pytest.mark.parametrize("codec", ["3lc:s=1.75", "raw", "bf16"])
def test_a_step_that_is_not_finite_changes_nothing(codec: str) -> None:
    infinite = 3
    way = Way("sharded", {"codec": codec})
    deeds = {infinite: runs.make_infinite}
    case = Case(way, adam, with_gradients=deeds, notes=(infinite, infinite + 1))
    ranks = runs.run_one(3, case)
    for rank in ranks:
        assert rank.digests == ranks[0].digests
        steps = zip(rank.digests, rank.digests[1:], strict=False)
        assert [a != b for a, b in steps] == [step != infinite for step in range(1, 6)]
        assert rank.stats["skipped_steps"] == 1
        (said,) = rank.said(NonFiniteStepWarning)
        assert f"step {infinite}: " in said
        if rank is ranks[-1] or codec.startswith("3lc"):
            assert f"gradient of rank 2 is not finite at element 3 of {INFINITE_NAME}" in said
        shard = rank.state["optimizer"]["shard"]["optimizer"]
        assert {int(state["step"]) for state in shard["state"].values()} == {case.steps - 1}
    before, after = (
        total_owed([rank.owed(steps) for rank in ranks]) for steps in (infinite, infinite + 1)
    )
    assert before.keys() == after.keys()
    for name, values in after.items():
        assert np.isfinite(values).all()
        assert values.any(), name


def test_a_restart_equals_the_uninterrupted_run() -> None:
    way = Way("sharded", {"codec": "3lc"})
    case = Case(way, adamw, steps=7, scheduled=True, notes=(4,))
    ranks = runs.run_one(3, case)
    for continued in runs.run_one(3, runs.restarted(case, ranks, 4)):
        assert continued.digests == ranks[0].digests[4:]


def test_looking_at_states_changes_none() -> None:
    """The states are of pieces, and none is of a whole parameter."""

    def train(rank: int) -> None:
        model = make_model()
        inner = sgd(model.parameters())
        assert not any(inner.state[parameter] for parameter in model.parameters())
        optimizer = ShardedOptimizer(inner, model)
        model(batch(rank, 0)[0]).sum().backward()
        optimizer.step()
        before = len(optimizer.state)
        assert not any(optimizer.state[parameter] for parameter in model.parameters())
        state = optimizer.state_dict()
        assert len(state["shard"]["optimizer"]["state"]) == before > 0
        optimizer.load_state_dict(state)
        optimizer.close()

    threads(2, train)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(fragile_cluster: Cluster, victim: int) -> None:
    case = replace(USUAL, steps=1000, after={4: partial(runs.kill, victim)})
    fragile_cluster.start(3, runs.run, case)
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        if rank == victim:
            assert isinstance(answer, Died)
        else:
            assert isinstance(answer, Failed)
            assert f"PeerLostError: rank {victim} is gone" in answer.message, answer.trace


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(USUAL, way=Way("sharded", {"codec": "3lc:s=1.5"})), "push 3lc:s=1.5"),
        (replace(USUAL, inner=adam), "'sharded Adam'"),
        (replace(USUAL, inner=runs.sgd_of_two_groups), "'lr of group 0 of SGD: 0.02'"),
    ],
    ids=["codec", "optimizer", "groups"],
)
def test_ranks_that_differ_are_named(other: Case, said: str) -> None:
    cases = [USUAL, other, USUAL]
    answers = threads(3, lambda rank: said_by(lambda: runs.run(cases[rank])))
    for rank, answer in enumerate(answers):
        pair = "ranks 1 and 0" if rank == 1 else f"ranks {rank} and 1"
        assert answer.startswith(f"PeerMismatchError: {pair} can't exchange")
        assert said in answer


def test_an_optimizer_that_explodes_stops_all_ranks() -> None:
    def explode(rank: int) -> None:
        """An optimizer turns finite gradients into infinity, on the rank that owns a parameter."""
        model = make_model()
        optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1e38), model)
        for step in range(3):
            (100 * model(batch(rank, step)[0])).square().sum().backward()
            optimizer.step()

    for answer in threads(2, lambda rank: said_by(lambda: explode(rank))):
        assert re.search("SGD made .* NaN or infinite", answer), answer


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_one_rank_alone_writes_is_named_where_it_differs(factor: float) -> None:
    """The ranks went on with different models. A rank may evaluate other weights, and go back."""

    def train(rank: int) -> str:
        training = build("ShardedOptimizer", make_model(), codec="raw")
        training.run(2, loss_of)
        if rank == 1:
            with torch.no_grad():
                training.model.get_parameter("first.weight").mul_(factor)
        training.run(2, loss_of)
        training.close()
        return digest(training.model)

    if factor == 1.0:
        one, other = threads(2, train)
        assert one == other
    else:
        said = r"has 'values of first\.weight, checksum .*: what is written into a parameter"
        with pytest.raises(PeerMismatchError, match=said):
            threads(2, train)


def test_what_a_closure_writes_is_compared_too() -> None:
    """A forward pass may, as that of nn.Embedding(max_norm=): the ranks went on with different
    models."""

    def train(rank: int) -> None:
        training = build("ShardedOptimizer", make_model(), codec="raw")
        first = training.model.get_parameter("first.weight")

        def closure() -> torch.Tensor:
            with torch.no_grad():
                first.clamp_(max=0.1 - 0.05 * rank)
            loss = loss_of(training.model, rank, 0)
            loss.backward()
            return loss

        training.optimizer.step(closure)

    with pytest.raises(PeerMismatchError, match=r"has 'values of first\.weight, checksum"):
        threads(2, train)


def test_what_cannot_be_done_is_refused() -> None:
    threads(1, lambda rank: refuse())


def refuse() -> None:
    def wrap(make: Callable[[nn.Module], torch.optim.Optimizer]) -> ShardedOptimizer:
        model = make_model()
        return ShardedOptimizer(make(model), model)

    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model.parameters())
        model(batch(0, 0)[0]).sum().backward()
        optimizer.step()
        return optimizer

    def frozen(model: nn.Module) -> torch.optim.Optimizer:
        model.get_parameter("last.bias").requires_grad_(False)
        return sgd(model.parameters())

    def check(text: str, call: Callable[[], Any]) -> None:
        assert text in said_by(call)

    model, other = make_model(), make_model()
    swapped: Any = model, sgd(model.parameters())
    in_ddp = DistributedDataParallel(model)
    order = "TypeError: the first argument is the optimizer, and the second is the model"
    check(order, lambda: ShardedOptimizer(*swapped))
    lbfgs = torch.optim.LBFGS(model.parameters())
    said = "ValueError: LBFGS computes several gradients in a step"
    check(said, lambda: ShardedOptimizer(lbfgs, model))
    check("ValueError: the Adam has taken steps already", lambda: wrap(stepped))
    check("ValueError: last.bias requires no gradient", lambda: wrap(frozen))
    said = "ValueError: parameter 0 of group 0 is not among the named parameters of the"
    check(said, lambda: ShardedOptimizer(sgd(other.parameters()), model))
    said = "ValueError: the model is in DistributedDataParallel"
    check(said, lambda: ShardedOptimizer(sgd(model.parameters()), in_ddp))
    said = "TypeError: dense float32, bfloat16, float16 parameters are exchanged; first"
    check(said, lambda: wrap(lambda m: sgd(m.double().parameters())))
    model = make_model()
    optimizer = ShardedOptimizer(adam(model.parameters()), model, "3lc")
    group: dict[str, Any] = {"params": [nn.Parameter(torch.ones(2))]}
    said = "RuntimeError: ShardedOptimizer takes no further parameters"
    check(said, lambda: optimizer.add_param_group(group))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0, 0)[0]).sum()).backward()
    said = "RuntimeError: ShardedOptimizer takes no GradScaler"
    check(said, lambda: scaler.step(optimizer))
    model.last.weight.grad = torch.ones_like(model.last.weight).to_sparse()
    said = "TypeError: the gradient of last.weight is sparse (torch.sparse_coo)"
    check(said, optimizer.step)
    model.zero_grad()
    state = optimizer.state_dict()
    sharing_sgd = ShardedOptimizer(sgd(other.parameters()), other, "3lc")
    for loads, given, text in (
        (optimizer, state | {"rank": 5}, "the state is that of rank 5 of 1"),
        (
            *(optimizer, state | {"codec": "raw"}),
            "the state is that of a training with codec 'raw', this one has '3lc'",
        ),
        (optimizer, {"some": "thing"}, "not a gradwire state: its format is None"),
        (sharing_sgd, state, "the state is that of the optimizer Adam, this one wraps SGD"),
    ):
        check(f"ValueError: {text}", partial(loads.load_state_dict, given))
    optimizer.close()
    check("CommunicationError: it was closed", optimizer.step)
