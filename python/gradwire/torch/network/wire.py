"""The transport over point-to-point operations of a Gloo group.

A message is a word of 8 bytes (from its low end: length in 40 bits, part in 16, kind in 7, and a
bit of messages that are sent ahead), two checksums of 4 bytes, of the word and of the message's
bytes, and these bytes. Packets of an exchange have a checksum of their own, which the exchange
verifies: for them the second is 0.

The first `HEAD_BYTES` of a message, the *head*, are one transfer; the other bytes, the *rest*, are
a second one. A message that fits into the head costs one transfer, which takes half the time of two
(a length, then a payload). (Gloo delivers a shorter message into a larger buffer, and refuses a
longer message.)

Receives of `_POSTED` heads (256 KiB) are always posted for every peer, so as many messages do not
wait for the receiver's thread: Gloo sends a message without a posted receive only when the receiver
asks for it, which takes the way there and back. (Measured: of 4 ranks, 20 ms apart, that send each
other two messages, each lost 41 ms for each peer while one receive was posted.)

A receive is posted beforehand for the rest, too. It has room for the largest rest of a packet so
far, rounded up to a power of two; both ends know that size, because both have seen the same
messages. Messages that are sent ahead have a room of their own, as one of each kind may be on its
way. Bytes *beyond* that room are a third transfer, which the receiver asks for when it has the
head. So a model, which is sent once, leaves no room of its size behind. If every message needed
this, links would stand idle: the receiver's request travels over the connection on
which it sends, after its own data. (Measured: 4 ranks that send each other 270 kB at 10 Mbit/s need
1.13 s with such requests, 0.71 s with receives posted before; 0.68 s is the bound.)

`all_to_all_single` is not used for sizes and payload: with two ranks it took twice as long, and its
errors do not say which rank is gone.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from gradwire._core import checksum32
from gradwire.torch.errors import DamagedMessageError, PeerMismatchError
from gradwire.torch.network.transport import (
    NOTHING,
    OVERHEAD_BYTES,
    PART_BITS,
    Bytes,
    Kind,
    Limits,
    LostError,
    Received,
    Transport,
)

HEAD_BYTES = 65536
_WORD = struct.Struct("<Q")
_CHECKS = struct.Struct("<II")
_LENGTH_BITS = 40
_IN_HEAD = HEAD_BYTES - OVERHEAD_BYTES
_POSTED = 4  # of a step: up to two announcements, the packet, and the one that answers
_AHEAD_BIT = 1 << 7  # of the kind
_HEAD_TAG, _PROBE_TAG, _REST_TAG, _BEYOND_TAG, _REST_AHEAD_TAG = range(5)
_Road = tuple[int, bool]  # a peer, and whether its messages are sent ahead


class Wire(Transport):
    """Messages to and from every peer of a Gloo group."""

    def __init__(
        self, group: dist.ProcessGroup, timeout: float, numbers: Sequence[int] = ()
    ) -> None:
        """numbers: the ranks of the group's processes, as everything here counts them; empty: as
        the group counts them."""
        numbers = numbers or range(group.size())
        super().__init__(numbers[group.rank()], numbers, timeout)
        self._place_of = {number: place for place, number in enumerate(numbers)}
        self._counting = threading.Lock()
        self._sending = threading.Lock()  # by two threads
        self._group: dist.ProcessGroup | None = group
        self._sends: defaultdict[int, list[tuple[dist.Work, Bytes]]] = defaultdict(list)
        self._sends_ahead: defaultdict[int, list[tuple[dist.Work, Bytes]]] = defaultdict(list)
        # Receives of heads in the order in which they were posted; the head in use goes last.
        self._heads: defaultdict[int, deque[tuple[dist.Work | LostError, Bytes]]]
        self._heads = defaultdict(deque)
        self._in_use: dict[int, tuple[Bytes, bool]] = {}  # a head, and whether it was sent ahead
        # Room for a packet with the largest rest so far. `_room_there` is the room of a peer,
        # which follows from what was sent to it.
        roads = [(peer, is_ahead) for peer in self.peers for is_ahead in (False, True)]
        self._rooms: dict[_Road, Bytes] = dict.fromkeys(roads, np.empty(0, dtype=np.uint8))
        self._rests: dict[_Road, dist.Work | LostError] = {}
        self._room_there: dict[_Road, int] = dict.fromkeys(roads, 0)
        for peer in self.peers:
            for _ in range(_POSTED):
                self._post_head(peer, np.empty(HEAD_BYTES, dtype=np.uint8))

    def begin_turn(self) -> None:
        with self._sending:
            super().begin_turn()
            for peer, sends in self._sends_ahead.items():
                self._sends[peer] += sends
            self._sends_ahead.clear()

    def send(
        self, peer: int, kind: Kind, payload: Bytes = NOTHING, part: int = 0, in_turn: bool = False
    ) -> None:
        length = payload.size
        head = np.empty(min(HEAD_BYTES, OVERHEAD_BYTES + length), dtype=np.uint8)
        checksum = _checksum_of(kind, payload)
        head[OVERHEAD_BYTES:] = payload[: head.size - OVERHEAD_BYTES]
        with self._sending:  # a peer receives the transfers of one message, then those of another
            is_ahead = in_turn and part != self.turn
            label = part | (kind | is_ahead * _AHEAD_BIT) << PART_BITS
            word = _WORD.pack(length | label << _LENGTH_BITS)
            checks = _CHECKS.pack(checksum32(word), checksum)
            head[:OVERHEAD_BYTES] = np.frombuffer(word + checks, dtype=np.uint8)
            sends = (self._sends_ahead if is_ahead else self._sends)[peer]
            sends.append(self._start_send(peer, head, _HEAD_TAG))
            if length > _IN_HEAD:
                room = self._room_there[peer, is_ahead]
                if room > 0:
                    tag = _REST_AHEAD_TAG if is_ahead else _REST_TAG
                    sends.append(self._start_send(peer, payload[_IN_HEAD:room], tag))
                if length > room:
                    rest = payload[max(room, _IN_HEAD) :]
                    sends.append(self._start_send(peer, rest, _BEYOND_TAG))
                    if kind is Kind.PACKET:
                        self._room_there[peer, is_ahead] = _room_for(length)
            self.sent_bytes += OVERHEAD_BYTES + length

    def receive(self, peer: int, limits: Limits, timeout: float | None = None) -> Received:
        work, head = self._heads[peer].popleft()
        self._in_use[peer] = head, False
        self._wait(peer, work, timeout)
        length, kind, part, is_ahead, checksum = self._open_head(peer, head)
        self._in_use[peer] = head, is_ahead
        if kind not in limits:
            return Received(kind, NOTHING, part, ahead=is_ahead)
        self._check_length(peer, kind, length, limits[kind])
        stays = kind is not Kind.PACKET and length > max(_IN_HEAD, self._rooms[peer, is_ahead].size)
        if length <= _IN_HEAD:
            payload = head[OVERHEAD_BYTES : OVERHEAD_BYTES + length]
        else:
            payload = self._receive_rest((peer, is_ahead), head, length, kind, timeout)
        if _checksum_of(kind, payload) != checksum:
            raise self._damaged(peer, f"its {kind.label} of {length} bytes")
        return Received(kind, payload, part, stays, is_ahead)

    def _open_head(self, peer: int, head: Bytes) -> tuple[int, Kind, int, bool, int]:
        """Length, kind and part of a message, whether it was sent ahead, and its checksum."""
        check, checksum = _CHECKS.unpack_from(head, _WORD.size)
        if checksum32(head[: _WORD.size]) != check:
            raise self._damaged(peer, "the first bytes of its message")
        (word,) = _WORD.unpack_from(head)
        label = word >> _LENGTH_BITS
        number = label >> PART_BITS & ~_AHEAD_BIT
        if number not in set(Kind):
            raise PeerMismatchError(
                f"rank {self.rank}: rank {peer} sent a message of the unknown kind "
                f"{number}: the two ranks have different versions of gradwire",
                (peer,),
            )
        part, is_ahead = label & ((1 << PART_BITS) - 1), label >> PART_BITS != number
        return word & ((1 << _LENGTH_BITS) - 1), Kind(number), part, is_ahead, checksum

    def _receive_rest(
        self, road: _Road, head: Bytes, length: int, kind: Kind, timeout: float | None
    ) -> Bytes:
        """All bytes of a message that does not fit into its head."""
        peer, _ = road
        room = whole = self._rooms[road]
        beyond = None
        if length > room.size:
            packet = kind is Kind.PACKET
            whole = np.empty(_room_for(length) if packet else length, dtype=np.uint8)
            there = max(room.size, _IN_HEAD)
            beyond = self._start_receive(peer, whole[there:length], _BEYOND_TAG)
            if packet:
                self._rooms[road] = whole
        if room.size > 0:
            self._wait(peer, self._rests.pop(road), timeout)
        if beyond is not None:
            self._wait(peer, beyond, timeout)
            whole[_IN_HEAD : room.size] = room[_IN_HEAD:]
        whole[:_IN_HEAD] = head[OVERHEAD_BYTES:]
        return whole[:length]

    def _damaged(self, peer: int, what: str) -> DamagedMessageError:
        return DamagedMessageError(
            f"rank {self.rank}: rank {peer} sent {what}, and other bytes arrived: the checksum "
            "does not match. They were damaged on the way, or in the memory of a rank (or the two "
            "ranks have different versions of gradwire)",
            (peer,),
        )

    def release(self, peer: int) -> None:
        head, is_ahead = self._in_use.pop(peer)
        road = peer, is_ahead
        room = self._rooms[road]
        if room.size > 0 and road not in self._rests:
            tag = _REST_AHEAD_TAG if is_ahead else _REST_TAG
            self._rests[road] = self._try_receive(peer, room[_IN_HEAD:], tag)
        self._post_head(peer, head)

    def flush(self, peer: int | None = None, keep: int = 0) -> None:
        for target in self.peers if peer is None else (peer,):
            with self._sending:
                sends = self._sends[target]
                cut = max(0, len(sends) - keep)
                self._sends[target] = sends[cut:]
            for work, _ in sends[:cut]:
                self._wait(target, work)

    def closed_peers(self) -> tuple[int, ...]:
        closed = []
        for peer in self.peers:
            try:
                self._start_receive(peer, np.empty(1, dtype=np.uint8), tag=_PROBE_TAG)
            except LostError:
                closed.append(peer)
        return tuple(closed)

    def abort(self) -> None:
        group = self._group
        if group is None:
            return  # another thread dropped the group
        for peer in self.peers:
            with contextlib.suppress(RuntimeError):
                # torch.distributed itself no longer knows a group that the program destroyed.
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                probe = group.recv([nothing], self._place_of[peer], _PROBE_TAG)
                probe.wait(timedelta(milliseconds=1))

    def drop(self) -> None:
        self._heads.clear()
        self._rests.clear()
        self._sends.clear()
        self._sends_ahead.clear()
        self._group = None

    def _post_head(self, peer: int, head: Bytes) -> None:
        self._heads[peer].append((self._try_receive(peer, head, _HEAD_TAG), head))

    def _try_receive(self, peer: int, data: Bytes, tag: int) -> dist.Work | LostError:
        """Returns a failure for `_wait` to raise: a peer may leave after its last message."""
        try:
            return self._start_receive(peer, data, tag)
        except LostError as lost:
            return lost

    def _start_send(self, peer: int, data: Bytes, tag: int) -> tuple[dist.Work, Bytes]:
        work = self._start(peer, lambda group, place: group.send([_as_tensor(data)], place, tag))
        return work, data

    def _start_receive(self, peer: int, data: Bytes, tag: int) -> dist.Work:
        return self._start(peer, lambda group, place: group.recv([_as_tensor(data)], place, tag))

    def _start(
        self, peer: int, transfer: Callable[[dist.ProcessGroup, int], dist.Work]
    ) -> dist.Work:
        assert self._group is not None, "the wire was dropped"
        try:
            return transfer(self._group, self._place_of[peer])
        except RuntimeError as error:
            raise LostError((peer,), False, str(error)) from error

    def _wait(self, peer: int, work: dist.Work | LostError, timeout: float | None = None) -> None:
        if isinstance(work, LostError):
            raise work
        seconds = self.timeout if timeout is None else timeout
        start = time.perf_counter()
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            # Gloo reports a timeout and a closed connection alike; only a timeout takes that long.
            silent = time.perf_counter() - start >= 0.99 * seconds
            why = f"waited {seconds:g} s" if silent else str(error)
            raise LostError((peer,), silent, why) from error
        finally:
            with self._counting:
                self.waited_seconds += time.perf_counter() - start


def _checksum_of(kind: Kind, payload: Bytes) -> int:
    return 0 if kind is Kind.PACKET else checksum32(payload)


def _room_for(length: int) -> int:
    """Bytes for a message: those in the head, and a power of two that holds the rest."""
    return _IN_HEAD + (1 << (length - _IN_HEAD - 1).bit_length())


class _Writable:
    """The same memory without its read-only flag, which tensors do not have."""

    def __init__(self, data: Bytes) -> None:
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = data.__array_interface__ | {"data": (address, False)}
        self._data = data  # keeps the memory


def _as_tensor(data: Bytes) -> torch.Tensor:
    """Shares the memory of `data`. Nothing here writes to it."""
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Writable(data)))
