"""Messages of every size arrive whole and in order; any other bytes are an error of the wire."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import Cluster
from gradwire._core import checksum32
from gradwire.torch.errors import DamagedMessageError, PeerMismatchError
from gradwire.torch.network import wire as wire_module
from gradwire.torch.network.engine import receive
from gradwire.torch.network.transport import OVERHEAD_BYTES, PART_BITS, Kind, LostError
from gradwire.torch.network.wire import HEAD_BYTES, Wire

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
            ahead = message(wire.rank, 100 + number, size)
            wire.send(peer, Kind.PACKET, ahead, wire.next_turn, in_turn=True)
    for peer in reversed(wire.peers):
        for number, size in enumerate(SIZES):
            limits = {Kind.PACKET: max(SIZES), Kind.CATCH_UP: max(SIZES)}
            kind, data, part, *_ = wire.receive(peer, limits)
            assert kind is (Kind.PACKET if number % 2 else Kind.CATCH_UP)
            assert part == number * 4095
            np.testing.assert_array_equal(data, message(peer, number, size))
            wire.release(peer)
            kind, data, part, *_ = wire.receive(peer, limits)
            assert (kind, part) == (Kind.PACKET, wire.next_turn)
            np.testing.assert_array_equal(data, message(peer, 100 + number, size))
            wire.release(peer)
    wire.begin_turn()
    wire.flush()
    # A packet leaves room for the next one, a model does not.
    largest = max(size for number, size in enumerate(SIZES) if number % 2)
    for (_, is_ahead), room in wire._rooms.items():
        assert room.size == wire_module._room_for(max(SIZES) if is_ahead else largest)
    dist.barrier()
    assert wire.closed_peers() == ()
    dist.barrier()
    return wire.sent_bytes


def test_messages_arrive(cluster: Cluster) -> None:
    for sent in cluster.run(3, exchange_messages):
        assert sent == 2 * 2 * sum(OVERHEAD_BYTES + size for size in SIZES)


def send_to_one_that_does_not_look() -> list[int]:
    """Rank 0's messages are all sent before rank 1 receives the first one."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    wire = Wire(group, timeout=30.0)
    numbers = range(wire_module._POSTED)
    found = []
    if wire.rank == 0:
        for number in numbers:
            wire.send(1, Kind.PACKET, message(0, number, 1000 * number))
        wire.flush()
    dist.barrier()
    for number in numbers if wire.rank == 1 else ():
        data = receive(wire, 0, Kind.PACKET, 10_000)
        np.testing.assert_array_equal(data, message(0, number, 1000 * number))
        found.append(data.size)
        wire.release(0)
    dist.barrier()
    return found


def test_a_sender_does_not_wait_for_the_receivers_thread(cluster: Cluster) -> None:
    """Else each message after the first would travel only when the receiver asks for it, which
    takes the way there and back."""
    _, found = cluster.run(2, send_to_one_that_does_not_look)
    assert found == [1000 * number for number in range(4)]


def state_a_length(length: int, number: int) -> str:
    """Rank 0 states this length of a message of the kind with this number, and sends no such
    bytes; rank 1's error, for which it must not have taken memory."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    wire = Wire(group, timeout=30.0)
    if wire.rank == 0:
        word = wire_module._WORD.pack(length | (number << PART_BITS) << 40)
        check = wire_module._CHECKS.pack(checksum32(word), 0)
        head = np.zeros(HEAD_BYTES, dtype=np.uint8)
        head[:OVERHEAD_BYTES] = np.frombuffer(word + check, dtype=np.uint8)
        work, _ = wire._start_send(1, head, wire_module._HEAD_TAG)
        work.wait()
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


# A peer that sends anything -----------------------------------------------------------------------


@dataclass
class Transfer:
    """As dist.Work: ends when it is waited for."""

    finish: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        self.finish()


class Sent(defaultdict[int, list[bytes]]):
    """What a peer sends, by tag."""

    def __repr__(self) -> str:
        """Hypothesis shows this. The bytes that are left out follow from the others."""
        short = {tag: [(len(m), m[:OVERHEAD_BYTES].hex()) for m in self[tag]] for tag in self}
        return f"Sent({short})"


class ScriptedGroup:
    """Stands for a Gloo group of this rank and a peer, which has sent these bytes, by tag. As with
    Gloo, a message may be shorter than the room for it, and a longer one is refused."""

    def __init__(self, sent: Sent) -> None:
        self._sent = defaultdict(deque, {tag: deque(messages) for tag, messages in sent.items()})

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Transfer:
        room = tensors[0].numpy()

        def finish() -> None:
            if not self._sent[tag]:
                raise RuntimeError("Connection closed by peer")
            data = np.frombuffer(self._sent[tag].popleft(), dtype=np.uint8)
            if data.size > room.size:
                raise RuntimeError("Message size is larger than the room for it")
            room[: data.size] = data

        return Transfer(finish)


IN_HEAD = HEAD_BYTES - OVERHEAD_BYTES
LENGTHS = st.one_of(
    st.sampled_from([0, 1, 8, IN_HEAD - 1, IN_HEAD, IN_HEAD + 1, 100_000, 200_000]),
    st.integers(0, 300_000),
)
LIMITS = st.dictionaries(
    st.sampled_from(Kind), st.sampled_from([0, 8, IN_HEAD, 100_000, 1 << 20]), min_size=1
)


@st.composite
def sent_messages(draw: st.DrawFn) -> Sent:
    """Heads and rests of valid messages, with anything else between."""
    sent = Sent(list)
    rooms = {False: 0, True: 0}
    for _ in range(draw(st.integers(1, 5))):
        size = draw(LENGTHS)
        payload = np.random.default_rng(size).bytes(size)
        length = size if draw(st.integers(0, 4)) else draw(st.integers(0, (1 << 40) - 1))
        number = draw(st.sampled_from([0, 0, 0, *Kind, 11, 127]))
        is_ahead = draw(st.booleans())
        word = wire_module._WORD.pack(
            length | (draw(st.integers(0, 65535)) | (number | is_ahead << 7) << PART_BITS) << 40
        )
        checksum = checksum32(payload) if number != Kind.PACKET else 0
        head = bytearray(word + wire_module._CHECKS.pack(checksum32(word), checksum))
        head += payload[:IN_HEAD]
        for _ in range(draw(st.sampled_from([0, 0, 0, 1]))):
            head[draw(st.integers(0, min(len(head), 24) - 1))] ^= 1 << draw(st.integers(0, 7))
        cut = draw(st.sampled_from([HEAD_BYTES] * 9 + [draw(st.integers(0, HEAD_BYTES))]))
        sent[wire_module._HEAD_TAG].append(bytes(head[:cut]))
        if size > IN_HEAD:
            room = max(rooms[is_ahead], IN_HEAD)
            of_rest = wire_module._REST_AHEAD_TAG if is_ahead else wire_module._REST_TAG
            parts = {of_rest: payload[IN_HEAD:room], wire_module._BEYOND_TAG: payload[room:]}
            for tag, part in parts.items():
                if part:
                    sent[tag].append(draw(st.sampled_from([part] * 4 + [part[1:], part + b"1"])))
            if number == Kind.PACKET and size > room:
                rooms[is_ahead] = wire_module._room_for(size)
    return sent


@settings(max_examples=200, deadline=None)
@given(sent_messages(), LIMITS)
def test_any_bytes_are_messages_within_their_limits_or_errors_of_the_wire(
    sent: Sent, limits: dict[Kind, int]
) -> None:
    """Only errors that name the sender come out. Memory is taken for heads, for the largest packet
    so far and the largest one ahead, rounded up to powers of two, and for the message at hand."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    error = receive_all(Wire(cast(Any, ScriptedGroup(sent)), timeout=1.0), limits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if isinstance(error, LostError):
        assert error.peers == (0,)
    elif error is not None:
        assert error.ranks == (0,)
        assert "rank 1: rank 0 " in str(error)
    most = max(limits.values())
    room = wire_module._room_for(most) if most > IN_HEAD else 0
    assert peak - before <= 3 * room + wire_module._POSTED * HEAD_BYTES + 100_000


def receive_all(
    wire: Wire, limits: dict[Kind, int]
) -> LostError | DamagedMessageError | PeerMismatchError | None:
    """Receives from rank 0 until nothing more can be received. Returns the error."""
    try:
        while (received := wire.receive(0, limits)).kind in limits:
            assert received.payload.size <= limits[received.kind]
            assert 0 <= received.part < 1 << PART_BITS
            wire.release(0)
    except (LostError, DamagedMessageError, PeerMismatchError) as error:
        return error
    assert received.payload.size == 0
    return None
