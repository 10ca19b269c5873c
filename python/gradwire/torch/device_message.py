"""What one rank sends another of a shard in one leg of the device exchange.

    int64     -1, or where values were not finite: segment << 40 | element
    int64     the rank that saw them so, or the sender
    int64[k]  size of each segment's payload, 0 where it is empty
    payloads  by codec; room for the largest each where a codec's payloads have fixed sizes, so that
              the whole message has one, else one behind the other
    padding   to a multiple of 8 bytes

The segments are those of the shard, by codec: first those of fixed sizes, then by the codecs' text.
Payloads are the same bytes as in a packet (spec/format.md), which is for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gradwire.torch.device_codec import SegmentCodec

_ELEMENT_BITS = 40  # no segment has more values
_FINITE = -1
_WORD = 8
_ORIGIN_WORDS = 2

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Origin:
    """Where values were first seen not to be finite. `segment`: index in the layout."""

    rank: int
    segment: int
    element: int

    @staticmethod
    def in_head(head: Words) -> Origin | None:
        """None: everything is finite."""
        place, rank = int(head[0]), int(head[1])
        if place == _FINITE:
            return None
        return Origin(rank, place >> _ELEMENT_BITS, place & (1 << _ELEMENT_BITS) - 1)

    def words(self) -> list[int]:
        return [self.segment << _ELEMENT_BITS | self.element, self.rank]


@dataclass(frozen=True)
class Part:
    """The segments `first` to `last` of a codec, one behind the other in a message."""

    codec: SegmentCodec
    first: int
    last: int
    segments: tuple[int, ...]  # their indices in the layout

    @property
    def rooms(self) -> list[tuple[int, int]]:
        return self.codec.rooms[self.first : self.last]

    @property
    def room(self) -> slice:
        """Where all of its payloads lie."""
        (begin, _), (end, size) = self.rooms[0], self.rooms[-1]
        return slice(begin, end + size)


class ShardMessage:
    """The form of the messages of one shard."""

    def __init__(self, parts: Sequence[Part], rank: int, device: torch.device) -> None:
        """`rank`: this one, as the sender of what it encodes."""
        self.parts = sorted(parts, key=lambda part: not part.codec.has_fixed_sizes)
        self.segments = tuple(i for part in self.parts for i in part.segments)
        self._device = device
        self._head = _WORD * (_ORIGIN_WORDS + len(self.segments))
        self._fixed = [part for part in self.parts if part.codec.has_fixed_sizes]
        rooms = [room for part in self._fixed for room in part.rooms]
        begins, at = [], self._head
        for part in self._fixed:
            begins += [at + begin - part.room.start for begin, _ in part.rooms]
            at += part.room.stop - part.room.start
        self._fixed_end = at
        self._fixed_begins = torch.tensor(begins, dtype=torch.int64, device=device)
        self._fixed_sizes = torch.tensor([s for _, s in rooms], dtype=torch.int64, device=device)
        self._host_sizes = np.array([s for _, s in rooms], dtype=np.int64)
        self._indices = torch.tensor(self.segments, dtype=torch.int64, device=device)
        self._sender = torch.tensor([rank], dtype=torch.int64, device=device)
        self._padding = torch.zeros(_WORD, dtype=torch.uint8, device=device)
        # Every message has this length where all codecs have fixed sizes, and no other can be had.
        self.fixed_length = _padded(at) if len(self._fixed) == len(self.parts) else None

    def head(self) -> torch.Tensor:
        """int64 [2 + k], on the device: what was encoded last."""
        if not self.parts:
            return torch.cat([torch.full_like(self._sender, _FINITE), self._sender])
        encoded = torch.cat([part.codec.encoded[part.first : part.last] for part in self.parts])
        sizes, first_bad = encoded[:, 0], encoded[:, 1]
        nowhere = torch.iinfo(torch.int64).max
        bad = torch.where(first_bad < 0, nowhere, self._indices << _ELEMENT_BITS | first_bad)
        lowest = bad.amin(0, keepdim=True)
        return torch.cat([torch.where(lowest == nowhere, _FINITE, lowest), self._sender, sizes])

    def marker(self, origin: Origin) -> list[torch.Tensor]:
        """The bytes of a message that says so, without payloads: they mean nothing where it has a
        fixed length.
        """
        words = origin.words() + [0] * len(self.segments)
        on_device = torch.tensor(words, dtype=torch.int64).to(self._device)
        if self.fixed_length is None:
            return [on_device.view(torch.uint8)]
        return self.pieces(on_device, None)

    def pieces(self, head: torch.Tensor, sizes: Words | None) -> list[torch.Tensor]:
        """The message's bytes. `sizes` of all payloads; not needed where all have fixed sizes."""
        pieces = [head.view(torch.uint8)]
        pieces += [part.codec.payloads[part.room] for part in self._fixed]
        length = self._fixed_end
        if sizes is not None:
            at = len(self._host_sizes)
            for part in self.parts[len(self._fixed) :]:
                for (begin, _), size in zip(part.rooms, sizes[at:].tolist(), strict=False):
                    pieces.append(part.codec.payloads[begin : begin + size])
                    length += size
                at += len(part.segments)
        pieces.append(self._padding[: _padded(length) - length])
        return pieces

    def length(self, sizes: Words) -> int:
        """Bytes of a message with payloads of these sizes."""
        return _padded(self._fixed_end + int(sizes[len(self._host_sizes) :].sum()))

    def heads_in(self, received: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
        """int64 [messages, 2 + k], on the device."""
        return torch.stack([received[b : b + self._head].view(torch.int64) for b in begins])

    def check(self, head: Words, length: int) -> str | None:
        """What is wrong with the sizes in a head, in a message of this length; None: nothing."""
        sizes = sizes_in(head)
        fixed, others = np.split(sizes, [len(self._host_sizes)])
        if head[0] != _FINITE:  # nothing is read of it
            return f"it is not finite, and has the sizes {sizes.tolist()}" if others.any() else None
        wrong = (others < 0) | (others > length)
        if wrong.any() or not ((fixed == 0) | (fixed == self._host_sizes)).all():
            return f"its payloads have the sizes {sizes.tolist()}, which none of the layout has"
        expected = self.length(sizes)
        return None if expected == length else f"it has {length} bytes, {expected} were expected"

    def places(self, heads: torch.Tensor, begins: torch.Tensor) -> list[torch.Tensor]:
        """Of each part: int64 [messages, its segments, 2], begin and size of each payload.

        `begins`: int64 [messages], on the device.
        """
        sizes = heads[:, _ORIGIN_WORDS:]
        fixed = sizes[:, : len(self._host_sizes)]
        others = sizes[:, len(self._host_sizes) :]
        # Whatever a head says, nothing but the payload's place is read.
        fixed = torch.where(fixed == self._fixed_sizes, fixed, 0)
        ends = others.cumsum(1) + self._fixed_end
        begin = begins[:, None] + torch.cat([self._fixed_begins.expand_as(fixed), ends - others], 1)
        places = torch.stack([begin, torch.cat([fixed, others], 1)], -1)
        counts = [len(part.segments) for part in self.parts]
        return [part.contiguous() for part in places.split(counts, 1)]


def sizes_in(head: Words) -> Words:
    """Of the payloads, in the order of `ShardMessage.segments`."""
    return head[_ORIGIN_WORDS:]


def _padded(length: int) -> int:
    return (length + _WORD - 1) // _WORD * _WORD
