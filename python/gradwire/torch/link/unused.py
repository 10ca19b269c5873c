"""Which tensors of a bucket no rank has a gradient of: unused parameters.

Zeros stand in a bucket where a rank has no gradient. So that all ranks tell zeros from nothing, a
rank with unused tensors sends each peer their numbers before its first packet, and ranks whose
exchange does not bring all together pass on what they were told. The result of each rank depends on
the values of all. So what was said has come to each rank with the last packet that it needs, and a
step in which every rank has all gradients has no message and no wait more than before.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import Bytes, Kind, Wire

_RANK = struct.Struct("<I")


def packed_size(tensors: int) -> int:
    """Bytes with a bit for each of so many tensors."""
    return (tensors + 7) // 8


def pack_places(places: Sequence[int], tensors: int) -> bytes:
    """A bit for each of so many tensors, which is set at these places."""
    bits = np.zeros(tensors, dtype=bool)
    bits[list(places)] = True
    return np.packbits(bits).tobytes()


def unpack_places(bits: Bytes, tensors: int) -> list[int]:
    """The places of `pack_places`, ascending."""
    places: list[int] = np.flatnonzero(np.unpackbits(bits)[:tensors]).tolist()
    return places


class Unused:
    """What a step knows of them. `own`: the places of this rank's unused tensors among those of the
    bucket."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self.own = sorted(own)
        self._by_rank: dict[int, bytes] = {}  # of ranks with unused tensors: a bit for each tensor

    def begin(self, wire: Wire, tensors: int, passes_on: bool) -> None:
        """tensors: of the bucket. passes_on: whether some ranks of the exchange do not send to each
        other."""
        self._ranks = {wire.rank, *wire.peers}
        self._tensors = tensors
        self._passes_on = passes_on
        self._told: defaultdict[int, set[int]] = defaultdict(set)  # what each peer knows, by rank
        self._rank = wire.rank
        if self.own:
            self._by_rank = {wire.rank: pack_places(self.own, tensors)}

    @property
    def max_size(self) -> int:
        """Bytes of the longest message."""
        return len(self._ranks) * self._entry_size

    @property
    def _entry_size(self) -> int:
        return _RANK.size + packed_size(self._tensors)

    def tell(self, wire: Wire, peer: int) -> None:
        """Sends what the peer does not know yet; to be called before each packet."""
        news = self._by_rank.keys() - self._told[peer] - {peer}
        if not self._passes_on:
            news &= {self._rank}
        if news:
            self._told[peer] |= news
            entries = b"".join(_RANK.pack(rank) + self._by_rank[rank] for rank in sorted(news))
            wire.send(peer, Kind.UNUSED, np.frombuffer(entries, dtype=np.uint8))

    def learn(self, peer: int, message: Bytes) -> None:
        """Takes what the peer told. Raises PeerMismatchError if it says nothing of this bucket."""
        size = self._entry_size
        entries = [message[at : at + size].tobytes() for at in range(0, message.size, size)]
        for entry in entries:
            rank = _RANK.unpack_from(entry)[0] if len(entry) == size else None
            if rank not in self._ranks:
                raise PeerMismatchError(
                    f"rank {self._rank}: rank {peer} states which of {self._tensors} tensors it has"
                    f" no gradient of, in a message of {message.size} bytes that is none of these "
                    "ranks and tensors: the two have different versions of gradwire",
                    (peer,),
                )
            self._by_rank[rank] = entry[_RANK.size :]
            self._told[peer].add(rank)

    def everywhere(self) -> list[int]:
        """The places of the tensors that no rank has a gradient of, ascending; complete when the
        exchange is done, and before that for an owner that has the pushes of all ranks."""
        if len(self._by_rank) < len(self._ranks):
            return []
        bits = [np.frombuffer(entry, dtype=np.uint8) for entry in self._by_rank.values()]
        return unpack_places(np.bitwise_and.reduce(bits), self._tensors)
