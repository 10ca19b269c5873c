"""Ethernet frames, and what the packet engines should make of them; written from README.md."""

from __future__ import annotations

import struct
from typing import Any

import codec

TAG = 0x28
UDP, TCP = 17, 6
ETHERNET, SMALLEST = 14, 60  # bytes of the header; of a frame without its checksum
MAC = bytes.fromhex("020000000002 020000000001")


def checksum(header: bytes) -> int:
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(
    payload: bytes,
    tos: int = TAG,
    protocol: int = UDP,
    options: bytes = b"",
    fragment: int = 0x4000,
    length: int | None = None,
    ethertype: bytes = b"\x08\x00",
) -> bytes:
    """A frame; its length in the IPv4 header is right unless given."""
    words = 5 + len(options) // 4
    total = 4 * words + len(payload) if length is None else length
    fields = (0x40 | words, tos, total, 7, fragment, 64, protocol)
    header = struct.pack(">BBHHHBBH", *fields, 0) + bytes([10, 0, 0, 1, 10, 0, 0, 2]) + options
    header = header[:10] + struct.pack(">H", checksum(header)) + header[12:]
    return MAC + ethertype + header + payload


def udp(payload: bytes, **fields: Any) -> bytes:
    return ipv4(struct.pack(">HHHH", 5000, 5001, 8 + len(payload), 0) + payload, **fields)


def tcp(payload: bytes, words: int = 5, **fields: Any) -> bytes:
    """A segment whose header says that it has that many words of 4 bytes."""
    header = struct.pack(">HHIIBBHHH", 5000, 5001, 1, 2, words << 4, 0x18, 500, 0, 0)
    options = bytes(range(1, 1 + 4 * max(0, words - 5)))
    return ipv4(header + options + payload, protocol=TCP, **fields)


def pad(frame: bytes) -> bytes:
    return frame.ljust(SMALLEST, b"\0")


def parts(frame: bytes) -> tuple[bytes, bytes] | None:
    """Headers and values of a frame that bears the tag; None of all others."""
    if frame[12:15] != b"\x08\x00\x45" or frame[15] & 0xFC != TAG:
        return None
    length, _, fragment, _, protocol = struct.unpack(">HHHBB", frame[16:24])
    if fragment & 0x3FFF or protocol not in (UDP, TCP):
        return None
    transport = 8
    if protocol == TCP:
        transport = frame[46] >> 4 << 2 if length >= 40 else 0
        if transport < 20:
            return None
    start, size = ETHERNET + 20 + transport, length - 20 - transport
    if size <= 0 or size % 4:
        return None
    return frame[:start], frame[start : start + size]


def compressed(frame: bytes, name: str) -> bytes:
    found = parts(frame)
    return frame if found is None else found[0] + codec.compress(found[1], name)


def restored(frame: bytes, name: str) -> bytes:
    """The frame that arrives where this one was sent."""
    found = parts(frame)
    if found is None:
        return frame
    header, values = found
    return header + codec.decompress(codec.compress(values, name), len(values) // 4)
