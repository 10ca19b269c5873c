"""Messages of every size arrive whole and in order."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from cluster import Cluster
from gradwire._core import checksum32
from gradwire.torch.link import wire as wire_module
from gradwire.torch.link.engine import receive
from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import HEAD_BYTES, OVERHEAD_BYTES, Kind, Wire

# Sizes around that from which a second transfer is needed (the head also holds a word and
# checksums), and around those up to which receives are posted after such messages.
SIZES = (
    *(0, 1, 1000, *(HEAD_BYTES - OVERHEAD_BYTES + i for i in range(-1, 4))),
    *(3 * HEAD_BYTES, 5 * HEAD_BYTES - 16, 5 * HEAD_BYTES - 15, 1_000_003, 70_000, 5, 1_000_004, 9),
    3_000_000,  # a model
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
            wire.send(peer, kind, data, part=number * 4095)  # up to 65520
    for peer in reversed(wire.peers):
        for number, size in enumerate(SIZES):
            limits = {Kind.PACKET: max(SIZES), Kind.CATCH_UP: max(SIZES)}
            kind, data, part, _ = wire.receive(peer, limits)
            assert kind is (Kind.PACKET if number % 2 else Kind.CATCH_UP)
            assert part == number * 4095
            np.testing.assert_array_equal(data, message(peer, number, size))
            wire.release(peer)
    wire.flush()
    # A packet leaves room for the next one, a model does not.
    largest = max(size for number, size in enumerate(SIZES) if number % 2)
    assert {room.size for room in wire._rooms.values()} == {wire_module._room_for(largest)}
    dist.barrier()
    assert wire.closed_peers() == ()
    dist.barrier()
    return wire.sent_bytes


def test_messages_arrive(cluster: Cluster) -> None:
    for sent in cluster.run(3, exchange_messages):
        assert sent == 2 * sum(OVERHEAD_BYTES + size for size in SIZES)


def state_a_length(length: int, number: int) -> str:
    """Rank 0 states this length of a message of the kind with this number, and sends no such
    bytes; rank 1's error, for which it must not have taken memory."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    wire = Wire(group, timeout=30.0)
    if wire.rank == 0:
        word = wire_module._WORD.pack(length | (number << wire_module.PART_BITS) << 40)
        check = wire_module._CHECKS.pack(checksum32(word), 0)
        head = np.zeros(HEAD_BYTES, dtype=np.uint8)
        head[:OVERHEAD_BYTES] = np.frombuffer(word + check, dtype=np.uint8)
        wire._start_send(1, head, wire_module._HEAD_TAG)
        wire.flush()
        dist.barrier()
        return ""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(PeerMismatchError) as raised:
        receive(wire, 0, Kind.PACKET, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 500_000
    assert raised.value.ranks == (0,)
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("length", [1_000_001, (1 << 40) - 1])
def test_a_length_above_the_limit_takes_no_memory(cluster: Cluster, length: int) -> None:
    _, error = cluster.run(2, state_a_length, length, Kind.PACKET)
    assert error.startswith(
        f"rank 1: rank 0 states a packet of {length} bytes, and one of at most 1000000 can come "
    )


def test_a_message_of_another_kind_takes_no_memory(cluster: Cluster) -> None:
    _, error = cluster.run(2, state_a_length, 1 << 39, Kind.TENSORS)
    assert "rank 0 sent a tensors where rank 1 expects a packet" in error


def test_an_unknown_kind_is_named(cluster: Cluster) -> None:
    _, error = cluster.run(2, state_a_length, 8, 99)
    assert "rank 0 sent a message of the unknown kind 99" in error
