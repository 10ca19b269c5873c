"""Which tensors of a bucket no rank has a gradient of: unused parameters.

Zeros stand in a bucket where a rank has no gradient. So that all ranks tell zeros from nothing, a
rank with unused tensors announces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradwire.torch.link.announcements import Announcements
from gradwire.torch.link.transport import Bytes, Kind, Transport


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
        self._said: Announcements | None = None

    def begin(self, wire: Transport, tensors: int, passes_on: bool) -> Announcements:
        """tensors: of the bucket. passes_on: see Announcements."""
        own = pack_places(self.own, tensors) if self.own else None
        self._said = Announcements(Kind.UNUSED, packed_size(tensors), wire, passes_on, own)
        self._tensors = tensors
        return self._said

    def everywhere(self) -> list[int]:
        """The places of the tensors that no rank has a gradient of, ascending; complete when the
        exchange is done, and before that for an owner that has the pushes of all ranks."""
        if self._said is None or not self._said.are_complete:
            return []
        bits = [np.frombuffer(entry, dtype=np.uint8) for entry in self._said.by_rank.values()]
        return unpack_places(np.bitwise_and.reduce(bits), self._tensors)
