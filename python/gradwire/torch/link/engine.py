"""Drives an exchange over a wire, by a loop that knows nothing of the algorithm.

The exchange says which bytes go to which rank and which ranks owe bytes; the wire moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

import numpy as np

from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import Bytes, Kind, Wire


class Described(Protocol):
    """A description that must be equal on all ranks.

    `check_peer` compares it with the text of a peer. It raises ValueError naming the difference.
    """

    def describe(self) -> str: ...
    def check_peer(self, peer: int, text: str) -> None: ...


class Lines:
    """A description that consists of lines."""

    def __init__(self, rank: int, lines: Sequence[str]) -> None:
        self._rank = rank
        self._lines = lines

    def describe(self) -> str:
        return "\n".join(self._lines)

    def check_peer(self, peer: int, text: str) -> None:
        for mine, theirs in zip_longest(self._lines, text.split("\n"), fillvalue="nothing"):
            if mine != theirs:
                raise ValueError(
                    f"ranks {self._rank} and {peer} can't exchange: rank {self._rank} has "
                    f"'{mine}', rank {peer} has '{theirs}'"
                )


class Exchange(Described, Protocol):
    """The part of `gradwire._core.Exchange` that the loop needs."""

    @property
    def done(self) -> bool: ...
    def outgoing(self) -> Iterable[tuple[int, Bytes]]: ...
    def awaiting(self) -> Iterable[int]: ...
    def receive(self, peer: int, message: Bytes) -> None: ...


def agree(described: Described, wire: Wire) -> None:
    """Compares the description with that of every peer, before anything is exchanged.

    Raises PeerMismatchError on every rank that differs from another, naming both.
    """
    text = np.frombuffer(described.describe().encode(), dtype=np.uint8).copy()
    for peer in wire.peers:
        wire.send(peer, Kind.HELLO, text)
    others = {}
    for peer in wire.peers:
        others[peer] = _receive(wire, peer, Kind.HELLO).tobytes().decode()
        wire.release(peer)
    wire.flush()  # a peer that differs must receive it before this rank stops
    for peer, other in others.items():
        try:
            described.check_peer(peer, other)
        except ValueError as error:
            raise PeerMismatchError(str(error), (peer,)) from error


def finish_step(exchange: Exchange, wire: Wire) -> None:
    """Moves the messages of a step that was started, until its bucket holds the result."""
    _send_all(exchange, wire)
    while not exchange.done:
        for peer in exchange.awaiting():
            exchange.receive(peer, receive_packet(wire, peer))
            wire.release(peer)
            _send_all(exchange, wire)
    wire.flush()


def _send_all(exchange: Exchange, wire: Wire) -> None:
    for peer, message in exchange.outgoing():
        wire.send(peer, Kind.PACKET, message)


def receive_packet(wire: Wire, peer: int) -> Bytes:
    """Waits for the peer's next packet, valid until `wire.release(peer)`.

    Raises PeerMismatchError if the peer sent a message of another kind.
    """
    return _receive(wire, peer, Kind.PACKET)


def _receive(wire: Wire, peer: int, expected: Kind) -> Bytes:
    kind, message = wire.receive(peer)
    if kind is not expected:
        raise PeerMismatchError(
            f"rank {wire.rank} and rank {peer} are not at the same bucket: rank {peer} sent a "
            f"{kind.name.lower()} where rank {wire.rank} expects a {expected.name.lower()}; the "
            "two cut their gradients into different buckets, or did not take the same number of "
            "steps",
            (peer,),
        )
    return message
