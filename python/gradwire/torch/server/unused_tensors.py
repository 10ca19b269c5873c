"""Which tensors a version has no gradient of: workers say which they lack before a push."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gradwire.torch.link.transport import Bytes
from gradwire.torch.link.unused import pack_places, packed_size, unpack_places
from gradwire.torch.server.group_options import VERSION_BYTES, read_version, version_message


def unused_size(tensors: int) -> int:
    """Bytes of the message for a part of so many tensors."""
    return VERSION_BYTES + packed_size(tensors)


def unused_message(version: int, unused: Sequence[int], tensors: int) -> Bytes:
    """unused: the places of those that the push for this version has no gradient of."""
    return version_message(version, pack_places(unused, tensors))


def read_unused(message: Bytes, tensors: int) -> tuple[int, set[int]]:
    """The version and the places. Raises ValueError for a message of another size."""
    if message.size != unused_size(tensors):
        raise ValueError(
            f"it has {message.size} bytes; a version and a bit for each of {tensors} tensors have "
            f"{unused_size(tensors)}"
        )
    return read_version(message), set(unpack_places(message[VERSION_BYTES:], tensors))


class UnusedOfWorkers:
    """What the workers said of one part."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._said: defaultdict[int, dict[int, set[int]]] = defaultdict(dict)  # by rank, version

    def take(self, rank: int, message: Bytes) -> None:
        """Raises ValueError for a message of another size."""
        version, places = read_unused(message, self._tensors)
        self._said[rank][version] = places

    def replace(self, rank: int) -> None:
        """Another process has the place of this rank from now on."""
        self._said.pop(rank, None)

    def everywhere(self, version: int, taken: Sequence[int]) -> list[int]:
        """The places of the tensors that no push of this version has a gradient of. `taken`: the
        workers whose push is in it. What was said of earlier versions is forgotten."""
        lacking = [self._said[rank].get(version, set()) for rank in taken]
        for said in self._said.values():
            for earlier in [v for v in said if v < version]:
                del said[earlier]
        return sorted(set.intersection(*lacking)) if lacking else []
