"""FullyShardComm: PyTorch's results if nothing is compressed, equal replicas, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fsdp_jobs
from cluster import Cluster, Failed
from fsdp_jobs import Replicas, Run, Sharded

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
NARROW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
WAYS = {
    "plain": Sharded(),
    "no overlap": Sharded({"codec": "raw", "overlap": False}),
    "mixed precision": Sharded(mixed=BF16),
    "no resharding": Sharded(reshard=False),
    "activation checkpoints": Sharded(checkpointed=True),
    "accumulation": Sharded(micro_batches=3),
    "clipping": Sharded(clip=0.5),
    "step in backward": Sharded(in_backward=True),
    "unused branch": Sharded(branch=False),
    "frozen": Sharded(frozen="second.weight"),
    "failed backward": Sharded(failing_step=2),
}
COMPRESSED = {
    "3lc": Sharded({"codec": "3lc", "start_iter": 0}),
    "int8 and weights": Sharded(
        {"codec": "int8", "weights": "int8:bucket=64", "start_iter": 1}, mixed=NARROW
    ),
    "draws": Sharded({"codec": "qsgd:bits=4", "weights": "qsgd:bits=8"}, checkpointed=True),
}


@pytest.fixture(scope="module", params=[(3, False), (4, True)], ids=["fsdp", "hsdp"])
def ranks(request: pytest.FixtureRequest, cluster: Cluster) -> list[dict[str, Run]]:
    world, hybrid = request.param
    runs = {name: replace(way, hybrid=hybrid) for name, way in {**WAYS, **COMPRESSED}.items()}
    runs |= {f"{name}, PyTorch": replace(runs[name], comm=None) for name in WAYS}
    trained = cluster.run(world, fsdp_jobs.run_each, list(runs.values()))
    return [dict(zip(runs, rank, strict=True)) for rank in trained]


@pytest.mark.parametrize("way", WAYS)
def test_uncompressed_it_is_pytorchs_training(ranks: list[dict[str, Run]], way: str) -> None:
    for rank in ranks:
        ours, theirs = rank[way], rank[f"{way}, PyTorch"]
        assert len(set(ours.losses)) > 2, "the steps must change something"
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
        for name, values in theirs.parameters.items():
            np.testing.assert_allclose(ours.parameters[name], values, rtol=1e-4, atol=1e-6)
        assert ours.stats["steps"] == len(ours.losses)


@pytest.mark.parametrize("way", COMPRESSED)
def test_compressed_it_learns_alike_on_all_ranks(ranks: list[dict[str, Run]], way: str) -> None:
    for rank in ranks:
        for name, values in rank[way].parameters.items():
            np.testing.assert_array_equal(values, ranks[0][way].parameters[name])
            other = rank["plain"].parameters[name]
            assert np.isfinite(values).all()
            assert np.abs(values - other).max() < 0.05
        assert rank[way].stats["ratio"] > 1.5
    if len(ranks) == 4:
        assert ranks[0][way].local == ranks[2][way].local
        assert ranks[1][way].local == ranks[3][way].local


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Run]]) -> None:
    """A rank sends (N - 1) / N of n values in each leg; FSDP has a push, HSDP both."""
    numel = sum(values.size for values in ranks[0]["plain"].parameters.values())
    steps = WAYS["plain"].steps
    for rank in ranks:
        stats = rank["plain"].stats
        if len(ranks) == 3:
            assert stats["pull_bytes"] == 0
        sent = stats["push_bytes"] + stats["pull_bytes"]
        expected = steps * 4 * numel * (2 / 3 if len(ranks) == 3 else 2 * (1 / 2) / 2)
        assert 0.95 * expected < sent < 1.1 * expected
        packed = rank["int8 and weights"].weights_stats
        assert packed["push_bytes"] == 0
        assert 8 < packed["compressed_bits_pull"] < 9


@pytest.mark.parametrize("hybrid", [False, True])
def test_forward_computes_with_the_decoded_weights(cluster: Cluster, hybrid: bool) -> None:
    for rank in cluster.run(4, fsdp_jobs.gather_weights, hybrid, "int8:bucket=64"):
        for name, (used, expected) in rank.items():
            np.testing.assert_array_equal(used, expected, err_msg=name)


def test_draws_of_weights_are_the_same_in_forward_and_backward(cluster: Cluster) -> None:
    ranks = cluster.run(2, fsdp_jobs.weights_seen, "qsgd:bits=4", 3)
    assert ranks[0] == ranks[1]
    for step in ranks[0]:
        forward, backward = step
        assert forward == backward
    assert len({forward for forward, _ in ranks[0]}) == 3, "each step has its own draws"


def test_resharding_to_a_machine_gathers_there_uncompressed(cluster: Cluster) -> None:
    """ZeRO++'s hierarchical partitioning: backward gathers among fewer ranks than forward."""
    ways = [Sharded({"codec": "raw", "weights": "bf16"}, reshard=reshard) for reshard in (2, True)]
    for few, all_ranks in cluster.run(4, fsdp_jobs.run_each, ways):
        assert few.weights_stats["pull_bytes"] < 0.8 * all_ranks.weights_stats["pull_bytes"]
        np.testing.assert_allclose(few.losses, all_ranks.losses, rtol=1e-2)


@pytest.mark.parametrize("hybrid", [False, True])
def test_resumed_is_never_interrupted(cluster: Cluster, hybrid: bool) -> None:
    options = {"codec": "3lc:s=1.5", "weights": "qsgd:bits=8", "start_iter": 1}
    whole = Sharded(options, hybrid=hybrid, steps=6)
    straight = cluster.run(4, fsdp_jobs.run, whole)
    first = cluster.run(4, fsdp_jobs.run, replace(whole, steps=3))
    saved = [rank.saved for rank in first]
    resumed = cluster.run(4, fsdp_jobs.run, replace(whole, start=3, steps=3, saved=saved))
    for a, b in zip(straight, resumed, strict=True):
        assert a.local == b.local
        assert a.losses[3:] == b.losses
    assert any(owed.any() for rank in straight for owed in rank.owed["push"].values())
    if hybrid:
        for message in cluster.run(4, fsdp_jobs.load_of_other_shard, saved):
            assert "the state is of shard" in message


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_step_that_is_not_finite_is_skipped(cluster: Cluster, hybrid: bool) -> None:
    way = Sharded({"codec": "3lc", "start_iter": 0}, hybrid=hybrid, nan_step=3)
    for rank in cluster.run(4, fsdp_jobs.run, way):
        assert rank.stats["skipped_steps"] == 1
        assert any("is not finite" in text for text in rank.warnings)
        assert all(np.isfinite(values).all() for values in rank.parameters.values())


def test_mistakes_are_named(cluster: Cluster) -> None:
    expected = {
        "plain": "TypeError: TwoPaths is not sharded: call fully_shard",
        "inner": "shard the whole model last",
        "meshes": "give every call of fully_shard the same mesh",
        "exchange": "exchange='ring' goes with replicas alone",
        "pull_codec": "weights= compresses what ranks pull",
        "auto": "goes with replicas alone",
        "feedback": "can't have ef=on",
        "codec": "int9",
        "partial": "accumulate with set_requires_gradient_sync(False)",
        "copy": "TypeError: a FullyShardComm can't be copied or pickled",
    }
    for rank in cluster.run(4, fsdp_jobs.misuse):
        assert rank.keys() == expected.keys()
        for mistake, text in expected.items():
            assert text in rank[mistake], mistake


def test_adam_with_a_coarse_codec_is_warned_of(cluster: Cluster) -> None:
    (warned, remarks), (silent, _) = cluster.run(2, fsdp_jobs.warnings_of_adam, "3lc")
    assert any("Take codec='int8'" in text for text in warned)
    assert any("Take codec='int8'" in text for text in remarks)
    assert not silent, "rank 0 alone warns"
    for warned, remarks in cluster.run(2, fsdp_jobs.warnings_of_adam, "int8"):
        assert not any("Adam" in text for text in (*warned, *remarks))


def test_replicas_that_differ_are_named(cluster: Cluster) -> None:
    for message in cluster.run(4, fsdp_jobs.unlike_replicas):
        assert message.startswith("PeerMismatchError")
        assert "second.weight" in message


def test_shards_of_different_steps_are_named(cluster: Cluster) -> None:
    for rank, answer in enumerate(cluster.run(4, fsdp_jobs.unlike_steps_of_shards)):
        other = rank ^ 1
        assert f"ranks {rank} and {other} can't exchange" in answer, answer
        assert f"rank {rank} has 'a state of step {5 + rank % 2}'" in answer, answer


def test_arguments_that_differ_are_named(cluster: Cluster) -> None:
    for message in cluster.run(3, fsdp_jobs.unlike_arguments):
        assert message.startswith("PeerMismatchError")
        assert "int8" in message
        assert "3lc" in message


def test_a_lost_rank_is_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, fsdp_jobs.lose_a_rank)
    for rank, answer in fragile_cluster.collect(range(2), 120.0).items():
        assert not isinstance(answer, Failed), answer
        assert answer.startswith("PeerLostError: rank 2 is gone"), (rank, answer)


def test_a_lost_rank_of_the_same_machine_is_named() -> None:
    cluster = Cluster(4, fragile=True)
    cluster.start(4, fsdp_jobs.lose_a_rank_of_a_machine)
    for rank, answer in cluster.collect([0, 1, 3], 120.0).items():
        assert not isinstance(answer, Failed), answer
        assert answer.startswith("PeerLostError: rank 2 is gone"), (rank, answer)
    cluster.close(seconds=1.0)


PLAIN = {"codec": "raw", "correct_noise": False}
LOCAL = {
    "every step": PLAIN,
    "every second": {**PLAIN, "every": 2},
    "two fragments": {**PLAIN, "every": 2, "fragments": 2, "delay": 1},
}
COARSE = {"codec": "3lc:s=1.00,coder=rice", "clip_norm": 1.0}


@pytest.mark.parametrize("way", LOCAL)
def test_local_steps_of_sharded_replicas_are_those_of_whole_ones(
    cluster: Cluster, way: str
) -> None:
    whole = cluster.run(2, fsdp_jobs.local_steps, Replicas(LOCAL[way], sharded=False))
    sharded = cluster.run(4, fsdp_jobs.local_steps, Replicas(LOCAL[way]))
    for rank, (losses, parameters, _, _) in enumerate(sharded):
        for name, values in whole[rank // 2][1].items():
            np.testing.assert_allclose(parameters[name], values, rtol=1e-3, atol=2e-5)
        pair = [losses, sharded[rank ^ 1][0]]
        np.testing.assert_allclose(np.mean(pair, 0), whole[rank // 2][0], rtol=1e-3)


def test_local_steps_of_sharded_replicas_compress_and_resume(cluster: Cluster) -> None:
    case = Replicas(COARSE)
    straight = cluster.run(4, fsdp_jobs.local_steps, case)
    half = cluster.run(4, fsdp_jobs.local_steps, replace(case, steps=4))
    saved = [state for _, _, state, _ in half]
    resumed = cluster.run(4, fsdp_jobs.local_steps, replace(case, steps=4, start=4, saved=saved))
    for rank, (losses, parameters, _, report) in enumerate(straight):
        assert losses[4:] == resumed[rank][0]
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, straight[0][1][name])
            np.testing.assert_array_equal(values, resumed[rank][1][name])
        assert "x less than raw" in report
    swapped = replace(case, saved=[saved[rank ^ 1] for rank in range(4)])
    cluster.start(4, fsdp_jobs.local_steps, swapped)
    for answer in cluster.collect(range(4)).values():
        assert isinstance(answer, Failed)
        assert "the state is of shard" in answer.message


def test_mistakes_with_local_steps_are_named(cluster: Cluster) -> None:
    expected = {
        "partly": "is not: call fully_shard for all",
        "hybrid mesh": "mesh=mesh['shard']",
        "all ranks": "PeerMismatchError",
        "sharded optimizer": "FullyShardComm compresses what FSDP2 sends",
    }
    for rank in cluster.run(4, fsdp_jobs.misuse_of_local_steps):
        for mistake, text in expected.items():
            assert text in rank[mistake], rank[mistake]
