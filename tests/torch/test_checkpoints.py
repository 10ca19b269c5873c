"""Every way to train: resumed is never interrupted, and another number of ranks loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_jobs
import gradwire.torch
import jobs
from checkpoint_jobs import Moved
from checkpoint_ways import CODEC, NAMES, TRAINED, Way
from cluster import Cluster
from gradwire.torch import reshard
from training import load, make_model, save

WORLD = 4
States = list[dict[str, Any]]


@pytest.mark.parametrize("name", TRAINED)
def test_resumed_is_never_interrupted(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """By gradwire.torch.save, and by torch.distributed.checkpoint."""
    for rank in cluster.run(WORLD, checkpoint_jobs.resume, TRAINED[name], str(tmp_path)):
        assert rank.from_file == rank.whole
        assert rank.from_distributed == rank.whole
        assert rank.forgetful != rank.whole or not rank.whole, "residuals change the result"


def test_the_backend_keeps_nothing_that_a_restart_lacks(cluster: Cluster) -> None:
    for whole, resumed in cluster.run(2, checkpoint_jobs.resume_backend, "int8:bucket=256"):
        assert whole == resumed


def test_a_compressor_goes_on(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    one, other = (gradwire.Compressor("3lc:s=1.5", x.size) for _ in range(2))
    one.encode(x, 0)
    gradwire.torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.encode(x, 1) == one.encode(x, 1) != gradwire.encode(x, "3lc:s=1.5", step=1)
    with pytest.raises(gradwire.GradwireError, match=r"of '3lc:s=1\.5' with 1000 values"):
        gradwire.Compressor("3lc:s=1.5", 999).load_state_dict(one.state_dict())


# SGD without momentum, which takes a step of zeros.
STILL: dict[str, Any] = {"momentum": 0.0}
RAW_PULLS = {"pull_codec": "raw"}
MOVED = {
    "hook, sharded": Way("hook", CODEC, **STILL),
    "hook, raw pulls": Way("hook", CODEC | RAW_PULLS, **STILL),
    "hook, raw pushes": Way("hook", {"codec": "raw", "pull_codec": "3lc:s=1.5"}, **STILL),
    "hook, ring": Way("hook", {"codec": "int8", "exchange": "ring"}, **STILL),
    "hook, broadcast": Way("hook", CODEC | {"exchange": "broadcast"}, **STILL),
    "ShardedOptimizer": Way("sharded", CODEC, rate=0.5, **STILL),
    "LocalSteps": Way("local", CODEC | {"every": 2}, **STILL),
    "LocalSteps, fragments": Way("local", CODEC | {"every": 4, "fragments": 2}, **STILL),
    "ServerOptimizer": Way("server", CODEC, rate=0.5, **STILL),
    "ServerOptimizer, gradients": Way("server", CODEC | {"pulls": "gradients"}, **STILL),
}


@pytest.mark.parametrize("name", MOVED)
def test_another_number_of_ranks_owes_the_same(cluster: Cluster, name: str) -> None:
    """To each parameter: what is still owed after a step that adds nothing, and what it applied."""
    way = MOVED[name]
    saved = [load(rank) for rank in cluster.run(WORLD, checkpoint_jobs.train, way)]
    states = [rank["state"] for rank in saved]
    for world in (3, 8, 2 if way.kind == "server" else 1):
        options: dict[str, Any] = {"servers": 2} if way.kind == "server" and world == 8 else {}
        after = replace(way, options=way.options | options)
        moved = move(cluster, after, world, saved, reshard(states, world, **options))
        check_owed(owed_by(states, way), moved, after)
        if way.kind == "sharded":
            check_exact(states, moved, way.rate)


# Residuals of one direction alone don't go to another owner (ResidualDroppedWarning).
ORDERED = {name: way for name, way in MOVED.items() if "raw" not in name}  # FSDP2 refuses others


@pytest.mark.parametrize("name", ORDERED)
def test_another_order_in_memory_owes_the_same(cluster: Cluster, name: str) -> None:
    """To each element, wherever it lies: from rows to columns, and back."""
    way = ORDERED[name]
    for before in (way, replace(way, transposed=True)):
        after = replace(way, transposed=not before.transposed)
        saved = [load(rank) for rank in cluster.run(2, checkpoint_jobs.train, before)]
        states = [rank["state"] for rank in saved]
        check_owed(owed_by(states, way), move(cluster, after, 2, saved, states), after)


@pytest.mark.parametrize("name", ORDERED)
def test_a_wrapped_model_has_the_names_of_the_model(cluster: Cluster, name: str) -> None:
    """Compiled and with activation checkpoints: patterns match, and states go from and to the model
    without, also those that were saved with the prefixes of the wrappers."""
    plain = replace(ORDERED[name], options=ORDERED[name].options | {"exclude": ["second.*"]})
    wrapped = replace(plain, wrapped=True)
    for before, after in ((plain, wrapped), (wrapped, plain)):
        saved = [load(rank) for rank in cluster.run(2, checkpoint_jobs.train, before)]
        states = [rank["state"] for rank in saved]
        owed = owed_by(states, plain)
        assert owed.keys() <= set(NAMES)
        assert "first.weight" in owed
        assert "second.weight" not in owed
        aged = [prefix_names(state) for state in states]
        check_owed(owed, move(cluster, after, 2, saved, aged), after)
    assert owed_by(reshard(aged, 3), plain).keys() == owed.keys()


def prefix_names(entry: Any) -> Any:
    """A state as it was saved when names had the prefixes of wrappers."""
    if isinstance(entry, str):
        first = entry.replace("first.", "first._orig_mod.")
        return first.replace("second.", "second._checkpoint_wrapped_module.")
    if isinstance(entry, dict):
        return {prefix_names(key): prefix_names(value) for key, value in entry.items()}
    return [prefix_names(value) for value in entry] if isinstance(entry, list) else entry


# Ranks, and those of them that share a model.
MESHES = ((3, 3), (8, 2), (8, 8), (6, 3), (1, 1))


@pytest.mark.parametrize("shards", [None, 2])
def test_another_mesh_owes_the_same(cluster: Cluster, shards: int | None) -> None:
    """From one dimension, and from two replicas of two shards, to meshes of both kinds."""
    # A chunk of fewer values would go raw.
    way = Way("fsdp", CODEC | {"min_numel": 32}, shards=shards)
    saved = [load(rank) for rank in cluster.run(WORLD, checkpoint_jobs.train, way)]
    states = [rank["state"] for rank in saved]
    before = owed_by_replicas(states, shards or WORLD)
    for world, parts in MESHES:
        after = replace(way, shards=parts)
        moved = move(cluster, after, world, saved, reshard(states, world, shards=parts))
        check_owed(before, moved, after)


# The refusal of a state, in the words that name the difference.
REFUSING = {
    "GradwireState": Way("hook", CODEC),
    "ShardedOptimizer": Way("sharded", CODEC),
    "LocalSteps": Way("local", CODEC),
    "FullyShardComm": Way("fsdp", CODEC),
    "ServerOptimizer": Way("server", CODEC),
    "QSVRG": Way("qsvrg", CODEC),
}


@pytest.fixture(scope="module")
def fresh(cluster: Cluster) -> dict[str, list[bytes]]:
    """States of the ranks 0 and 1."""
    ranks = cluster.run(2, checkpoint_jobs.states_of, list(REFUSING.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(REFUSING)}


@pytest.mark.parametrize("name", REFUSING)
def test_a_state_that_does_not_fit_is_refused_with_the_difference(
    cluster: Cluster, fresh: dict[str, list[bytes]], name: str
) -> None:
    way, own = REFUSING[name], fresh[name]

    def other(**options: Any) -> Way:
        return replace(way, options=way.options | options)

    source = "LocalSteps" if name != "LocalSteps" else "ShardedOptimizer"
    strange = fresh[source]
    if name == "ServerOptimizer":
        pairs = zip(own, strange, strict=True)
        strange = [save({**load(mine), "gradwire": load(theirs)}) for mine, theirs in pairs]
    cases = [
        (way, own, "", "loaded"),
        (way, strange, "", f"the state is that of a {source}, this is a {name}"),
        (other(codec="int8"), own, "", "with codec '3lc:s=1.5', this one has 'int8'; "),
        (other(codec="int8"), own, "", "reshard(..., codec='int8') moves what is owed"),
    ]
    if name in ("GradwireState", "LocalSteps"):
        said = "with exchange 'sharded', this one has 'ring'"
        cases.append((other(exchange="ring"), own, "", said))
    if name == "ServerOptimizer":
        said = "exchange 'server:pulls=updates', this one has 'server:pulls=gradients'"
        cases.append((other(pulls="gradients"), own, "", said))
    if name != "QSVRG":
        has = (
            "another model: it has branch.weight [24, 144], this model has branch.weight [32, 144]"
        )
        cases += [
            (way, own, "wider", has),
            (way, own, "renamed", "it has no twig.weight, this model has twig.weight [24, 144]"),
        ]
    refused = [(there, state, model) for there, state, model, _ in cases]
    said_of = cluster.run(2, checkpoint_jobs.said_of_each, refused)[0]
    for (*_, expected), said in zip(cases, said_of, strict=True):
        assert expected in said


def test_another_world_is_refused_with_a_way_out(
    cluster: Cluster, fresh: dict[str, list[bytes]]
) -> None:
    cases = [(way, fresh[name], "") for name, way in REFUSING.items()]
    (all_said, *_) = cluster.run(3, checkpoint_jobs.said_of_each, cases)
    for said in all_said:
        assert "that of rank 0 of 2, this is rank 0 of 3; gradwire.torch.reshard moves" in said


def test_another_codec_is_a_choice(cluster: Cluster) -> None:
    """reshard moves what is owed to it, and to another exchange."""
    way = Way("hook", CODEC, **STILL)
    saved = [load(rank) for rank in cluster.run(2, checkpoint_jobs.train, way)]
    states = [rank["state"] for rank in saved]
    after = replace(way, options={"codec": "int8", "exchange": "broadcast"})
    changed = reshard(states, 2, codec="int8", exchange="broadcast")
    check_owed(owed_by(states, way), move(cluster, after, 2, saved, changed), after)


def test_what_can_not_be_moved_is_named(cluster: Cluster, fresh: dict[str, list[bytes]]) -> None:
    way = Way("local", CODEC | {"every": 4})
    unsent = [load(rank) for rank in cluster.run(2, checkpoint_jobs.states_between, way)]
    with pytest.raises(ValueError, match="rank 0 has changes of 3 local steps that were not"):
        reshard(unsent, 3)
    with pytest.raises(ValueError, match="shards goes with states of a FullyShardComm; these are"):
        reshard(unsent, 2, shards=2)
    with pytest.raises(ValueError, match="servers goes with states of a ServerOptimizer"):
        reshard(unsent, 2, servers=1)
    with pytest.raises(ValueError, match="states of all ranks are needed"):
        reshard([], 2)
    with pytest.raises(ValueError, match="states of all ranks are needed"):
        reshard([load(fresh["ShardedOptimizer"][0])], 2)


def move(cluster: Cluster, way: Way, world: int, saved: States, states: States) -> list[Moved]:
    arguments = save(saved[0]["kept"]), [save(state) for state in states]
    return cluster.run(world, checkpoint_jobs.move, way, *arguments)


def test_distributed_checkpoint_moves_servers_too(cluster: Cluster, tmp_path: Path) -> None:
    way = MOVED["ServerOptimizer"]
    states = [load(rank)["state"] for rank in cluster.run(WORLD, checkpoint_jobs.train, way)]
    given = str(tmp_path), [save(state) for state in states]
    cluster.run(WORLD, checkpoint_jobs.load_distributed, way, *given, {})
    target = {"saved_world_size": WORLD, "servers": 2}
    after = replace(way, options=way.options | {"servers": 2})
    found = cluster.run(6, checkpoint_jobs.load_distributed, after, *given, target)
    assert found == [save(state) for state in reshard(states, 6, servers=2)]


def test_workers_of_qsvrg_owe_the_same(cluster: Cluster) -> None:
    way = Way("qsvrg", CODEC)
    saved = [load(rank)["state"] for rank in cluster.run(WORLD, checkpoint_jobs.train, way)]
    before = owed_by(saved, way)
    assert before["update"].any()
    for world in (3, 8, 1):
        states = reshard(saved, world)
        after = owed_by(states, way)
        np.testing.assert_allclose(after["update"], before["update"], rtol=1e-5)
        ranks = cluster.run(world, checkpoint_jobs.go_on, way, [save(state) for state in states])
        assert all(rank == ranks[0] for rank in ranks), "the parameters differ"
        assert ranks[0] != saved[0]["values"].numpy().tobytes()


def check_owed(before: dict[str, np.ndarray], moved: list[Moved], way: Way) -> None:
    assert before, "something is owed"
    after = [load(rank.state) for rank in moved]
    still = (
        owed_by_replicas(after, way.shards or len(after))
        if way.kind == "fsdp"
        else owed_by(after, way)
    )
    for name, owed in before.items():
        parts = [rank.applied[name].reshape(-1) for rank in moved if name in rank.applied]
        # Owners and servers apply their own parts; otherwise all ranks apply the same.
        applied = sum(parts) if way.kind in ("sharded", "server") else parts[0]
        if way.options.get("pulls") == "gradients":
            applied = parts[0]
        assert owed.any()
        found = still.get(name, 0.0) + applied
        np.testing.assert_allclose(found, owed, rtol=1e-4, atol=2e-5 * abs(owed).max())


def check_exact(states: States, moved: list[Moved], rate: float) -> None:
    """The exact values of ShardedOptimizer go on from the saved ones, and what the replicas lack of
    them goes along: all is there, once."""
    before = exact_values(states)
    after = exact_values([load(rank.state) for rank in moved])
    for name, exact in after.items():
        applied = sum(rank.applied[name].astype(np.float64) for rank in moved)
        np.testing.assert_allclose(exact, before[name] - rate * applied, rtol=1e-5, atol=1e-6)
        lacking = np.zeros(exact.size)
        for rank in moved:
            owed = jobs.owed_in(load(rank.state))["pull"].get(name, np.zeros(0))
            lacking[: owed.size] += owed
        replica = moved[0].model[name].reshape(-1).astype(np.float64)
        np.testing.assert_allclose(replica + lacking, exact, rtol=1e-5, atol=1e-6)


def exact_values(states: States) -> dict[str, np.ndarray]:
    found = {n: np.full(p.numel(), np.nan) for n, p in make_model().named_parameters()}
    for state in states:
        for piece in state["shard"]["pieces"]:
            end = piece["offset"] + piece["values"].numel()
            found[piece["name"]][piece["offset"] : end] = piece["values"].numpy()
    return found


def owed_by(states: States, way: Way) -> dict[str, np.ndarray]:
    """To each parameter, flat: the mean of the push residuals, and the pull residuals where they
    are of averages."""
    workers = [state.get("gradwire", state) for state in states]
    servers: States = []
    if way.kind == "server":
        count = workers[0]["workers"]
        workers, servers = workers[:count], workers[count:]
    pushes = [jobs.owed_in(state) for state in workers]
    if way.kind in ("sharded", "fsdp", "server"):
        pushes = [rank | {"pull": {}} for rank in pushes]
    found = jobs.total_owed(pushes)
    if way.options.get("pulls") == "gradients":
        for state in servers:
            for name, values in jobs.owed_in(state)["pull"].items():
                found[name] = found.get(name, 0.0) + values
    return found


def owed_by_replicas(states: States, shards: int) -> dict[str, np.ndarray]:
    """The same of a FullyShardComm. Chunks of first.weight are columns, the others rows."""
    replicas = len(states) // shards
    if replicas == 1 and states[0]["replicas"] is None:
        found = owed_by(states, Way("fsdp"))
    else:
        of_shards = [
            jobs.total_owed([*map(jobs.owed_in, states[i::shards])]) for i in range(shards)
        ]
        found = {name: np.concatenate([s[name] for s in of_shards]) for name in of_shards[0]}
    for name, values in found.items():
        rows, *rest = make_model().get_parameter(name).shape
        if name == "first.weight":
            parts = values.reshape(shards, rows, -1)
            found[name] = np.concatenate(list(parts), axis=1).reshape(-1)
        else:
            found[name] = values[: rows * int(np.prod(rest))]
    return found
