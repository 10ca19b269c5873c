"""Ranks that do not step equally often end with equal models, or with errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import AdamW

from cluster import Cluster
from gradwire.torch import outer_nesterov
from training import digest, loss_of, make_model
from ways import WAYS, Way, build

Told = tuple[str | None, str]
SECONDS = 60.0  # timeout of a rank that waits in vain
OPTIONS: dict[str, Any] = {"codec": "int8", "timeout": SECONDS}


def told(run: Callable[[nn.Module], Any]) -> Told:
    model = make_model()
    said = None
    try:
        run(model)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    return said, digest(model) if plain else ""


def local_steps(steps: list[int], extra: list[int], options: dict[str, Any]) -> Told:
    """Each rank takes so many steps, and then synchronizes; one in `extra` also after 3 steps."""
    rank = dist.get_rank()

    def run(model: nn.Module) -> None:
        outer = {"outer": outer_nesterov()} if options.get("outer") else {}
        way = Way("local", options | outer)
        training = build(way, model, lambda p: AdamW(p, lr=1e-2), **OPTIONS)
        try:
            for step in range(steps[rank]):
                training.step(loss_of)
                if step == 2 and rank in extra:
                    training.settle()
            training.settle()
        finally:
            training.close()

    return told(run)


def load_unlike(way: str) -> Told:
    """Rank 0 goes on from its state of step 4, rank 1 from its state of step 6."""

    def run(model: nn.Module) -> None:
        options = OPTIONS | ({"every": 3} if way == "LocalSteps" else {})
        training = build(way, model, **options)
        try:
            training.run((4, 6)[dist.get_rank()], loss_of)
            saved = training.source.state_dict()
            training.run((2, 0)[dist.get_rank()], loss_of)
            training.source.load_state_dict(saved)
            training.run(6, loss_of)
        finally:
            training.close()

    return told(run)


def leave_early(way: str) -> Told:
    """Rank 1 closes after 4 steps, and the others go on."""

    def run(model: nn.Module) -> None:
        options: dict[str, Any] = {} if way == "QSVRG" else {"codec": "int8"}
        training = build(way, model, timeout=SECONDS, **options)
        training.run(4 if dist.get_rank() == 1 else 6, loss_of)
        training.close()

    return told(run)


def join(steps: list[int]) -> Told:
    """DDP's context for ranks with unequal batches."""

    def run(model: nn.Module) -> None:
        training = build("hook", model, start_iter=0, **OPTIONS)
        with Join([training.module]):
            training.run(steps[dist.get_rank()], loss_of)
        training.close()

    return told(run)


PLAIN: dict[str, Any] = {"every": 4}


@pytest.mark.parametrize(
    ("steps", "early", "options"),
    [
        ([10, 9], [], PLAIN),
        ([9, 8], [], PLAIN),  # rank 1 has nothing to send
        ([12, 11], [], PLAIN),  # rank 0 exchanges by itself
        ([9, 10, 11], [], PLAIN),  # the average is that of rank 1
        ([10, 10], [0], PLAIN),
        ([10, 9], [], {"every": 4, "fragments": 2, "delay": 1}),
        ([10, 9], [], {"every": 4, "delay": 4}),
        ([10, 9], [], {"every": 4, "outer": True}),
    ],
)
def test_local_steps_are_compared(
    cluster: Cluster, steps: list[int], early: list[int], options: dict[str, Any]
) -> None:
    ranks = cluster.run(len(steps), local_steps, steps, early, options)
    for (said, _), taken in zip(ranks, steps, strict=True):
        assert said is not None, "models differ"
        assert said.startswith("PeerMismatchError")
        assert f"after {3 if early else taken} local steps" in said
        assert "rank 0" in said
        assert "rank 1" in said or "rank 2" in said
    assert any("equally often on all ranks" in str(said) for said, _ in ranks)


def test_members_that_come_and_go_compare_steps_too(cluster: Cluster) -> None:
    options = {"every": 4, "on_lost": "continue"}
    for said, _ in cluster.run(3, local_steps, [9, 10, 11], [], options):
        assert said is not None, "models differ"
        assert "and others those of more or fewer: call step, and synchronize, equally" in said


def many_steps() -> Told:
    """An exchange after so many that float32 can't hold their square."""

    def run(model: nn.Module) -> None:
        way = Way("local", {"every": 5000, "on_lost": "continue"})
        training: Any = build(way, model, lambda p: AdamW(p, lr=1e-2), **OPTIONS)
        training.run(3, loss_of)
        for fragment in training.optimizer._averaging.fragments:
            fragment.steps += 4096
        training.settle()
        training.close()

    return told(run)


def test_many_equal_steps_are_equal(cluster: Cluster) -> None:
    (said, model), other = cluster.run(2, many_steps)
    assert (said, model) == other
    assert said is None


def test_equal_steps_end_with_equal_models(cluster: Cluster) -> None:
    ranks = cluster.run(2, local_steps, [10, 10], [0, 1], PLAIN)
    assert [said for said, _ in ranks] == [None, None]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("way", ["hook", "FSDP2", "ShardedOptimizer", "LocalSteps"])
def test_states_of_different_steps_are_found(cluster: Cluster, way: str) -> None:
    for said, _ in cluster.run(2, load_unlike, way):
        assert said is not None, "they went on"
        assert "PeerMismatchError" in said
        after = ("step 1 after 6", "step 2 after 9")
        steps = after if way == "LocalSteps" else ("step 4", "step 6")
        assert all(f"has '{step}" in said for step in steps)


@pytest.mark.parametrize(
    "way",
    [
        *("ShardedOptimizer", "LocalSteps, every step", "QSVRG", "servers"),
        *("servers, gradients", "servers, by the tensor"),
    ],
)
def test_a_rank_that_leaves_early_is_named(cluster: Cluster, way: str) -> None:
    others = cluster.run(2 + WAYS[way].servers, leave_early, way)
    (said, _), (of_early, _), *_ = others
    assert of_early is None
    assert said is not None
    assert "rank 1 is gone" in said or "too few workers are left" in said


def test_the_join_context_of_ddp_ends_with_equal_models(cluster: Cluster) -> None:
    ranks = cluster.run(2, join, [5, 3])
    assert [said for said, _ in ranks] == [None, None]
    assert ranks[0] == ranks[1]
