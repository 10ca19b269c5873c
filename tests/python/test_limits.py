"""Many tensors, many exchanges. (tests/limits has what takes much memory or time.)"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradwire._core import Exchange, Layout


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def average(layout: Layout, exchanges: Sequence[Exchange], step: int) -> np.ndarray:
    """One step of all ranks on `values`. Checks that all get the same."""
    buckets = []
    for rank, exchange in enumerate(exchanges):
        buckets.append(values(layout, step, rank))
        exchange.start(buckets[-1], step)
    moved = True
    while moved:
        moved = False
        for rank, exchange in enumerate(exchanges):
            for peer, message in exchange.outgoing():
                exchanges[peer].receive(rank, message)
                moved = True
    assert all(exchange.done for exchange in exchanges)
    for bucket in buckets[1:]:
        np.testing.assert_array_equal(bucket.view(np.uint32), buckets[0].view(np.uint32))
    return buckets[0]


def values(layout: Layout, step: int, rank: int) -> np.ndarray:
    draw = np.random.default_rng([step, rank])
    return draw.standard_normal(layout.numel).astype(np.float32)


def test_a_hundred_thousand_tensors_of_one_value() -> None:
    names = [(f"layer{i}.weight", [1, 1]) for i in range(100_000)]
    layout = Layout(names, 2, "3lc:coder=rice", min_numel=1)
    exchanges = [Exchange(layout, rank) for rank in range(2)]
    total = sum(average(layout, exchanges, step) for step in range(3))
    owed = np.zeros(layout.numel)
    for exchange in exchanges:
        for piece in exchange.export_residuals():
            at = int(piece["name"].removeprefix("layer").removesuffix(".weight"))
            owed[at] += piece["values"][0] * (0.5 if piece["kind"] == "push" else 1)
    sent = sum(values(layout, step, rank) / 2 for step in range(3) for rank in range(2))
    np.testing.assert_allclose(total + owed, sent, atol=1e-5)


def test_a_thousand_exchanges_at_once() -> None:
    layout = Layout([("a.weight", [64, 64])], 4, "3lc")
    worlds = [[Exchange(layout, rank) for rank in range(4)] for _ in range(10)]
    expected = next(average(layout, exchanges, 0) for exchanges in worlds)
    files, before = len(os.listdir("/proc/self/fd")), memory()
    worlds += [[Exchange(layout, rank) for rank in range(4)] for _ in range(250)]
    for exchanges in worlds[10:]:
        np.testing.assert_array_equal(average(layout, exchanges, 0), expected)
    assert len(os.listdir("/proc/self/fd")) == files
    # A rank keeps 4096 residuals of 4 bytes, and room for four packets.
    assert memory() - before < 1000 * 65536
