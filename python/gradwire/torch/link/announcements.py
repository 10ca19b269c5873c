"""What some ranks say of a step before their packets.

A rank that has something to say sends each peer an entry before its first packet, and ranks whose
exchange does not bring all together pass on the entries that they got. The result of each rank
depends on the values of all, so each entry has come to each rank with the last packet that it
needs. A step in which no rank has anything to say has no message and no wait more than before.
"""

from __future__ import annotations

import struct
from collections import defaultdict

import numpy as np

from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.link.transport import Bytes, Kind, Transport

_RANK = struct.Struct("<I")


class Announcements:
    """The entries of one step, all of one kind and size."""

    def __init__(
        self, kind: Kind, size: int, wire: Transport, passes_on: bool, own: bytes | None
    ) -> None:
        """size: bytes of an entry. passes_on: whether some ranks of the exchange do not send to
        each other. own: this rank's entry; None: it has nothing to say."""
        self.kind = kind
        self.by_rank = {} if own is None else {wire.rank: own}
        self._size = size
        self._rank = wire.rank
        self._ranks = {wire.rank, *wire.peers}
        self._passes_on = passes_on
        self._told: defaultdict[int, set[int]] = defaultdict(set)  # what each peer knows, by rank

    @property
    def are_complete(self) -> bool:
        """Whether every rank has said something, as far as this one has heard."""
        return len(self.by_rank) == len(self._ranks)

    @property
    def max_size(self) -> int:
        """Bytes of the longest message."""
        return len(self._ranks) * (_RANK.size + self._size)

    def tell(self, wire: Transport, peer: int) -> None:
        """Sends what the peer does not know yet; to be called before each packet."""
        news = self.by_rank.keys() - self._told[peer] - {peer}
        if not self._passes_on:
            news &= {self._rank}
        if news:
            self._told[peer] |= news
            entries = b"".join(_RANK.pack(rank) + self.by_rank[rank] for rank in sorted(news))
            wire.send(peer, self.kind, np.frombuffer(entries, dtype=np.uint8))

    def learn(self, peer: int, message: Bytes) -> None:
        """Takes what the peer told. Raises PeerMismatchError if it is no list of entries."""
        size = _RANK.size + self._size
        entries = [message[at : at + size].tobytes() for at in range(0, message.size, size)]
        for entry in entries:
            rank = _RANK.unpack_from(entry)[0] if len(entry) == size else None
            if rank not in self._ranks:
                raise PeerMismatchError(
                    f"rank {self._rank}: rank {peer} sent a message of the kind {self.kind.label} "
                    f"with {message.size} bytes, which are no entries of {self._size} bytes of "
                    "these ranks: the two have different versions of gradwire",
                    (peer,),
                )
            self.by_rank[rank] = entry[_RANK.size :]
            self._told[peer].add(rank)
