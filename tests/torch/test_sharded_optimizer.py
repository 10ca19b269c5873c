"""ShardedOptimizer: the local optimizer's steps, equal replicas, a share of the states."""

from __future__ import annotations

import re

import numpy as np
import pytest

import jobs
import optimizer_jobs
from cluster import Cluster, Died, Failed
from optimizer_jobs import INFINITE_NAME, Run, Wrapped
from training import load

RAW = {"codec": "raw"}
CODECS = ("raw", "bf16", "3lc:s=1.75", "onebit", "qsgd")
RUNS = {
    **{codec: Wrapped(options={"codec": codec}) for codec in CODECS},
    "adam": Wrapped(local="adam", options={"codec": "3lc:s=1.5"}),
    "groups": Wrapped(options=RAW, two_groups=True, scheduled=True),
    "adamw raw": Wrapped(local="adamw", options=RAW),
    "plain": Wrapped(None),
    "plain groups": Wrapped(None, two_groups=True, scheduled=True),
    "plain adamw": Wrapped(None, "adamw"),
}


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request: pytest.FixtureRequest, cluster: Cluster) -> list[dict[str, Run]]:
    trained = cluster.run(request.param, optimizer_jobs.run_each, list(RUNS.values()))
    return [dict(zip(RUNS, rank, strict=True)) for rank in trained]


def test_replicas_are_equal_after_every_step(ranks: list[dict[str, Run]]) -> None:
    for name in RUNS:
        digests = ranks[0][name].digests
        assert all(rank[name].digests == digests for rank in ranks)
        assert len(set(digests)) == len(digests), "every step must change something"


@pytest.mark.parametrize(
    ("sharded", "plain"),
    [("raw", "plain"), ("groups", "plain groups"), ("adamw raw", "plain adamw")],
)
def test_raw_steps_are_those_of_the_local_optimizer(
    ranks: list[dict[str, Run]], sharded: str, plain: str
) -> None:
    """The groups' options and a scheduler's learning rates take effect."""
    for name, values in ranks[0][sharded].parameters.items():
        expected = ranks[0][plain].parameters[name]
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=2e-5, err_msg=name)


def test_what_the_replicas_lack_is_owed(ranks: list[dict[str, Run]]) -> None:
    """The owner's exact values are the sum of the replica's values and the pull residual."""
    for rank in ranks:
        run = rank["3lc:s=1.75"]
        for name, offset, values in run.exact:
            part = slice(offset, offset + values.size)
            replica = run.parameters[name].reshape(-1)[part].astype(float)
            owed = run.owed[-1]["pull"].get(name, np.zeros(0))
            lacking = owed[part] if owed.size else 0.0
            np.testing.assert_allclose(values, replica + lacking, rtol=1e-5, atol=1e-6)
            assert len(ranks) == 1 or owed.any() == (run.parameters[name].ndim > 1)


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Run]]) -> None:
    """Each rank sends (N - 1) / N * n * b / 8 bytes each way, plus headers."""
    numel = sum(values.size for values in ranks[0]["raw"].parameters.values())
    for way in ("push_bytes", "pull_bytes"):
        sent = sum(rank["raw"].stats[way] for rank in ranks)
        expected = RUNS["raw"].steps * (len(ranks) - 1) * numel * 4
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
    numel = sum(values.size for values in ranks[0]["raw"].parameters.values())
    assert sum(v.size for rank in ranks for _, _, v in rank["raw"].exact) == numel
    assert sum(rank["adam"].state_bytes for rank in ranks) == 2 * 4 * numel


def test_memory_of_states_falls_with_the_ranks(cluster: Cluster) -> None:
    """Adam's two moments of 8 layers of 64 x 64: 8 bytes a value."""
    whole = 8 * 8 * (64 * 64 + 64)
    for world_size in (1, 2, 4):
        held = cluster.run(world_size, optimizer_jobs.state_bytes_of, 8, 64)
        assert sum(held) == whole
        assert max(held) <= 1.02 * whole / world_size


@pytest.mark.parametrize("codec", ["3lc:s=1.75", "raw", "bf16"])
def test_a_step_that_is_not_finite_changes_nothing(cluster: Cluster, codec: str) -> None:
    infinite = 3
    options = Wrapped(local="adam", options={"codec": codec}, infinite_step=infinite)
    ranks = [rank[0] for rank in cluster.run(3, optimizer_jobs.run_each, [options])]
    for rank in ranks:
        assert rank.digests == ranks[0].digests
        steps = zip(rank.digests, rank.digests[1:], strict=False)
        assert [a != b for a, b in steps] == [step != infinite for step in range(1, 6)]
        assert rank.stats["skipped_steps"] == 1
        assert len(rank.warnings) == 1
        assert f"step {infinite}: " in rank.warnings[0]
        if rank is ranks[-1] or codec.startswith("3lc"):
            assert (
                f"gradient of rank 2 is not finite at element 3 of {INFINITE_NAME}"
                in (rank.warnings[0])
            )
        shard = load(rank.saved)["optimizer"]["shard"]["optimizer"]
        assert {int(state["step"]) for state in shard["state"].values()} == {options.steps - 1}
    before = jobs.total_owed([rank.owed[infinite - 1] for rank in ranks])
    after = jobs.total_owed([rank.owed[infinite] for rank in ranks])
    assert before.keys() == after.keys()
    for name, values in after.items():
        assert np.isfinite(values).all()
        assert values.any(), name


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    def options(steps: int) -> Wrapped:
        return Wrapped(local="adamw", options={"codec": "3lc"}, steps=steps, scheduled=True)

    ranks = cluster.run(3, optimizer_jobs.run_each, [options(7), options(4)])
    saved = [rank[1].saved for rank in ranks]
    rest = Wrapped("sharded", "adamw", {"codec": "3lc"}, 3, start=4, scheduled=True, saved=saved)
    for (continued,) in cluster.run(3, optimizer_jobs.run_each, [rest]):
        assert continued.digests == ranks[0][0].digests[4:]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(fragile_cluster: Cluster, victim: int) -> None:
    fragile_cluster.start(3, optimizer_jobs.run_and_die, Wrapped(steps=1000), victim, 4)
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        if rank == victim:
            assert isinstance(answer, Died)
        else:
            assert isinstance(answer, Failed)
            assert f"PeerLostError: rank {victim} is gone" in answer.message, answer.trace


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Wrapped(options={"codec": "3lc:s=1.5"}), "push 3lc:s=1.5"),
        (Wrapped(local="adam"), "'sharded Adam'"),
        (Wrapped(two_groups=True), "'lr of group 0 of SGD: 0.02'"),
    ],
    ids=["codec", "optimizer", "groups"],
)
def test_ranks_that_differ_are_named(fragile_cluster: Cluster, other: Wrapped, said: str) -> None:
    fragile_cluster.start(3, optimizer_jobs.run_unlike, [Wrapped(), other, Wrapped()])
    for rank, answer in fragile_cluster.collect(range(3), seconds=60).items():
        pair = "ranks 1 and 0" if rank == 1 else f"ranks {rank} and 1"
        assert f"PeerMismatchError: {pair} can't exchange" in answer.message, answer.trace
        assert said in answer.message


def test_an_optimizer_that_explodes_stops_all_ranks(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(2, optimizer_jobs.explode)
    for answer in fragile_cluster.collect(range(2), seconds=60).values():
        assert isinstance(answer, Failed)
        assert re.search("SGD made .* NaN or infinite", answer.message), answer.trace


def test_what_cannot_be_done_is_refused(cluster: Cluster) -> None:
    (said,) = cluster.run(1, optimizer_jobs.refusals_of_sharded)
    expected = {
        "order": "TypeError: the first argument is the optimizer, and the second is the model",
        "lbfgs": "ValueError: LBFGS computes several gradients in a step",
        "stepped": "ValueError: the Adam has taken steps already",
        "frozen": "ValueError: last.bias requires no gradient",
        "foreign": "ValueError: parameter 0 of group 0 is not among the named parameters of the",
        "double": "TypeError: dense float32 parameters are exchanged; first.weight is",
        "ddp": "ValueError: the model is in DistributedDataParallel",
        "group": "RuntimeError: ShardedOptimizer takes no further parameters",
        "scaler": "RuntimeError: ShardedOptimizer takes no GradScaler",
        "sparse": "TypeError: the gradient of last.weight is sparse (torch.sparse_coo)",
        "rank": "ValueError: the state is that of rank 5 of 1",
        "codec": "ValueError: the state is that of a training with codec 'raw', this one has '3lc'",
        "format": "ValueError: not a gradwire state of format 1",
        "class": "ValueError: the state is that of the optimizer Adam, this one wraps SGD",
        "closed": "CommunicationError: it was closed",
    }
    assert said.keys() == expected.keys()
    for what, text in expected.items():
        assert text in said[what], what
