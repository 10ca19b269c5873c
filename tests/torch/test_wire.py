"""Messages of every size arrive whole and in order."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch.distributed as dist

from cluster import Cluster
from gradwire.torch.link.wire import HEAD_BYTES, OVERHEAD_BYTES, Kind, Wire

# Sizes around that from which a second transfer is needed (the head also holds a word and
# checksums), and around those up to which receives are posted after such messages.
SIZES = (
    *(0, 1, 1000, *(HEAD_BYTES - OVERHEAD_BYTES + i for i in range(-1, 4))),
    *(3 * HEAD_BYTES, 5 * HEAD_BYTES - 16, 5 * HEAD_BYTES - 15, 1_000_003, 70_000, 5, 1_000_004),
)


def message(sender: int, number: int, size: int) -> np.ndarray:
    return np.random.default_rng([sender, number]).integers(0, 256, size, dtype=np.uint8)


def exchange_messages() -> int:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    wire = Wire(group, timeout=30.0)
    for number, size in enumerate(SIZES):
        for peer in wire.peers:
            data = message(wire.rank, number, size)
            data.flags.writeable = False
            kind = Kind.PACKET if number % 2 else Kind.CATCH_UP
            wire.send(peer, kind, data, part=number * 4681)  # up to 65534
    for peer in reversed(wire.peers):
        for number, size in enumerate(SIZES):
            kind, data, part = wire.receive(peer)
            assert kind is (Kind.PACKET if number % 2 else Kind.CATCH_UP)
            assert part == number * 4681
            np.testing.assert_array_equal(data, message(peer, number, size))
            wire.release(peer)
    wire.flush()
    dist.barrier()
    assert wire.closed_peers() == ()
    dist.barrier()
    return wire.sent_bytes


def test_messages_arrive(cluster: Cluster) -> None:
    for sent in cluster.run(3, exchange_messages):
        assert sent == 2 * sum(OVERHEAD_BYTES + size for size in SIZES)
