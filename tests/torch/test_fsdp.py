"""FullyShardComm: PyTorch's results if nothing is compressed, equal replicas, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import SGD, Adam

import runs
import ways
from cluster import Cluster, Failed
from gradwire import decode, encode
from gradwire.torch import (
    FullyShardComm,
    LocalSteps,
    ShardedOptimizer,
    checkpoint,
    compress,
    reshard,
)
from gradwire.torch.options import grouped
from owed import owed_in, total_owed
from runs import Case, Run, adamw, said_by, threads
from training import TwoPaths, batch, gather, loss_of, make_model
from ways import Training, Way, build, mesh_of

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
STEPS = 5


def sharded(codec: str = "raw", replicas: int = 1, **options: Any) -> Way:
    options = {"start_iter": 0, **options}
    return Way("fsdp", {"codec": codec, **options}, replicas=replicas, reshards=True)


def case(way: Way, **more: Any) -> Case:
    return Case(way, **{"inner": ways.sgd, "steps": STEPS, "model": make_model, **more})


def make_checkpointed_model() -> TwoPaths:
    """The activations of a layer are not kept."""
    model: Any = make_model()
    model.second = checkpoint_wrapper(model.second)
    return model


def make_frozen_model() -> TwoPaths:
    model = make_model()
    model.second.weight.requires_grad_(False)
    return model


def loss_of_three(module: Any, rank: int, step: int) -> torch.Tensor:
    """The gradients of all batches but the last are not reduced."""
    for micro in range(3):
        module.set_requires_gradient_sync(micro == 2)
        inputs, labels = batch(rank, step, micro)
        loss = nn.functional.cross_entropy(module(inputs), labels)
        if micro < 2:
            loss.backward()
    return loss


def loss_without_branch(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(module(inputs, False), labels)


def clip(training: Training) -> None:
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
    assert isinstance(norm, DTensor)
    norm.full_tensor()


def step_in_backward(training: Training) -> None:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(0.05 * parameter.grad)
            parameter.grad = None

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def fail(training: Training) -> None:
    """A backward() that ends with the program's own error after some units were reduced."""

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the program's own")

    model: Any = training.model
    inputs, labels = batch(training.rank, 1000)
    inputs.requires_grad_(True)
    inputs.register_hook(fail)
    with pytest.raises(ArithmeticError):
        nn.functional.cross_entropy(model(inputs), labels).backward()
    model.zero_grad()
    model._get_fsdp_state()._reset_iter_state()


PLAIN = case(sharded())
CASES = {
    "plain": PLAIN,
    "no overlap": case(sharded(overlap=False)),
    "mixed precision": case(replace(sharded(), policy=BF16)),
    "no resharding": case(replace(sharded(), reshards=False)),
    "activation checkpoints": replace(PLAIN, model=make_checkpointed_model),
    "accumulation": replace(PLAIN, loss=loss_of_three),
    "clipping": replace(PLAIN, with_gradients=dict.fromkeys(range(STEPS), clip)),
    "step in backward": replace(PLAIN, begin=step_in_backward),
    "unused branch": replace(PLAIN, loss=loss_without_branch),
    "frozen": replace(PLAIN, model=make_frozen_model),
    "failed backward": replace(PLAIN, after={2: fail}),
}
COMPRESSED = {
    "3lc": case(sharded("3lc")),
    "int8 and weights": case(
        replace(sharded("int8", weights="int8:bucket=64", start_iter=1), policy=NARROW)
    ),
    "draws": case(
        Way("fsdp", {"codec": "qsgd:bits=4", "weights": "qsgd:bits=8"}, reshards=True),
        model=make_checkpointed_model,
    ),
}


@pytest.fixture(scope="module", params=[(3, 1), (4, 2)], ids=["fsdp", "hsdp"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    world, replicas = request.param
    cases = {
        name: replace(case, way=replace(case.way, replicas=replicas))
        for name, case in {**CASES, **COMPRESSED}.items()
    }
    for name in CASES:
        alone = replace(cases[name].way, kind="plain fsdp")
        cases[f"{name}, PyTorch"] = replace(cases[name], way=alone)
    return runs.run_each(world, cases)


def whole(ranks: list[Run]) -> dict[str, np.ndarray]:
    """The parameters of the ranks of one replica, from their shards."""
    shards = [run.training.values() for run in ranks]
    return {name: torch.cat([each[name] for each in shards]).numpy() for name in shards[0]}


def replicas_of(ranks: list[dict[str, Run]], way: str) -> list[dict[str, np.ndarray]]:
    size = len(ranks) // ranks[0][way].training.way.replicas
    each = [rank[way] for rank in ranks]
    return [whole(each[first : first + size]) for first in range(0, len(ranks), size)]


@pytest.mark.parametrize("way", CASES)
def test_uncompressed_it_is_pytorchs_training(ranks: list[dict[str, Run]], way: str) -> None:
    for rank in ranks:
        ours, theirs = rank[way], rank[f"{way}, PyTorch"]
        assert len(set(ours.losses)) > 2, "the steps must change something"
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
        for name, values in theirs.training.values().items():
            mine = ours.training.values()[name]
            np.testing.assert_allclose(mine, values, rtol=1e-4, atol=1e-6)
        assert ours.stats["steps"] == len(ours.losses)


@pytest.mark.parametrize("way", COMPRESSED)
def test_compressed_it_learns_alike_on_all_ranks(ranks: list[dict[str, Run]], way: str) -> None:
    replicas, plain = replicas_of(ranks, way), replicas_of(ranks, "plain")[0]
    for parameters in replicas:
        others = iter(plain.values())
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, replicas[0][name])
            assert np.isfinite(values).all()
            assert np.abs(values - next(others)).max() < 0.05
    assert all(rank[way].stats["ratio"] > 1.5 for rank in ranks)


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Run]]) -> None:
    """A rank sends (N - 1) / N of n values in each leg; FSDP has a push, HSDP both."""
    numel = sum(parameter.numel() for parameter in make_model().parameters())
    for rank in ranks:
        stats = rank["plain"].stats
        if len(ranks) == 3:
            assert stats["pull_bytes"] == 0
        sent = stats["push_bytes"] + stats["pull_bytes"]
        expected = STEPS * 4 * numel * (2 / 3 if len(ranks) == 3 else 2 * (1 / 2) / 2)
        assert 0.95 * expected < sent < 1.1 * expected
        packed = weights_stats(rank["int8 and weights"])
        assert packed["push_bytes"] == 0
        assert 8 < packed["compressed_bits_pull"] < 9


def weights_stats(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.training.source.weights_stats().as_dict()
    return found


@pytest.mark.parametrize("hybrid", [False, True])
def test_forward_computes_with_the_decoded_weights(hybrid: bool) -> None:
    def compare(rank: int) -> None:
        codec = "int8:bucket=64"
        training = build(sharded(replicas=1 + hybrid, weights=codec), make_model())
        model: Any = training.model
        exact = training.values()
        for module in (model, *model.children()):
            module.unshard()
        used = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
        for module in (model, *model.children()):
            module.reshard()
        training.close()
        group = dist.new_subgroups(2)[0] if hybrid else None
        for name, values in used.items():
            part = exact[name].numpy()
            if part.ndim > 1 and values.size >= 256 and part.size:
                part = decode(encode(part.reshape(-1), f"{codec},ef=off")).reshape(part.shape)
            expected = torch.cat(gather(torch.from_numpy(part), group)).numpy()
            np.testing.assert_array_equal(values, expected, err_msg=name)

    threads(4, compare)


def test_draws_of_weights_are_the_same_in_forward_and_backward() -> None:
    """The weights of a layer in each of its forward passes of a step: in forward, and again in
    backward, because its activations are not kept."""

    def weights_seen(rank: int) -> list[bytes]:
        model, seen = make_checkpointed_model(), []

        def note(module: nn.Module, args: Any) -> None:
            seen.append(module.get_parameter("weight").detach().clone().numpy().tobytes())

        model.second.get_submodule("_checkpoint_wrapped_module").register_forward_pre_hook(note)
        training = build(sharded(weights="qsgd:bits=4"), model)
        for _ in range(3):
            loss_of(model, rank, 0).backward()
        training.close()
        return seen

    ranks = threads(2, weights_seen)
    assert ranks[0] == ranks[1]
    forward, backward = ranks[0][::2], ranks[0][1::2]
    assert forward == backward
    assert len(set(forward)) == 3, "each step has its own draws"


def test_resharding_to_a_machine_gathers_there_uncompressed() -> None:
    """ZeRO++'s hierarchical partitioning: backward gathers among fewer ranks than forward."""
    way = sharded(weights="bf16")
    cases = {name: case(replace(way, reshards=name)) for name in (2, True)}
    for rank in threads(4, lambda rank: [runs.run(each) for each in cases.values()]):
        few, all_ranks = rank
        gathered = [weights_stats(run)["pull_bytes"] for run in rank]
        assert gathered[0] < 0.8 * gathered[1]
        np.testing.assert_allclose(few.losses, all_ranks.losses, rtol=1e-2)


@pytest.mark.parametrize("hybrid", [False, True])
def test_resumed_is_never_interrupted(hybrid: bool) -> None:
    way = sharded("3lc:s=1.5", 1 + hybrid, weights="qsgd:bits=8", start_iter=1)
    whole = case(way, steps=6, notes=(3,))
    straight = runs.run_one(4, whole)
    for a, b in zip(straight, runs.run_one(4, runs.restarted(whole, straight, 3)), strict=True):
        assert a.tensors[-1] == b.tensors[-1]
        assert a.losses[3:] == b.losses
    owed = [owed_in(rank.state["gradwire"])["push"] for rank in straight]
    assert any(values.any() for rank in owed for values in rank.values())
    if hybrid:
        check_shards(way, [run.state["gradwire"] for run in straight])


def check_shards(way: Way, states: list[Any]) -> None:
    def load_of_other_shard(rank: int) -> str:
        source = build(way, make_model()).source
        return said_by(lambda: source.load_state_dict(states[rank ^ 1]))

    for said in threads(4, load_of_other_shard):
        assert "the state is of shard" in said


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_step_that_is_not_finite_is_skipped(hybrid: bool) -> None:
    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, step)
        if step == 3 and rank == 3:
            inputs[0, 0] = float("nan")
        return nn.functional.cross_entropy(module(inputs), labels)

    def leave_out(training: Training) -> None:
        training.model.zero_grad()

    way = sharded("3lc", 1 + hybrid)
    for run in runs.run_one(4, case(way, loss=loss, with_gradients={3: leave_out})):
        assert run.stats["skipped_steps"] == 1
        assert any("is not finite" in str(warning) for warning in run.warnings)
        assert all(values.isfinite().all() for values in run.training.values().values())


def backward(model: nn.Module) -> None:
    loss_of(model, dist.get_rank(), 0).backward()


def shard(replicas: int = 1, reshards: bool | int = True) -> Any:
    way = replace(sharded(replicas=replicas), kind="plain fsdp", reshards=reshards)
    return build(way, make_model()).model


def test_mistakes_are_named() -> None:
    threads(4, lambda rank: make_mistakes())


def make_mistakes() -> None:
    def check(said: str, call: Callable[[], Any]) -> None:
        assert said in said_by(call)

    def check_options(said: str, codec: str = "raw", **options: Any) -> None:
        check(said, lambda: FullyShardComm(flat, codec, **grouped(options)))

    inner, mixed = make_model(), make_model()
    fully_shard(inner.first, mesh=mesh_of(1))
    fully_shard(mixed.first, mesh=mesh_of(2))
    fully_shard(mixed, mesh=mesh_of(1))
    flat, hybrid = shard(), shard(2)
    said = "TypeError: TwoPaths is not sharded: call fully_shard"
    check(said, lambda: FullyShardComm(make_model()))
    check("shard the whole model last", lambda: FullyShardComm(inner))
    check("give every call of fully_shard the same mesh", lambda: FullyShardComm(mixed))
    check_options("exchange='ring' goes with replicas alone", exchange="ring")
    check_options("weights= compresses what ranks pull", pull_codec="int8")
    check_options("goes with replicas alone", "auto:bits=1")
    check_options("can't have ef=on", weights="int8:ef=on")
    check_options("int9", weights="int9")
    comm = FullyShardComm(hybrid)
    hybrid.set_requires_all_reduce(False)
    check("accumulate with set_requires_gradient_sync(False)", lambda: backward(hybrid))
    check("TypeError: a FullyShardComm can't be copied or pickled", lambda: copy.deepcopy(comm))
    comm.close()


class OwnAllGather(DefaultAllGather):
    """The program's own."""


def test_collectives_of_the_program_are_refused() -> None:
    def replace_both(rank: int) -> list[str]:
        early, late = shard(), shard(2)
        early.first.set_custom_all_gather(OwnAllGather())
        with contextlib.closing(FullyShardComm(late)):
            late.first.set_custom_all_gather(OwnAllGather())
            return [said_by(lambda: FullyShardComm(early)), said_by(lambda: backward(late))]

    for rank in threads(4, replace_both):
        for message in rank:
            assert (
                "ValueError: first.weight and 1 others: the program has called set_cus" in message
            )


def test_adam_with_a_coarse_codec_is_warned_of() -> None:
    coarse, fine = (case(sharded(codec), inner=Adam, steps=1) for codec in ("3lc", "int8"))
    first, second = runs.run_one(2, coarse)
    assert any("Take codec='int8'" in str(warning) for warning in first.warnings)
    assert any("Take codec='int8'" in text for text in first.stats["remarks"])
    assert not second.warnings, "rank 0 alone warns"
    for run in runs.run_one(2, fine):
        assert not any("Adam" in str(said) for said in (*run.warnings, *run.stats["remarks"]))


@pytest.mark.parametrize("frozen", ["nothing", "a tensor", "a unit"])
def test_replicas_that_differ_are_named(frozen: str) -> None:
    def train(rank: int) -> str:
        model = make_model()
        if frozen == "a unit":
            model.second.requires_grad_(False)
        model.second.weight.requires_grad_(frozen == "nothing")
        with torch.no_grad():
            model.second.weight.add_(rank // 2)
        training = build(sharded(replicas=2), model)
        return said_by(lambda: training.step(loss_of))

    for message in threads(4, train):
        assert message.startswith("PeerMismatchError")
        assert "second.weight" in message


def test_shards_of_different_steps_are_named() -> None:
    """Both replicas have mixed the same steps, so that gradients between replicas agree."""

    def train(rank: int) -> str:
        training = build(sharded("3lc:s=1.5", 2), make_model())
        comm = training.source
        comm.load_state_dict({**comm.state_dict(), "iterations": 5 + rank % 2})
        return said_by(lambda: training.step(loss_of))

    for rank, answer in enumerate(threads(4, train)):
        assert f"ranks {rank} and {rank ^ 1} can't exchange" in answer, answer
        assert f"rank {rank} has 'a state of step {5 + rank % 2}'" in answer, answer


def test_arguments_that_differ_are_named() -> None:
    def train(rank: int) -> str:
        return said_by(lambda: runs.run(case(sharded("3lc" if rank else "int8"))))

    for message in threads(3, train):
        assert message.startswith("PeerMismatchError")
        assert "int8" in message
        assert "3lc" in message


def lose_a_rank(way: Way) -> str:
    """In backward, the ranks of a machine may gather the weights by themselves."""
    training = build(way, make_model())
    training.step(loss_of)
    loss = loss_of(training.model, dist.get_rank(), 1)
    if dist.get_rank() == 2:
        os._exit(3)
    found = said_by(loss.backward)
    training.close()
    return found


def check_lost(cluster: Cluster, way: Way, world: int) -> None:
    cluster.start(world, lose_a_rank, way)
    for rank, answer in cluster.collect({0, 1, world - 1} - {2}, 120.0).items():
        assert not isinstance(answer, Failed), answer
        assert answer.startswith("PeerLostError: rank 2 is gone"), (rank, answer)


def test_a_lost_rank_is_named(fragile_cluster: Cluster) -> None:
    check_lost(fragile_cluster, sharded("int8"), 3)


def test_a_lost_rank_of_the_same_machine_is_named() -> None:
    cluster = Cluster(4, fragile=True)
    check_lost(cluster, replace(sharded("int8", weights="bf16"), reshards=2), 4)
    cluster.close(seconds=1.0)


LOCAL: dict[str, dict[str, Any]] = {
    "every step": {},
    "every second": {"every": 2},
    "two fragments": {"every": 2, "fragments": 2, "delay": 1},
}


def of_replicas(is_sharded: bool = True, **options: Any) -> Case:
    """LocalSteps of two replicas, each of two ranks. Without `is_sharded`, the two ranks of a
    replica are one, with both batches."""

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        parts = [rank] if is_sharded else [2 * rank, 2 * rank + 1]
        inputs, labels = map(torch.cat, zip(*(batch(part, step) for part in parts), strict=True))
        return nn.functional.cross_entropy(module(inputs), labels)

    kind = "sharded local" if is_sharded else "local"
    options = {"codec": "raw", "correct_noise": False, **options}
    return Case(Way(kind, options, replicas=2), adamw, 8, loss=loss, model=make_model)


class ShardedLocal(ways.Local):
    def wrap(self) -> nn.Module:
        self.mesh = mesh_of(2)
        for module in (self.model.get_submodule("first"), self.model):
            fully_shard(module, mesh=self.mesh["shards"])
        return self.model

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def attach(self, **options: Any) -> None:
        super().attach(process_group=self.mesh["replicas"].get_group(), **options)


ways.KINDS["sharded local"] = ShardedLocal


@pytest.mark.parametrize("way", LOCAL)
def test_local_steps_of_sharded_replicas_are_those_of_whole_ones(way: str) -> None:
    alone = runs.run_one(2, of_replicas(False, **LOCAL[way]))
    sharded = runs.run_one(4, of_replicas(**LOCAL[way]))
    for replica, run in enumerate(alone):
        pair = sharded[2 * replica : 2 * replica + 2]
        parameters = whole(pair)
        for name, values in run.training.values().items():
            np.testing.assert_allclose(parameters[name], values, rtol=1e-3, atol=2e-5)
        losses = np.mean([each.losses for each in pair], 0)
        np.testing.assert_allclose(losses, run.losses, rtol=1e-3)


def test_local_steps_of_sharded_replicas_compress_and_resume() -> None:
    coarse: dict[str, Any] = {
        "codec": "3lc:s=1.00,coder=rice",
        "clip_norm": 1.0,
        "correct_noise": None,
    }
    case = replace(of_replicas(**coarse), notes=(4,))
    straight = runs.run_one(4, case)
    resumed = runs.run_one(4, runs.restarted(case, straight, 4))
    for rank, run in enumerate(straight):
        assert run.losses[4:] == resumed[rank].losses
        assert run.tensors[-1] == straight[rank % 2].tensors[-1] == resumed[rank].tensors[-1]
        assert "x less than raw" in run.report
    check_shards(case.way, [run.states[4]["optimizer"] for run in straight])


def test_mistakes_with_local_steps_are_named() -> None:
    def make_mistakes(rank: int) -> None:
        def check(said: str, model: Any) -> None:
            inner = torch.optim.AdamW(model.parameters())
            assert said in said_by(lambda: LocalSteps(inner, model))

        partly = make_model()
        fully_shard(partly.first, mesh=mesh_of(1))
        check("is not: call fully_shard for all", partly)
        check("mesh=mesh['shard']", shard(2))
        check("as of tensor parallelism", distribute_module(make_model(), mesh_of(1)))
        check("PeerMismatchError", shard())
        model = shard()
        inner = SGD(model.parameters(), lr=0.1)
        said = "for fully_shard (FSDP2), FullyShardComm compresses what it sends"
        assert said in said_by(lambda: ShardedOptimizer(inner, model))

    threads(4, make_mistakes)


def test_parts_of_tensor_parallelism_are_resharded() -> None:
    """A rank of each shard: the residuals are of the part that these make up."""

    def train(rank: int) -> checkpoint.StateDict:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64, bias=False))
        parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["shards"], shard_placement_fn=lambda parameter: Shard(1))
        comm = FullyShardComm(model, "topk:ratio=0.5", start_iter=0)
        model(torch.randn(4, 16) + rank // 2).square().sum().backward()
        comm.close()
        return comm.state_dict()

    of_ranks = threads(4, train)
    for states in (of_ranks[::2], of_ranks[1::2]):
        (before,) = total_owed([owed_in(state) for state in states]).values()
        (after,) = total_owed([owed_in(state) for state in reshard(states, 1)]).values()
        assert before.any()
        columns = np.concatenate(before.reshape(2, 32, 8), axis=1)
        np.testing.assert_allclose(after.reshape(32, 16), columns, rtol=1e-6)


def test_residuals_of_frozen_parameters_are_resharded() -> None:
    def train(rank: int) -> checkpoint.StateDict:
        model = shard()
        comm = FullyShardComm(model, "topk:ratio=0.5", start_iter=0)
        loss_of(model, rank, 0).backward()
        model.second.weight.requires_grad_(False)
        comm.close()
        return comm.state_dict()

    states = threads(2, train)
    owed = total_owed([owed_in(state) for state in states])
    assert owed["second.weight"].any()
    moved = total_owed([owed_in(state) for state in reshard(states, 3)])
    assert moved.keys() == owed.keys()
    np.testing.assert_allclose(moved["second.weight"], owed["second.weight"], rtol=1e-6)


def test_a_forward_pass_may_come_before() -> None:
    """It leaves the parameters of the model gathered."""

    def evaluate_first(rank: int) -> None:
        model = shard(reshards=False)
        inner = SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            loss_of(model, rank, 0)
        assert "call model.reshard()" in said_by(lambda: LocalSteps(inner, model))
        comm = compress(model, inner, "raw")
        assert isinstance(comm, FullyShardComm)
        comm.close()
        mesh, replica = mesh_of(2), make_model()
        fully_shard(replica, mesh=mesh["shards"])
        group = mesh["replicas"].get_group()
        optimizer = LocalSteps(SGD(replica.parameters(), lr=0.1), replica, process_group=group)
        names = list(optimizer.anchors())
        with torch.no_grad():
            loss_of(replica, rank, 0)
        assert list(optimizer.anchors()) == names
        optimizer.close()

    threads(4, evaluate_first)


def test_an_optimizer_of_the_model_before_it_was_sharded_is_refused() -> None:
    def make(rank: int) -> str:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=mesh_of(1))
        return said_by(lambda: compress(model, inner))

    assert "the SGD steps no parameter of the model" in threads(2, make)[0]
