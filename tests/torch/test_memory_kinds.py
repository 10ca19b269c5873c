"""Tensors whose values are not what lies in their memory: averaged rightly, or refused by name."""

from __future__ import annotations

import pytest

import backend_jobs
import memory_kind_jobs
from cluster import Cluster
from ways import WAYS


def test_autograd_makes_gradients_with_the_negative_bit() -> None:
    assert memory_kind_jobs.gradient_is_negative(1.0)


@pytest.mark.parametrize(
    "way",
    [
        "hook",
        "LocalSteps, every step",
        "ShardedOptimizer",
        "servers",
        "servers, gradients",
        "FSDP2",
    ],
)
def test_gradients_with_the_negative_bit_keep_their_sign(cluster: Cluster, way: str) -> None:
    workers = 2
    found = cluster.run(workers + WAYS[way].servers, memory_kind_jobs.weights_of, way)
    assert found[:workers] == [[0.625, 0.25, -0.125, -0.5]] * workers


def test_parameters_without_their_values_are_refused_by_name(cluster: Cluster) -> None:
    for said in cluster.run(2, memory_kind_jobs.refusals):
        assert len(said) == 12 + 4
        for case, text in said.items():
            kept = "is stored as its negative" if "negative" in case else "not hold its values"
            assert text.startswith("the buffer counts" if "buffer" in case else "weight"), case
            assert kept in text, case


def test_memory_that_is_freed_in_a_training_is_named(cluster: Cluster) -> None:
    said, of_others = cluster.run(2, memory_kind_jobs.freed_in_training)[:2]
    assert len(said) == 6 * 3 - 1
    for case, text in said.items():
        if "parameter" in case:
            assert text.startswith("RuntimeError: the memory of weight was freed after"), case
        else:
            assert text.startswith("TypeError: the gradient of weight is a Tensor whose"), case
    assert not any(text == "taken" for text in of_others.values())


def test_the_backend_resolves_the_negative_bit(cluster: Cluster) -> None:
    options = {"all_reduce": "raw", "min_numel": 1}
    for is_right, _ in cluster.run(2, backend_jobs.over_backend, "reduce a negative", options):
        assert is_right
