"""Buffers and parameters of unusual kinds are taken over as they are, or refused by name."""

from __future__ import annotations

import pytest

import buffer_jobs
from cluster import Cluster

WAYS = ["local", "sharded", "server"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sparse", "expanded", "meta"])
def test_a_buffer_that_cannot_be_written_is_refused_by_name_and_can_be_left_out(
    cluster: Cluster, way: str, kind: str
) -> None:
    for said, _ in cluster.run(2, buffer_jobs.train_with_buffer, way, kind, False):
        assert said.startswith("TypeError: the buffer 0.table is ")
        assert kind in said
        assert "_set_params_and_buffers_to_ignore_for_model(model, ['0.table'])" in said
    for rank, (said, values) in enumerate(
        cluster.run(2, buffer_jobs.train_with_buffer, way, kind, True)
    ):
        assert said == ""
        assert kind == "meta" or values[0] == rank + 1, "each rank keeps its own"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "inference", "conjugate"])
def test_buffers_of_other_kinds_are_taken_over(cluster: Cluster, way: str, kind: str) -> None:
    first = 2 if way == "server" else 1  # the server's, or rank 0's
    for said, values in cluster.run(2, buffer_jobs.train_with_buffer, way, kind, False):
        assert said == ""
        assert values == [first * (1 - 1j) if kind == "conjugate" else first] * 4


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_not_exchanged_are_named(cluster: Cluster, way: str) -> None:
    for said in cluster.run(2, buffer_jobs.refusals_of_parameters, way):
        assert "0.weight is torch.complex64" in said["complex"]
        assert "torch.view_as_real" in said["complex"]
        assert "0.weight is torch.float64" in said["double"]
        assert "0.weight was made inside torch.inference_mode()" in said["inference"]
