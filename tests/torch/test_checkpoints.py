"""Every way to train: resumed is never interrupted, and another number of ranks loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor
from torch.optim import SGD

import gradwire.torch
import runs
from cluster import Cluster
from gradwire.torch import PerRank, reshard
from owed import owed_in, total_owed
from runs import Case, said_by, threads
from training import TwoPaths, gather, load, loss_of, make_model, save
from ways import Training, Way, build

WORLD, FIRST, REST = 4, 3, 4
State = dict[str, Any]
States = list[State]
Arrays = dict[str, np.ndarray]
NAMES = [name for name, _ in make_model().named_parameters()]
CODEC: dict[str, Any] = {"codec": "3lc:s=1.5"}
AT_ONCE = {"start_iter": 0}


def hook(**options: Any) -> Way:
    return Way("hook", {**CODEC, **AT_ONCE, **options})


def local(**options: Any) -> Way:
    return Way("local", {**CODEC, **options})


def served(servers: int = 1, **options: Any) -> Way:
    return Way("server", {**CODEC, "timeout": 30.0, **options}, servers=servers)


FSDP = Way("fsdp", CODEC | AT_ONCE, columns=48)
TRAINED = {
    "hook, sharded": hook(),
    "hook, ring": hook(codec="int8", exchange="ring"),
    "hook, broadcast": hook(exchange="broadcast"),
    "hook, hierarchical": hook(exchange="hierarchical", ranks_per_machine=2),
    "hook, terngrad": hook(codec="terngrad", exchange="terngrad"),
    "hook, draws": hook(codec="qsgd:bits=4,ef=on"),
    "ShardedOptimizer": Way("sharded", CODEC),
    "LocalSteps": local(every=2),
    "LocalSteps, outer": local(every=2, outer=partial(SGD, lr=0.7, momentum=0.9, nesterov=True)),
    "LocalSteps, fragments": local(every=4, fragments=2, delay=1),
    "LocalSteps, gate": Way("local", {"gate": "bfloat16", "every": 2, "fragments": 2, "delay": 2}),
    "LocalSteps, SparseLoCo": local(
        codec="topk2bit:density=0.05", exchange="broadcast", every=2, residual_decay=0.9
    ),
    "FullyShardComm, FSDP": FSDP,
    "FullyShardComm, HSDP": replace(FSDP, replicas=2),
    "ServerOptimizer": served(servers=2),
    "ServerOptimizer, draws": served(codec="qsgd:bits=4,ef=on"),
    "ServerOptimizer, gradients": served(pulls="gradients"),
    "QSVRG": Way("qsvrg", CODEC),
}


@dataclass
class Held:
    """A state that was noted earlier, for PerRank."""

    state: State

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def resume(way: Way, folder: str) -> list[bytes]:
    """The model at the end of a training without an interruption, of two that were saved to a file
    and by torch.distributed.checkpoint, and of one that went on without residuals."""

    def finish(training: Training, steps: int, note: Callable[[int], Any]) -> bytes:
        training.run(steps, loss_of, note)
        training.close()
        is_server = getattr(training.source, "is_server", False)
        return b"" if is_server else bytes_of(training)

    def note(steps: int) -> None:
        if steps == FIRST:
            saved.update(training.state())

    saved: State = {}
    training = build(way, make_model())
    found = [finish(training, FIRST + REST, note)]
    if way.kind == "server" and "model" in saved:
        saved["model"] = gather(saved["model"])[0]  # servers of gradients do not step
    file, distributed = Path(folder) / f"rank{dist.get_rank()}.pt", f"{folder}/distributed"
    gradwire.torch.save(saved, file)
    read = torch.load(file, weights_only=True)
    save_checkpoint({"gradwire": PerRank(Held(own_state(saved)))}, checkpoint_id=distributed)

    def load_distributed(training: Training) -> None:
        load_checkpoint({"gradwire": PerRank(training.source)}, checkpoint_id=distributed)
        for name, part in training.parts().items():
            if part is not training.source:
                part.load_state_dict(read[name])
        training.steps = FIRST

    def forget(training: Training) -> None:
        training.load({name: without_residuals(state) for name, state in read.items()}, FIRST)

    for take in (lambda training: training.load(read, FIRST), load_distributed, forget):
        again = build(way, make_model())
        take(again)
        found.append(finish(again, REST, lambda _: None))
    return found


def bytes_of(training: Training) -> bytes:
    values = training.values().values()
    return b"".join(value.contiguous().numpy().tobytes() for value in values)


def own_state(state: State) -> State:
    """That of gradwire's object."""
    own: State = state["gradwire"] if "gradwire" in state else state["optimizer"]
    return own


def without_residuals(state: State) -> State:
    """And with other draws."""
    if "gradwire" in state:
        return {**state, "gradwire": without_residuals(state["gradwire"])}
    other = {"residuals": [], "iterations": 50, "fragments": state.get("fragments", [])}
    if any(fragment["gate"] for fragment in other["fragments"]):
        kept = [[torch.zeros_like(v) for v in f["gate"]["kept"]] for f in other["fragments"]]
        gates = [{"gate": {"kept": values, "next": None}} for values in kept]
        other["fragments"] = [f | g for f, g in zip(other["fragments"], gates, strict=True)]
    return {**state, **{name: values for name, values in other.items() if name in state}}


@pytest.mark.parametrize("name", TRAINED)
def test_resumed_is_never_interrupted(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """By gradwire.torch.save, and by torch.distributed.checkpoint."""
    ranks = cluster.run(WORLD, resume, TRAINED[name], str(tmp_path))
    for whole, from_file, from_distributed, forgetful in ranks:
        assert from_file == whole
        assert from_distributed == whole
        assert forgetful != whole or not whole, "residuals change the result"


def resume_backend() -> tuple[bytes, bytes]:
    """A training that keeps nothing, without and with a restart."""
    whole, again = (build("backend", make_model(), codec="int8:bucket=256") for _ in range(2))
    whole.run(FIRST, loss_of)
    again.load(whole.state(), FIRST)
    for training in (whole, again):
        training.run(REST, loss_of)
    return bytes_of(whole), bytes_of(again)


@pytest.mark.parametrize("name", ["hook", "ShardedOptimizer", "LocalSteps, every step", "FSDP2"])
def test_a_state_takes_the_place_of_a_step_that_was_not_finite(name: str) -> None:
    """The step that was taken again was counted as one that nobody applies."""

    def spoiled(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(module, rank, step) * torch.nan

    def roll_back(rank: int) -> tuple[list[dict[str, str]], list[int]]:
        training = build(name, make_model(), **CODEC)
        training.run(FIRST, loss_of)
        state = training.state()
        ends, skipped = [], []
        for deed in (loss_of, spoiled):
            training.run(1, deed)
            training.load(state, FIRST)
            training.run(2, loss_of)
            ends.append(runs.digests_of(training.values()))
            skipped.append(training.source.stats().as_dict()["skipped_steps"])
            training.load(state, FIRST)
        training.close()
        return ends, skipped

    for (without, after), skipped in threads(2, roll_back):
        assert without == after
        assert skipped == [0, 1]


def test_the_backend_keeps_nothing_that_a_restart_lacks(cluster: Cluster) -> None:
    for whole, resumed in cluster.run(2, resume_backend):
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


# SGD without momentum takes a step of zeros.
RATE = 0.5
still = partial(SGD, lr=RATE)
MOVED = {
    "hook, sharded": hook(),
    "hook, raw pulls": hook(pull_codec="raw"),
    "hook, raw pushes": hook(codec="raw", pull_codec="3lc:s=1.5"),
    "hook, ring": hook(codec="int8", exchange="ring"),
    "hook, broadcast": hook(exchange="broadcast"),
    "ShardedOptimizer": Way("sharded", CODEC),
    "LocalSteps": local(every=2),
    "LocalSteps, fragments": local(every=4, fragments=2),
    "ServerOptimizer": served(),
    "ServerOptimizer, gradients": served(pulls="gradients"),
}
Make = Callable[[], TwoPaths]


def loss_of_wrapped(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    # torch.compile's own buckets of DDP can't be as small as these.
    with torch._dynamo.config.patch(optimize_ddp=False):
        return loss_of(module, rank, step)


def train(way: Way, world: int = WORLD, make: Make = make_model, settles: bool = True) -> States:
    """What the ranks save after the first steps."""
    after = {FIRST: runs.settle} if settles else {}
    case = Case(way, still, FIRST, after=after, loss=loss_of_wrapped, model=make)
    return [run.state for run in runs.run_one(world, case)]


@dataclass
class Moved:
    """A rank that goes on with others: its state after a step that adds nothing, what the step
    applied, and its model."""

    state: State
    applied: Arrays
    model: Arrays


def move(
    way: Way, world: int, saved: States, states: States, make: Make = make_model
) -> list[Moved]:
    """Loads states in another world. saved: of the world before, for the model."""

    def go_on(rank: int) -> Moved:
        training = build(way, make(), still)
        source = training.source
        if way.kind != "fsdp" and "model" in saved[0]:  # PyTorch moves its own shards
            values = saved[0]["model"].values()  # of a model that may have been wrapped
            training.model.load_state_dict(
                dict(zip(training.model.state_dict(), values, strict=True))
            )
        source.load_state_dict(states[rank])
        training.steps = FIRST
        before: Arrays = {}
        gradients: Arrays = {}

        def note(steps: int) -> None:
            before.update(exact(training))
            named = zip(NAMES, training.model.parameters(), strict=True)
            gradients.update({n: whole(p.grad) for n, p in named if p.grad is not None})

        training.use_gradients = note
        is_server = way.kind == "server" and source.is_server
        if is_server:
            source.connect()
            before = exact(training)
        training.run(1, lambda *args: 0.0 * loss_of_wrapped(*args))
        training.settle()
        after = exact(training)
        rate = 1.0 if way.kind == "local" else RATE
        applied = {name: (values - after[name]) / rate for name, values in before.items()}
        if training.in_backward:
            applied = gradients
        if way.kind == "server" and is_server == (way.options.get("pulls") == "gradients"):
            applied = {}
        model = {name: whole(values) for name, values in training.model.named_parameters()}
        moved = Moved(source.state_dict(), applied, model)
        training.close()
        return moved

    return threads(world, go_on)


def exact(training: Training) -> Arrays:
    """The model on which all agree. Of ShardedOptimizer the exact values of this rank's shard,
    with zeros elsewhere."""
    if training.way.kind == "sharded":
        return exact_values([training.source.state_dict()], 0.0)
    if training.way.kind == "local":
        anchors = training.source.anchors()
        assert anchors.keys() == dict(training.model.named_parameters()).keys()
    else:
        anchors = dict(training.model.named_parameters())
    return {name: whole(values) for name, values in zip(NAMES, anchors.values(), strict=True)}


def whole(tensor: torch.Tensor) -> np.ndarray:
    values = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return values.detach().numpy().copy()


@pytest.mark.parametrize("name", MOVED)
def test_another_number_of_ranks_owes_the_same(name: str) -> None:
    """To each parameter: what is still owed after a step that adds nothing, and what it applied."""
    way = MOVED[name]
    saved = train(way)
    states = [own_state(rank) for rank in saved]
    for world in (3, 8, 2 if way.kind == "server" else 1):
        options: dict[str, Any] = {"servers": 2} if way.kind == "server" and world == 8 else {}
        after = replace(way, **options)
        moved = move(after, world, saved, reshard(states, world, **options))
        check_owed(owed_by(states, way), moved, after)
        if way.kind == "sharded":
            check_exact(states, moved)


# Residuals of one direction alone don't go to another owner (ResidualDroppedWarning).
ORDERED = {name: way for name, way in MOVED.items() if "raw" not in name}  # FSDP2 refuses others


def make_transposed_model() -> TwoPaths:
    """The parameters lie in memory column by column."""
    model = make_model()
    for p in model.parameters():
        p.data = p.data.mT.contiguous().mT if p.dim() > 1 else p.data
    return model


@pytest.mark.parametrize("name", ORDERED)
def test_another_order_in_memory_owes_the_same(name: str) -> None:
    """To each element, wherever it lies: from rows to columns, and back."""
    way = ORDERED[name]
    makes = make_model, make_transposed_model
    for make, make_again in (makes, makes[::-1]):
        saved = train(way, 2, make)
        states = [own_state(rank) for rank in saved]
        check_owed(owed_by(states, way), move(way, 2, saved, states, make_again), way)


def make_wrapped_model() -> TwoPaths:
    """Layers are compiled and have activation checkpoints."""
    model = make_model()
    layers: dict[str, Any] = model._modules
    layers["first"] = torch.compile(model.first, backend="eager")
    layers["second"] = checkpoint_wrapper(model.second)
    return model


@pytest.mark.parametrize("name", ORDERED)
def test_a_wrapped_model_has_the_names_of_the_model(name: str) -> None:
    """Compiled and with activation checkpoints: patterns match, and states go from and to the model
    without, also those that were saved with the prefixes of the wrappers."""
    way = replace(ORDERED[name], options={**ORDERED[name].options, "exclude": ["second.*"]})
    makes = make_model, make_wrapped_model
    for make, make_again in (makes, makes[::-1]):
        saved = train(way, 2, make)
        states = [own_state(rank) for rank in saved]
        owed = owed_by(states, way)
        assert owed.keys() <= set(NAMES)
        assert "first.weight" in owed
        assert "second.weight" not in owed
        aged = [prefix_names(state) for state in states]
        check_owed(owed, move(way, 2, saved, aged, make_again), way)
    assert owed_by(reshard(aged, 3), way).keys() == owed.keys()


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
def test_another_mesh_owes_the_same(shards: int | None) -> None:
    """From one dimension, and from two replicas of two shards, to meshes of both kinds."""
    # A chunk of fewer values would go raw.
    way = replace(FSDP, options={**FSDP.options, "min_numel": 32})
    saved = train(replace(way, replicas=WORLD // (shards or WORLD)))
    states = [own_state(rank) for rank in saved]
    before = owed_by_replicas(states, shards or WORLD)
    for world, parts in MESHES:
        after = replace(way, replicas=world // parts)
        moved = move(after, world, saved, reshard(states, world, shards=parts))
        check_owed(before, moved, after)


# The refusal of a state, in the words that name the difference.
REFUSING = {
    "GradwireState": hook(),
    "ShardedOptimizer": Way("sharded", CODEC),
    "LocalSteps": local(),
    "FullyShardComm": FSDP,
    "ServerOptimizer": served(),
    "QSVRG": Way("qsvrg", CODEC),
}


@pytest.fixture(scope="module")
def fresh() -> dict[str, States]:
    """States of the ranks 0 and 1."""

    def state_of(way: Way, rank: int) -> State:
        training = build(way, make_model(), still)
        if way.kind == "hook":  # it gets to know its parameters in the first step
            training.step(loss_of)
        return training.source.state_dict()

    return {name: threads(2, partial(state_of, way)) for name, way in REFUSING.items()}


def said_of(way: Way, states: States, world: int = 2, make: Make = make_model) -> str:
    """What rank 0 says when all ranks load states of two."""

    def load(rank: int) -> str:
        training = build(way, make(), still)

        def load_and_step() -> None:
            training.source.load_state_dict(states[min(rank, 1)])
            if way.kind == "hook":
                training.step(loss_of)

        said = said_by(load_and_step)
        dist.barrier()  # no rank leaves while another still connects
        return said

    return threads(world, load)[0]


class Renamed(TwoPaths):
    """`branch` is `twig`."""

    def __init__(self) -> None:
        super().__init__()
        self.twig = self.branch
        del self.branch

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        result: torch.Tensor = self.twig(torch.relu(self.second(torch.relu(self.first(x)))))
        return result[:, :5]


def make_wider_model() -> TwoPaths:
    model = make_model()
    model.branch = nn.Linear(144, 32)
    return model


@pytest.mark.parametrize("name", REFUSING)
def test_a_state_that_does_not_fit_is_refused_with_the_difference(
    fresh: dict[str, States], name: str
) -> None:
    way, own = REFUSING[name], fresh[name]

    def said_with(**options: Any) -> str:
        return said_of(replace(way, options={**way.options, **options}), own)

    source = "LocalSteps" if name != "LocalSteps" else "ShardedOptimizer"
    strange = fresh[source]
    if name == "ServerOptimizer":
        pairs = zip(own, strange, strict=True)
        strange = [{**mine, "gradwire": theirs} for mine, theirs in pairs]
    assert said_of(way, own) == "nothing"
    assert f"the state is that of a {source}, this is a {name}" in said_of(way, strange)
    said = said_with(codec="int8")
    assert "with codec '3lc:s=1.5', this one has 'int8'; " in said
    assert "reshard(..., codec='int8') moves what is owed" in said
    if name in ("GradwireState", "LocalSteps"):
        assert "with exchange 'sharded', this one has 'ring'" in said_with(exchange="ring")
    if name == "ServerOptimizer":
        expected = "exchange 'server:pulls=updates', this one has 'server:pulls=gradients'"
        assert expected in said_with(pulls="gradients")
    if name != "QSVRG":
        has = "it has branch.weight [24, 144], this model has branch.weight [32, 144]"
        assert f"another model: {has}" in said_of(way, own, make=make_wider_model)
        has = "it has no twig.weight, this model has twig.weight [24, 144]"
        assert has in said_of(way, own, make=Renamed)


def test_another_world_is_refused_with_a_way_out(fresh: dict[str, States]) -> None:
    for name, way in REFUSING.items():
        expected = "that of rank 0 of 2, this is rank 0 of 3; gradwire.torch.reshard moves"
        assert expected in said_of(way, fresh[name], 3)


def test_another_codec_is_a_choice() -> None:
    """reshard moves what is owed to it, and to another exchange."""
    saved = train(hook(), 2)
    states = [own_state(rank) for rank in saved]
    after = hook(codec="int8", exchange="broadcast")
    changed = reshard(states, 2, codec="int8", exchange="broadcast")
    check_owed(owed_by(states, hook()), move(after, 2, saved, changed), after)


def test_what_can_not_be_moved_is_named(fresh: dict[str, States]) -> None:
    unsent = [own_state(rank) for rank in train(local(every=4), 2, settles=False)]
    with pytest.raises(ValueError, match="rank 0 has changes of 3 local steps that were not"):
        reshard(unsent, 3)
    with pytest.raises(ValueError, match="shards goes with states of a FullyShardComm; these are"):
        reshard(unsent, 2, shards=2)
    with pytest.raises(ValueError, match="servers goes with states of a ServerOptimizer"):
        reshard(unsent, 2, servers=1)
    with pytest.raises(ValueError, match="states of all ranks are needed"):
        reshard([], 2)
    with pytest.raises(ValueError, match="states of all ranks are needed"):
        reshard(fresh["ShardedOptimizer"][:1], 2)


def save_distributed(folder: str, states: list[bytes]) -> None:
    held = Held(load(states[dist.get_rank()]))
    save_checkpoint({"gradwire": PerRank(held)}, checkpoint_id=folder)


def load_distributed(folder: str, way: Way) -> bytes:
    held = Held({})
    target: dict[str, Any] = {"saved_world_size": WORLD, "servers": way.servers}
    load_checkpoint({"gradwire": PerRank(held, **target)}, checkpoint_id=folder)
    build(way, make_model(), still).source.load_state_dict(held.state)
    return save(held.state)


def test_distributed_checkpoint_moves_servers_too(cluster: Cluster, tmp_path: Path) -> None:
    states = [own_state(rank) for rank in train(served())]
    cluster.run(WORLD, save_distributed, str(tmp_path), [save(state) for state in states])
    found = cluster.run(6, load_distributed, str(tmp_path), served(servers=2))
    assert found == [save(state) for state in reshard(states, 6, servers=2)]


def test_workers_of_qsvrg_owe_the_same() -> None:
    way = Way("qsvrg", CODEC)
    saved = [own_state(rank) for rank in train(way)]
    before = owed_by(saved, way)
    assert before["update"].any()
    for world in (3, 8, 1):
        states = reshard(saved, world)
        after = owed_by(states, way)
        np.testing.assert_allclose(after["update"], before["update"], rtol=1e-5)
        rest = Case(way, still, FIRST + 1, [{"optimizer": state} for state in states], FIRST)
        ranks = [bytes_of(run.training) for run in runs.run_one(world, rest)]
        assert all(rank == ranks[0] for rank in ranks), "the parameters differ"
        assert ranks[0] != saved[0]["values"].numpy().tobytes()


def check_owed(before: Arrays, moved: list[Moved], way: Way) -> None:
    assert before, "something is owed"
    after = [rank.state for rank in moved]
    still = (
        owed_by_replicas(after, len(after) // way.replicas)
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


def check_exact(states: States, moved: list[Moved]) -> None:
    """The exact values of ShardedOptimizer go on from the saved ones, and what the replicas lack of
    them goes along: all is there, once."""
    before = exact_values(states)
    after = exact_values([rank.state for rank in moved])
    for name, exact in after.items():
        applied = sum(rank.applied[name].astype(np.float64) for rank in moved)
        np.testing.assert_allclose(exact, before[name] - RATE * applied, rtol=1e-5, atol=1e-6)
        lacking = np.zeros(exact.size)
        for rank in moved:
            owed = owed_in(rank.state)["pull"].get(name, np.zeros(0))
            lacking[: owed.size] += owed
        replica = moved[0].model[name].reshape(-1).astype(np.float64)
        np.testing.assert_allclose(replica + lacking, exact, rtol=1e-5, atol=1e-6)


def exact_values(states: States, elsewhere: float = np.nan) -> Arrays:
    found = {n: np.full(p.numel(), elsewhere) for n, p in make_model().named_parameters()}
    for state in states:
        for piece in state["shard"]["pieces"]:
            end = piece["offset"] + piece["values"].numel()
            found[piece["name"]][piece["offset"] : end] = piece["values"].numpy()
    return found


def owed_by(states: States, way: Way) -> Arrays:
    """To each parameter, flat: the mean of the push residuals, and the pull residuals where they
    are of averages."""
    workers = [state.get("gradwire", state) for state in states]
    servers: States = []
    if way.kind == "server":
        count = workers[0]["workers"]
        workers, servers = workers[:count], workers[count:]
    pushes = [owed_in(state) for state in workers]
    if way.kind in ("sharded", "fsdp", "server"):
        pushes = [rank | {"pull": {}} for rank in pushes]
    found = total_owed(pushes)
    if way.options.get("pulls") == "gradients":
        for state in servers:
            for name, values in owed_in(state)["pull"].items():
                found[name] = found.get(name, 0.0) + values
    return found


def owed_by_replicas(states: States, shards: int) -> Arrays:
    """The same of a FullyShardComm. Chunks of first.weight are columns, the others rows."""
    replicas = len(states) // shards
    if replicas == 1 and states[0]["replicas"] is None:
        found = owed_by(states, Way("fsdp"))
    else:
        of_shards = [total_owed([*map(owed_in, states[i::shards])]) for i in range(shards)]
        found = {name: np.concatenate([s[name] for s in of_shards]) for name in of_shards[0]}
    for name, values in found.items():
        rows, *rest = make_model().get_parameter(name).shape
        if name == "first.weight":
            parts = values.reshape(shards, rows, -1)
            found[name] = np.concatenate(list(parts), axis=1).reshape(-1)
        else:
            found[name] = values[: rows * int(np.prod(rest))]
    return found
