"""Drives an exchange over a wire, by a loop that knows nothing of the algorithm.

The exchange says which bytes go to which rank and which ranks owe bytes; the wire moves them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from gradwire._core import Exchange
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.link.announcements import Announcements
from gradwire.torch.link.transport import TEXT_BYTES, Bytes, Kind, Limits, Transport
from gradwire.torch.link.unused import Unused


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


def finish_step(exchange: Exchange, wire: Transport, said: Sequence[Announcements]) -> None:
    """Moves the messages of a step that was started, until its bucket holds the result, and `said`
    has what all ranks announced."""
    limits = {each.kind: each.max_size for each in said}
    limits[Kind.PACKET] = exchange.max_message_size
    _send_all(exchange, wire, said)
    while not exchange.done:
        for peer in exchange.awaiting():
            exchange.receive(peer, _receive_packet(wire, peer, limits, said))
            wire.release(peer)
            _send_all(exchange, wire, said)
    wire.flush()


def _receive_packet(
    wire: Transport, peer: int, limits: Limits, said: Sequence[Announcements]
) -> Bytes:
    """Waits for the peer's packet, before which each kind of announcement may come once."""
    limits = dict(limits)
    while True:
        kind, message = _receive(wire, peer, Kind.PACKET, limits)
        if kind is Kind.PACKET:
            return message
        del limits[kind]
        for each in said:
            if each.kind is kind:
                each.learn(peer, message)
        wire.release(peer)


def _send_all(exchange: Exchange, wire: Transport, said: Sequence[Announcements]) -> None:
    for peer, message in exchange.outgoing():
        for each in said:
            each.tell(wire, peer)
        wire.send(peer, Kind.PACKET, message)


def receive(wire: Transport, peer: int, expected: Kind, limit: int) -> Bytes:
    """Waits for the peer's next message, valid until `wire.release(peer)`.

    Raises PeerMismatchError if the peer sent a message of another kind, or of more than `limit`
    bytes.
    """
    return _receive(wire, peer, expected, {expected: limit})[1]


def _receive(wire: Transport, peer: int, expected: Kind, limits: Limits) -> tuple[Kind, Bytes]:
    """As `receive`, where messages of the other kinds of `limits` may come first."""
    kind, message, *_ = wire.receive(peer, limits)
    if kind not in limits:
        raise PeerMismatchError(
            f"rank {wire.rank} ({wire.doing}) and rank {peer} are not at the same bucket: rank "
            f"{peer} sent a {kind.label} where rank {wire.rank} expects a {expected.label}; the "
            "two cut their gradients into different buckets, or did not take the same number of "
            "steps",
            (peer,),
        )
    return kind, message
