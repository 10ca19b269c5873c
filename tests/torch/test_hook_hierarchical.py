"""The hook over a hierarchy: uncompressed inside a machine, compressed between machines."""

from __future__ import annotations

import os
import signal
import socket
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire.torch
import jobs
import jobs_half
from cluster import Cluster, Died
from gradwire.torch import LocalSteps, Members
from gradwire.torch.errors import OneMachineWarning
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from gradwire.torch.options import grouped
from owed import owed_in, total_owed
from training import Options, Trained, batch, load, make_model, save, train
from ways import CUT_ONCE


def train_and_count_by_peer(options: Options) -> tuple[Trained, dict[int, int]]:
    """A training, and the bytes of packets that this rank sent to each other rank."""
    sent: dict[int, int] = {}
    send = Wire.send

    def counting_send(wire: Wire, peer: int, kind: Kind, payload: np.ndarray, *turn: Any) -> None:
        if kind is Kind.PACKET:
            sent[peer] = sent.get(peer, 0) + payload.size
        send(wire, peer, kind, payload, *turn)

    with mock.patch.object(Wire, "send", counting_send):
        return train(options), sent


@dataclass
class Placed:
    """The results of a local step, or the error."""

    error: str | None
    warnings: list[str]
    parameters: bytes
    saved: bytes | None


def place(
    options_by_rank: list[dict[str, Any]],
    hosts: list[str] | None = None,
    torchrun: list[str] | None = None,
    part: list[int] | None = None,
    saved: list[bytes] | None = None,
) -> Placed | None:
    """Takes one local step.

    `hosts`: the host name of each rank. `torchrun`: the LOCAL_WORLD_SIZE of each rank. `part`: the
    ranks that take part.
    """
    rank = dist.get_rank()
    group = None if part is None else dist.new_group(part)
    result = None
    environment = {} if torchrun is None else {"LOCAL_WORLD_SIZE": torchrun[rank]}
    name = socket.gethostname() if hosts is None else hosts[rank]
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(socket, "gethostname", return_value=name),
    ):
        if part is None or rank in part:
            result = _place(options_by_rank[rank], group, None if saved is None else saved[rank])
    dist.barrier()  # rank 0 has the store
    return result


def _place(options: dict[str, Any], group: Any, saved: bytes | None) -> Placed:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parameters, state, error = b"", None, None
        try:
            model = make_model()
            local = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = LocalSteps(
                local, model, process_group=group, **grouped({"every": 1, **options})
            )
            if saved is not None:
                optimizer.load_state_dict(load(saved))
            inputs, labels = batch(dist.get_rank(), 0)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            state = save(optimizer.state_dict())
        except (RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    said = [str(w.message) for w in caught if w.category is OneMachineWarning]
    return Placed(error, said, parameters, state)


WORLD = 4
PAIRS: dict[str, Any] = {"exchange": "hierarchical", "ranks_per_machine": 2}
FOUND: dict[str, Any] = {"exchange": "hierarchical"}
STEPS = 8


@pytest.fixture(scope="module")
def counted(cluster: Cluster) -> list[tuple[Trained, dict[int, int]]]:
    options = Options(STEPS, PAIRS | {"codec": "3lc:s=1", "start_iter": 0})
    return cluster.run(WORLD, train_and_count_by_peer, options)


def test_replicas_are_equal_and_learn(counted: list[tuple[Trained, dict[int, int]]]) -> None:
    assert len({trained.digest for trained, _ in counted}) == 1
    losses = np.mean([trained.losses for trained, _ in counted], axis=0)
    assert losses[-1] < losses[0]


def test_only_speakers_compress_and_only_for_each_other(
    counted: list[tuple[Trained, dict[int, int]]],
) -> None:
    numel = sum(values.size for values in counted[0][0].parameters.values())
    for rank, (trained, sent) in enumerate(counted):
        speaker, stats = rank - rank % 2, trained.stats
        near = rank ^ 1
        assert set(sent) == ({near, 2 - speaker} if rank == speaker else {near})
        assert sent[near] == stats["local_bytes"]
        assert 4 * numel * STEPS < sent[near] < 4.1 * numel * STEPS
        assert stats["local_bytes"] == sum(s["local_bytes"] for s in trained.last_steps)
        between = stats["push_bytes"] + stats["pull_bytes"]
        assert between == sent.get(2 - speaker, 0)
        assert f"in machine {stats['local_bytes']:,} bytes" in trained.report
        assert 0 < stats["control_bytes"] < 20000
        if rank == speaker:
            assert 0 < between < 4 * numel * STEPS / 8
            assert stats["bits_per_value_push"] < 3
            assert stats["ratio"] > 4
        else:
            assert between == 0
            assert stats["bits_per_value_push"] is stats["ratio"] is None
            assert trained.residuals is not None
            assert load(trained.residuals)["residuals"] == []


def test_rings_in_groups_compress_both_legs_after_the_first_steps(cluster: Cluster) -> None:
    """6 ranks in two groups; the first of 8 steps goes raw, inside the groups too."""
    rings = "hierarchical:between=ring,within=ring,ranks=3"
    coded = cluster.run(
        6,
        train_and_count_by_peer,
        Options(STEPS, {"exchange": f"{rings},within_codec=bf16", "start_iter": 1}),
    )
    raw = cluster.run(6, train_and_count_by_peer, Options(STEPS, {"exchange": rings}))
    for ranks in (coded, raw):
        assert len({trained.digest for trained, _ in ranks}) == 1
        losses = np.mean([trained.losses for trained, _ in ranks], axis=0)
        assert losses[-1] < losses[0]
    for rank, (trained, sent) in enumerate(coded):
        group = rank - rank % 3
        right = group + (rank + 1) % 3
        assert set(sent) == ({right, 3 - rank} if rank == group else {right})
        assert sent[right] == trained.stats["local_bytes"]
        # One-dimensional tensors go raw. bf16 halves the other bytes, from the second step on.
        share = sent[right] / raw[rank][1][right]
        assert (1 + 7 / 2) / STEPS < share < (1 + 7 / 2) / STEPS * 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_is_within_the_codecs_bound(cluster: Cluster, dtype: torch.dtype) -> None:
    """Values are rounded to bf16 twice: the sum of a machine, and the average."""
    options = PAIRS | {"start_iter": 0, "codec": "bf16"}
    ranks = cluster.run(WORLD, jobs_half.average_given, dtype, "noise", options)
    own = torch.stack([rank.own.double() for rank in ranks])
    sums = own.view(2, 2, 96, 96).sum(dim=1).abs().sum(dim=0) / 4
    for rank in ranks:
        assert torch.equal(rank.averaged, ranks[0].averaged)
        error = (rank.averaged.double() - own.mean(dim=0)).abs()
        assert bool((error <= 2**-8 * 1.01 * (sums + own.mean(dim=0).abs())).all())
        assert bool((error > 0).any())


def test_a_restart_equals_the_uninterrupted_run(cluster: Cluster) -> None:
    runs = [Options(7, PAIRS, CUT_ONCE), Options(4, PAIRS, CUT_ONCE)]
    ranks = cluster.run(WORLD, jobs.train_each, runs)
    residuals = [rank[1].residuals for rank in ranks]
    weights = ranks[0][1].weights
    rest = Options(3, PAIRS, CUT_ONCE, start=4, residuals=residuals, weights=weights)
    for (continued,) in cluster.run(WORLD, jobs.train_each, [rest]):
        assert continued.digest == ranks[0][0].digest


@pytest.mark.parametrize(("before", "world_size", "after"), [(1, 4, 2), (2, 4, 1), (2, 6, 3)])
def test_reshard_keeps_what_is_owed(
    cluster: Cluster, before: int, world_size: int, after: int
) -> None:
    def machines(size: int) -> dict[str, Any]:
        return {"exchange": "hierarchical", "ranks_per_machine": size}

    trained = cluster.run(WORLD, jobs.train_each, [Options(5, machines(before))])
    states = [load(rank[0].residuals) for rank in trained]
    resharded = gradwire.torch.reshard(states, world_size, ranks_per_machine=after)
    assert [rank for rank, s in enumerate(resharded) if s["residuals"]] == list(
        range(0, world_size, after)
    )
    options = Options(1, machines(after), residuals=[save(state) for state in resharded])
    placed = cluster.run(world_size, jobs.place_residuals, options)
    found = owed_by([rank.state for rank in placed], after)
    for name, owed in owed_by(states, before).items():
        assert owed.any()
        value = found[name] + placed[0].applied[name]
        np.testing.assert_allclose(value, owed, rtol=1e-5, atol=1e-6 * abs(owed).max())


def owed_by(states: list[dict[str, Any]], ranks_per_machine: int) -> dict[str, np.ndarray]:
    speakers = states[::ranks_per_machine]
    return total_owed([owed_in(state) for state in speakers])


def test_machines_are_found(cluster: Cluster) -> None:
    """The number is given, or comes from torchrun (for the whole world only) or host names."""

    def run(
        options: dict[str, Any], *arguments: Any, ranks: tuple[int, ...] = (0, 1, 2, 3)
    ) -> bytes:
        answers = cluster.run(WORLD, place, [options] * WORLD, *arguments)
        (parameters,) = {answers[rank].parameters for rank in ranks}
        assert all(answers[rank].error is None for rank in ranks)
        assert all(answers[rank].warnings == [] for rank in ranks)
        return parameters

    given = run(PAIRS)
    assert given == run(FOUND, None, ["2"] * 4) == run(FOUND, ["a", "a", "b", "b"])
    assert given == run(PAIRS, ["a", "b", "c", "d"], ["1"] * 4)
    assert given != run(FOUND, ["a", "b", "c", "d"])
    hosts = ["-", "a", "b", "c"]
    run(FOUND, hosts, ["4"] * 4, [1, 2, 3], ranks=(1, 2, 3))


def test_one_machine_is_exact_and_said(cluster: Cluster) -> None:
    one: dict[str, Any] = {"exchange": "hierarchical", "ranks_per_machine": 4}
    answers = cluster.run(WORLD, place, [one] * WORLD)
    raw = cluster.run(WORLD, place, [PAIRS | {"codec": "raw"}] * WORLD)
    for rank in answers:
        (said,) = rank.warnings
        assert "all 4 ranks are on one machine" in said
        values, expected = (np.frombuffer(r.parameters, np.float32) for r in (rank, raw[0]))
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        (
            [FOUND] * 4,
            (["a", "b", "a", "b"],),
            "every machine; ranks 0 to 3 are on a, b",
        ),
        ([FOUND] * 4, (["a", "a", "a", "b"],), "the same number of consecutive ranks"),
        ([FOUND] * 4, (["a", "a", "b", "c"],), "the same number of consecutive ranks"),
        ([FOUND] * 4, (None, ["3"] * 4), "LOCAL_WORLD_SIZE of torchrun is 3; 4 ranks can be on"),
        ([FOUND] * 4, (None, list("2224")), "ranks_per_machine 2', rank 3 has 'exchange"),
        ([PAIRS, PAIRS, PAIRS, FOUND], (), "ranks_per_machine 2', rank 3 has 'exchange hierarchic"),
        ([PAIRS, PAIRS, PAIRS, {}], (), "has 'exchange hierarchical', rank 3 has 'exchange shar"),
        ([PAIRS | {"ranks_per_machine": 3}] * 4, (), "is 3; 4 ranks can be on machines of 1, 2, 4"),
    ],
)
def test_machines_that_no_exchange_has(
    cluster: Cluster, options: list[dict[str, Any]], arguments: tuple[Any, ...], said: str
) -> None:
    answers = cluster.run(WORLD, place, options, *arguments)
    for rank, answer in enumerate(answers):
        assert answer.error is not None, rank
        assert "rank 3" not in said or "PeerMismatchError" in answer.error
        assert said in answer.error or (rank == 3 and "rank 3 has" in answer.error), answer.error


def test_residuals_of_other_machines_are_refused(cluster: Cluster) -> None:
    sharded = cluster.run(WORLD, place, [{}] * WORLD)
    saved = [rank.saved for rank in sharded]
    states = [load(rank) for rank in saved]
    moved = gradwire.torch.reshard(states, WORLD, exchange=PAIRS["exchange"])
    for given, said in (
        (saved, "with exchange 'sharded', this one has 'hierarchical'; gradwire.torch.reshard"),
        ([*map(save, moved)], "saved with ranks_per_machine=1, here it is 2: gradwire.torch.resh"),
    ):
        for answer in cluster.run(WORLD, place, [PAIRS] * 4, None, None, None, given):
            assert said in answer.error


def test_hooks_that_differ_are_named(fragile_cluster: Cluster) -> None:
    """Some ranks exchange between machines, and one does not."""
    kinds = [PAIRS | {"ranks_per_machine": 3}, {}, FOUND]
    fragile_cluster.start(3, jobs.train_unlike, [Options(state=kind) for kind in kinds])
    for rank, answer in fragile_cluster.collect(range(3)).items():
        assert "PeerMismatchError" in answer.message, answer.trace
        assert f"rank {rank} has 'exchange " in answer.message


def test_a_killed_rank_is_named(fragile_cluster: Cluster) -> None:
    """Rank 1 also names rank 2, though it only talks to rank 0."""
    options = Options(1000, {"exchange": "hierarchical", "ranks_per_machine": 3})
    fragile_cluster.start(3, jobs.train_and_signal, options, 2, 5, signal.SIGKILL)
    answers = fragile_cluster.collect(range(3), seconds=60)
    assert isinstance(answers.pop(2), Died)
    for answer in answers.values():
        assert "PeerLostError: rank 2 is gone" in answer.message, answer.trace


def test_wrong_arguments_are_refused_at_once() -> None:
    for exchange, size, said in (
        ("sharded", 2, "goes with exchange='hierarchical' alone, not with 'sharded'"),
        ("hierarchical", 0, "ranks_per_machine is 0"),
        ("hierarchical", -2, "ranks_per_machine is -2"),
    ):
        with pytest.raises(ValueError, match=said):
            gradwire.torch.GradwireState(exchange=exchange, members=Members(ranks_per_machine=size))
    for inside, said in (
        ("within=star", "'hierarchical:within=star' is no exchange; valid ones are: sharded, ring"),
        ("within=ring,within_codec=3lc", "within_codec=3lc.*: no residual is kept .*add ef=off"),
        ("within=ring,within_codec=zip", "valid .*3lc"),
        ("within=terngrad,within_codec=int8:ef=off,ranks=0", "ranks"),
    ):
        with pytest.raises(gradwire.GradwireError, match=said):
            gradwire.torch.GradwireState(exchange=f"hierarchical:{inside}")
