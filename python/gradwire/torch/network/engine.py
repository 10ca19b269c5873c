"""Drives an exchange over a transport, by a loop that knows nothing of the algorithm.

The exchange says which bytes go to which rank and which ranks owe bytes; the transport moves them.
What ranks announce goes before their packets."""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

import numpy as np

from gradwire._core import Exchange
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.network.transport import TEXT_BYTES, Bytes, Kind, Limits, Transport

_RANK = struct.Struct("<I")
_AHEAD = 2  # messages that a rank sends a peer before their turn: an announcement, a packet


class Announcements:
    """What some ranks say of a step before their packets: entries of one kind and size.

    A rank that has something to say sends each peer an entry before its first packet, and ranks
    whose exchange does not bring all together pass on the entries that they got. The result of each
    rank depends on the values of all, so each entry has come to each rank with the last packet that
    it needs. A step in which no rank has anything to say has no message and no wait more.
    """

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

    def tell(self, wire: Transport, peer: int, turn: int) -> None:
        """Sends what the peer does not know yet; to be called before each packet."""
        news = self.by_rank.keys() - self._told[peer] - {peer}
        if not self._passes_on:
            news &= {self._rank}
        if news:
            self._told[peer] |= news
            entries = b"".join(_RANK.pack(rank) + self.by_rank[rank] for rank in sorted(news))
            message = np.frombuffer(entries, dtype=np.uint8)
            wire.send(peer, self.kind, message, turn, True)

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
    """Which tensors of a step's bucket no rank has a gradient of.

    Zeros stand in a bucket where a rank has no gradient. So that all ranks tell zeros from nothing,
    a rank announces its unused tensors. `own`: their places among those of the bucket.
    """

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


def gather_bytes(message: bytes, wire: Transport, limit: int) -> list[bytes]:
    """The message of every rank, by rank, of at most `limit` bytes. Every rank calls this at the
    same time."""
    own = np.frombuffer(message, dtype=np.uint8)
    for peer in wire.peers:
        wire.send(peer, Kind.HELLO, own)
    messages = [message] * wire.world_size
    for peer in wire.peers:
        messages[peer] = receive(wire, peer, Kind.HELLO, limit).tobytes()
        wire.release(peer)
    wire.flush()  # a peer that differs must receive it before this rank stops
    return messages


def gather(text: str, wire: Transport) -> list[str]:
    """The text of every rank, by rank. Every rank calls this at the same time."""
    return [message.decode() for message in gather_bytes(text.encode(), wire, TEXT_BYTES)]


def agree(text: str, wire: Transport) -> None:
    """Compares the text with that of every peer, before anything is exchanged.

    Raises PeerMismatchError on every rank that differs from another, naming both and the first line
    in which they differ. The texts themselves are sent only if their digests differ.
    """
    digest = hashlib.sha256(text.encode()).digest()
    if all(other == digest for other in gather_bytes(digest, wire, len(digest))):
        return
    for peer, other in enumerate(gather(text, wire)):
        for mine, theirs in zip_longest(text.split("\n"), other.split("\n"), fillvalue="nothing"):
            if mine != theirs:
                raise PeerMismatchError(
                    f"ranks {wire.rank} and {peer} can't exchange: rank {wire.rank} has '{mine}', "
                    f"rank {peer} has '{theirs}'",
                    (peer,),
                )


def lacking_in_all(unused: Unused, tensors: int, wire: Transport) -> Unused:
    """The tensors, of so many, that no rank has a gradient of."""
    lacking = np.zeros(tensors, dtype=np.uint8)
    lacking[unused.own] = 1
    for peer, message in enumerate(gather_bytes(lacking.tobytes(), wire, tensors)):
        if len(message) != tensors:
            raise PeerMismatchError(
                f"rank {wire.rank} reduces the gradients of {tensors} parameters, rank {peer} "
                f"those of {len(message)}: all ranks must run the same units, in the same order",
                (peer,),
            )
        lacking &= np.frombuffer(message, dtype=np.uint8)
    return Unused(np.flatnonzero(lacking).tolist())


class Values(Protocol):
    """The values of a bucket, which may arrive in pieces (staging.Arriving)."""

    def arrive(self, end: int) -> int: ...
    def finished(self, begin: int, n: int) -> None: ...
    def check(self) -> None: ...


class StepEvents:
    """What an exchange calls while it works: sends each message as soon as it is encoded, or holds
    it until `go`. An error in there is raised by `check`, as none may pass through the exchange."""

    def __init__(self, wire: Transport, values: Values, gives_back: bool) -> None:
        """gives_back: results are final when they are there."""
        self._wire, self.values = wire, values
        self._said: Sequence[Announcements] | None = None
        self._held: list[tuple[int, Bytes]] = []
        self._turn = 0
        self._gives_back = gives_back
        self._error: Exception | None = None

    def go(self, said: Sequence[Announcements], turn: int) -> None:
        """Sends what was held, and from now on at once. said: goes before the packets. turn: of the
        bucket."""
        self._said, self._turn = said, turn
        for peer, message in self._held:
            self.send(peer, message)
        self._held.clear()

    def arrive(self, end: int) -> int:
        return self.values.arrive(end)

    def send(self, peer: int, message: Bytes) -> None:
        try:
            if self._error is None:
                self.values.check()  # nothing is sent of values that never came
                if self._said is None:
                    self._held.append((peer, message))
                else:
                    _send(self._wire, peer, message, self._said, self._turn)
        except Exception as error:
            self._error = error

    def finished(self, begin: int, n: int) -> None:
        if self._gives_back:
            self.values.finished(begin, n)

    def check(self) -> None:
        """To be called after each call of the exchange."""
        self.values.check()
        if self._error is not None:
            raise self._error


def finish_step(
    exchange: Exchange,
    wire: Transport,
    said: Sequence[Announcements],
    check: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Moves the messages of a step that was started, until its bucket holds the result, and `said`
    has what all ranks announced. check: of StepEvents. meanwhile: called before each wait."""
    check()
    limits = {each.kind: each.max_size for each in said}
    limits[Kind.PACKET] = exchange.max_message_size
    _send_all(exchange, wire, said)
    while not exchange.done:
        for peer in exchange.awaiting():
            meanwhile()
            _receive_packet(exchange, wire, peer, limits, said)
            check()
            _send_all(exchange, wire, said)
    wire.flush()


def _receive_packet(
    exchange: Exchange, wire: Transport, peer: int, limits: Limits, said: Sequence[Announcements]
) -> None:
    """Waits for the peer's packet, before which each kind of announcement may come once."""
    limits, kind = dict(limits), None
    while kind is not Kind.PACKET:
        kind, message, was_ahead = _receive(wire, peer, Kind.PACKET, limits)
        del limits[kind]
        if kind is Kind.PACKET:
            exchange.receive(peer, message)
        for each in said:
            if each.kind is kind:
                each.learn(peer, message)
        if not was_ahead:
            wire.release(peer)


def _send_all(exchange: Exchange, wire: Transport, said: Sequence[Announcements]) -> None:
    for peer, message in exchange.outgoing():
        _send(wire, peer, message, said, wire.turn)


def _send(
    wire: Transport, peer: int, message: Bytes, said: Sequence[Announcements], turn: int
) -> None:
    for each in said:
        each.tell(wire, peer, turn)
    wire.send(peer, Kind.PACKET, message, turn, True)


def receive(wire: Transport, peer: int, expected: Kind, limit: int) -> Bytes:
    """Waits for the peer's next message, valid until `wire.release(peer)`.

    Raises PeerMismatchError if the peer sent a message of another kind, or of more than `limit`
    bytes.
    """
    return _receive(wire, peer, expected, {expected: limit})[1]


def _receive(
    wire: Transport, peer: int, expected: Kind, limits: Limits
) -> tuple[Kind, Bytes, bool]:
    """As `receive`, where messages of the other kinds of `limits` may come first. The last result:
    whether the peer sent it ahead, which is not to be released."""
    ahead = wire.ahead[peer]
    if expected is Kind.PACKET and ahead and ahead[0].part == wire.turn:
        found = ahead.popleft()
        return found.kind, found.payload, True
    while True:
        found = wire.receive(peer, larger(limits, wire.ahead_limits))
        kind, message, part = found[:3]
        is_next = found.ahead and kind in wire.ahead_limits and part == wire.next_turn
        if not is_next or len(ahead) == _AHEAD:
            break
        ahead.append(found._replace(payload=message.copy()))
        wire.release(peer)
    if kind not in limits or (kind in wire.ahead_limits and part != wire.turn):
        raise PeerMismatchError(
            f"rank {wire.rank} ({wire.doing}) and rank {peer} are not at the same bucket: rank "
            f"{peer} sent a {kind.label} where rank {wire.rank} expects a {expected.label}; the "
            "two cut their gradients into different buckets, or did not take the same number of "
            "steps",
            (peer,),
        )
    return kind, message, False


def larger(limits: Limits, others: Limits) -> Limits:
    """Of each kind what either takes."""
    return {
        kind: max(limits.get(kind, 0), others.get(kind, 0))
        for kind in limits.keys() | others.keys()
    }


_DIGEST_BYTES = hashlib.sha256().digest_size
_OWN_OPTIONS = (
    "the options of an optimizer must be equal on all ranks. An optimizer that finds them from its "
    "gradients, such as Prodigy, goes with DDP and gradwire_hook, where the gradients are equal"
)
_OWN_VALUES = (
    "what is written into a parameter between two steps must be the same on all ranks. "
    "nn.Embedding(max_norm=) writes what a rank's own batch needs: take LocalSteps with "
    "late_momentum=False, which exchanges it"
)


class Alike:
    """A text that must be equal on all ranks in each step, such as the options of an optimizer.

    A rank whose text has changed since the last step announces its digest, so a step without a
    change costs nothing. If all ranks announced the same, or nobody anything, the texts are equal;
    otherwise all ranks compare them.

    A rank may ask for a comparison of values, too, which it does not have from the step before.
    """

    def __init__(self) -> None:
        self._text = ""

    def is_news(self, text: str) -> bool:
        """Whether this rank will have something to say."""
        return text not in ("", self._text)

    def begin(
        self,
        text: str,
        wire: Transport,
        passes_on: bool,
        values: Callable[[], str] | None = None,
        asks: bool = False,
    ) -> Announcements:
        """Begins a step with this text. Empty: there is none in this step, on all ranks.
        passes_on: see Announcements. values: describes them; asks: whether they may differ."""
        own, self._values = None, values
        if asks or self.is_news(text):
            self._text = text
            said = text + values() if asks and values is not None else text
            own = hashlib.sha256(said.encode()).digest()
        self._said = Announcements(Kind.ALIKE, _DIGEST_BYTES, wire, passes_on, own)
        return self._said

    def check(self, wire: Transport) -> None:
        """Ends the step; all ranks call it when its exchange is done.

        Raises PeerMismatchError on all ranks if the texts of two differ, naming both and the first
        line in which they differ.
        """
        said, values = self._said, self._values
        self._values = None  # which has the model
        if said.by_rank and not (said.are_complete and len(set(said.by_rank.values())) == 1):
            _agree_or_advise(self._text, _OWN_OPTIONS, wire)
            if values is not None:
                _agree_or_advise(values(), _OWN_VALUES, wire)


def _agree_or_advise(text: str, advice: str, wire: Transport) -> None:
    try:
        agree(text, wire)
    except PeerMismatchError as error:
        raise PeerMismatchError(f"{error}: {advice}", error.ranks) from None
