"""Buckets come to the host and go back in pieces, with the bits of whole buckets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import array_device
from array_device import DEVICE, counts
from cluster import Cluster
from delayed_device import DelayedStage
from frozen import INPUTS, Distances
from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.staging import pieces
from ways import integers

PIECE = 256  # bytes
STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    yield from array_device.cluster_of(2)


def train(codec: str, dtype: torch.dtype, piece_bytes: int) -> tuple[list[Any], int, int]:
    """This rank's parameters and gradients, the bytes it pushed, and the copies to the host."""
    warnings.simplefilter("ignore")
    model = array_device.to_device(Distances().to(dtype))
    group = array_device.new_group()
    module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    state = GradwireState(codec, process_group=group)
    module.register_comm_hook(state, gradwire_hook)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    counts.clear()
    with mock.patch.object(pieces, "PIECE_BYTES", piece_bytes):
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = integers(INPUTS, seed=1000 * step + dist.get_rank()).to(DEVICE)
            module(inputs).backward()
            optimizer.step()
    copies = counts["to_host"]
    kept = [v for p in model.parameters() for v in (p.detach(), p.grad) if v is not None]
    sent = state.stats().as_dict()["push_bytes"]
    state.close()
    return [values.cpu().tolist() for values in kept], sent, copies


@pytest.mark.parametrize("codec", ["3lc", "qsgd:bits=4", "raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_have_the_bits_of_the_whole(ranks: Cluster, codec: str, dtype: torch.dtype) -> None:
    whole = ranks.run(2, train, codec, dtype, 1 << 23)
    in_pieces = ranks.run(2, train, codec, dtype, PIECE)
    assert [rank[:2] for rank in in_pieces] == [rank[:2] for rank in whole]
    assert in_pieces[0][2] > 2 * whole[0][2]


def test_what_is_final_goes_back_before_the_rest_and_changes_go_back_again() -> None:
    values = torch.arange(200.0)
    stage = DelayedStage(lambda _: 0.0)
    with mock.patch.object(pieces, "PIECE_BYTES", PIECE), stage.in_pieces(values) as arriving:
        assert arriving.arrive(1) == PIECE // 4
        assert stage.stream.waits == 1
        arriving.wait()
        assert stage.stream.waits == 4
        arriving.values.neg_()
        arriving.finished(0, 50)
        stage.stream.end()
        assert values[:51].tolist() == [*torch.arange(50.0).neg().tolist(), 50.0]
        arriving.take_back()
        arriving.values[0] = 7
        arriving.finished(100, 50)
    stage.stream.end()
    assert values.tolist() == [7.0, *torch.arange(1.0, 200.0).neg().tolist()]
    # 4 pieces came; back went one, and after it had changed two, and the rest.
    assert stage.copier.counts["copies"] == 4 + 1 + 3


def test_a_copy_that_fails_is_raised_where_the_bucket_is_exchanged() -> None:
    stage = DelayedStage(lambda _: 0.0)
    values = torch.arange(200.0)

    def vanish(*_: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    pieces_of = stage.in_pieces(values)
    arriving = pieces_of.__enter__()
    arriving.wait()
    with mock.patch.object(stage.copier, "to_device", vanish):
        arriving.finished(0, 50)  # in the exchange, where none may raise
    with pytest.raises(RuntimeError, match="device-side assert"):
        arriving.check()
    with pytest.raises(RuntimeError, match="device-side assert"):
        pieces_of.__exit__(None, None, None)
