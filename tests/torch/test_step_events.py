"""What an exchange calls while it works, so that copying, encoding and sending overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradwire._core import Exchange, Layout

TENSORS = [("a", [120, 90]), ("norm", [30]), ("b", [70, 110]), ("c", [40, 210]), ("bias", [301])]
CODECS = ["3lc:s=1.00,coder=rice", "int8", "qsgd:bits=4", "int8:bucket=128", "raw"]
PIECE = 1000  # values
RANKS = 4


class Events:
    """Values that come in pieces, and are NaN before."""

    def __init__(self, values: np.ndarray, exchange: Exchange) -> None:
        self.exchange = exchange
        self.values, self.bucket = values, np.full_like(values, np.nan)
        self.calls: list[tuple[str, int]] = []
        self.messages: list[tuple[int, np.ndarray]] = []
        self.pushed: list[int] = []  # values that were encoded, at each message
        self.back = np.full_like(values, np.nan)
        self._arrived = 0

    def arrive(self, end: int) -> int:
        assert end > self._arrived
        while self._arrived < end:
            piece = slice(self._arrived, self._arrived + PIECE)
            self.bucket[piece] = self.values[piece]
            self._arrived = min(piece.stop, self.values.size)
        self.calls.append(("arrive", self._arrived))
        return self._arrived

    def send(self, peer: int, message: np.ndarray) -> None:
        self.calls.append(("send", peer))
        self.pushed.append(self.exchange.stats()["values_pushed"])
        self.messages.append((peer, message.copy()))

    def finished(self, begin: int, n: int) -> None:
        self.back[begin : begin + n] = self.bucket[begin : begin + n]


Make = Callable[[Layout, int], Exchange]


def run(make: Make, codec: str, steps: int, with_events: bool) -> tuple[Any, ...]:
    """All messages, results and residuals of so many steps, and the events of the last."""
    layout = Layout(TENSORS, RANKS, codec, min_numel=64)
    exchanges = [make(layout, rank) for rank in range(RANKS)]
    sent, results, events = [], [], []
    for step in range(steps):
        draws = np.random.default_rng(step)
        values = [draws.normal(size=layout.numel).astype(np.float32) ** 3 for _ in range(RANKS)]
        events = [Events(v, exchange) for v, exchange in zip(values, exchanges, strict=True)]
        queue: list[tuple[int, int, np.ndarray]] = []
        for rank, exchange in enumerate(exchanges):
            if with_events:
                exchange.start(events[rank].bucket, step, events[rank])
            else:
                events[rank].bucket[:] = values[rank]
                exchange.start(events[rank].bucket, step)
            queue += collect(rank, exchange, events if with_events else [])
        while queue:
            source, peer, message = queue.pop(0)
            sent.append((step, source, peer, message.tobytes()))
            exchanges[peer].receive(source, message)
            queue += collect(peer, exchanges[peer], events if with_events else [])
        assert all(exchange.done for exchange in exchanges)
        results.append([each.bucket.tobytes() for each in events])
    kept = [piece["values"].tobytes() for e in exchanges for piece in e.export_residuals()]
    return sorted(sent), results, kept, events


def collect(
    rank: int, exchange: Exchange, events: list[Events]
) -> list[tuple[int, int, np.ndarray]]:
    """Sender, receiver and bytes of the messages that are new."""
    found = [(peer, message.copy()) for peer, message in exchange.outgoing()]
    if events:
        assert not found
        found, events[rank].messages = events[rank].messages, []
    return [(rank, peer, message) for peer, message in found]


def sharded(layout: Layout, rank: int) -> Exchange:
    return Exchange(layout, rank, seed=3)


def ring(layout: Layout, rank: int) -> Exchange:
    return Exchange(layout, rank, "ring", seed=3)


def broadcast(layout: Layout, rank: int) -> Exchange:
    return Exchange(layout, rank, "broadcast", seed=3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make", [sharded, ring, broadcast, Exchange.allgather])
def test_bytes_results_and_residuals_are_the_same(make: Make, codec: str) -> None:
    """17 steps, of which some examine residuals. Values that have not come yet are NaN."""
    usual, overlapping = (run(make, codec, 17, with_events)[:3] for with_events in (False, True))
    assert usual == overlapping


def test_terngrad_takes_values_in_pieces() -> None:
    def make(layout: Layout, rank: int) -> Exchange:
        return Exchange(layout, rank, "terngrad", seed=3)

    usual, overlapping = (run(make, "terngrad", 3, events)[:3] for events in (False, True))
    assert usual == overlapping


def test_each_push_is_sent_before_the_next_is_encoded_and_each_pull_goes_back() -> None:
    events = run(sharded, CODECS[0], 1, True)[-1]
    for rank, of_rank in enumerate(events):
        np.testing.assert_array_equal(of_rank.back, of_rank.bucket)
        pushes = [peer for kind, peer in of_rank.calls if kind == "send"][: RANKS - 1]
        assert pushes == [(rank + place) % RANKS for place in range(1, RANKS)]
        first, second, third = of_rank.pushed[: RANKS - 1]
        assert first < second < third
        arrived = [end for kind, end in of_rank.calls if kind == "arrive"]
        assert len(arrived) > 3
        assert arrived == sorted(arrived)
        assert arrived[-1] == of_rank.values.size


def test_an_exchange_that_cannot_overlap_waits_for_all_values() -> None:
    layout = Layout(TENSORS, 2, "int8", min_numel=64)
    exchange = Exchange(layout, 1, "hierarchical:ranks=2")  # 0 leads
    events = Events(np.ones(layout.numel, np.float32), exchange)
    exchange.start(events.bucket, 0, events)
    assert events.calls == [("arrive", layout.numel)]
    assert [peer for peer, _ in exchange.outgoing()]


def test_residuals_lie_in_the_memory_that_is_given() -> None:
    layout = Layout(TENSORS, 2, "3lc", rules=[("b", "3lc:residual=bf16")], min_numel=64)
    usual, elsewhere = ([Exchange(layout, rank) for rank in range(2)] for _ in range(2))
    memories = [np.zeros(exchange.residual_bytes, np.uint8) for exchange in elsewhere]
    for step in range(3):
        for exchange, memory in zip(elsewhere, memories, strict=True):
            exchange.keep_residuals_in(memory.copy())
        for exchanges in (usual, elsewhere):
            draws = np.random.default_rng(step)
            buckets = [draws.normal(size=layout.numel).astype(np.float32) for _ in range(2)]
            for exchange, bucket in zip(exchanges, buckets, strict=True):
                exchange.start(bucket, step)
            for _ in range(2):
                for rank, exchange in enumerate(exchanges):
                    for peer, message in exchange.outgoing():
                        exchanges[peer].receive(rank, message)
        for place, (a, b) in enumerate(zip(usual, elsewhere, strict=True)):
            kept = [[piece["values"].tobytes() for piece in e.export_residuals()] for e in (a, b)]
            assert kept[0] == kept[1]
            memories[place] = np.zeros(b.residual_bytes, np.uint8)
            b.keep_residuals_in(memories[place])
            for piece in a.export_residuals():
                b.import_residual(**piece)
    assert all(memory.any() for memory in memories)
    with pytest.raises(Exception, match="the memory has 3 bytes, the residuals have"):
        elsewhere[0].keep_residuals_in(np.zeros(3, np.uint8))
