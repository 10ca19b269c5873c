"""Buffers and parameters of unusual kinds are taken over as they are, or refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runs import said_by, threads
from ways import Way, build


def _make(kind: str, value: float) -> torch.Tensor:
    if kind == "sparse":
        return torch.tensor([value, 0.0, 1.0, 0.0]).to_sparse()
    if kind == "expanded":
        return torch.full((1,), value).expand(4)
    if kind == "meta":
        return torch.empty(4, device="meta")
    if kind == "conjugate":
        return torch.full((4,), complex(value, value)).conj()
    with torch.inference_mode(kind == "inference"):
        return torch.full((4,), value)


WAYS = {
    "local": Way("local"),
    "sharded": Way("sharded"),
    "server": Way("server", {"buffers_from": 0, "buffers_every": 1}, servers=1),
}


def train(model: nn.Module, way: str) -> None:
    training = build(WAYS[way], model)
    training.run(1, lambda module, rank, step: module(torch.ones(1, 4)).sum())
    training.close()


def train_with_buffer(way: str, kind: str, ignored: bool) -> list[tuple[str, list[complex]]]:
    """What was said, and the buffer's values afterwards. Ranks begin with 1, 2, ..."""

    def job(rank: int) -> tuple[str, list[complex]]:
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("table", _make(kind, rank + 1.0))
        if ignored:
            names = ["0.table"]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        said = said_by(lambda: train(model, way))
        table = model.get_buffer("0.table")
        return said, [] if table.is_meta else [complex(v) for v in table.to_dense().tolist()]

    return threads(2, job)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sparse", "expanded", "meta"])
def test_a_buffer_that_cannot_be_written_is_refused_by_name_and_can_be_left_out(
    way: str, kind: str
) -> None:
    for said, _ in train_with_buffer(way, kind, False):
        assert said.startswith("TypeError: the buffer 0.table is ")
        assert kind in said
        assert "_set_params_and_buffers_to_ignore_for_model(model, ['0.table'])" in said
    for rank, (said, values) in enumerate(train_with_buffer(way, kind, True)):
        assert said == "nothing"
        assert kind == "meta" or values[0] == rank + 1, "each rank keeps its own"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "inference", "conjugate"])
def test_buffers_of_other_kinds_are_taken_over(way: str, kind: str) -> None:
    first = 2 if way == "server" else 1  # the server's, or rank 0's
    for said, values in train_with_buffer(way, kind, False):
        assert said == "nothing"
        assert values == [first * (1 - 1j) if kind == "conjugate" else first] * 4


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_not_exchanged_are_named(way: str) -> None:
    def check(rank: int) -> None:
        for dtype in (torch.complex64, torch.double):
            model = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
            said = said_by(partial(train, model, way))
            assert said.startswith("TypeError")
            assert f"0.weight is {dtype}" in said
            assert "torch.view_as_real" in said or dtype is torch.double
        with torch.inference_mode():
            model = nn.Sequential(nn.Linear(4, 4))
        said = said_by(lambda: train(model, way))
        assert "TypeError: 0.weight was made inside torch.inference_mode()" in said

    threads(2, check)
