"""Frames with a fault in the header, each with the status that refuses it."""

from __future__ import annotations

import struct

import reference as spec
from golden_cases.inputs import builder, put, u64
from payloads import raw, three_lc

DECODE = {"marker-no-values": builder(three_lc.NUMBER)(0, b"", a=1, flags=spec.NON_FINITE_FLAG)}


def seal(frame: bytes) -> bytes:
    return put(frame, 20, struct.pack("<I", spec.checksum(frame[:20], frame[24:])))


def errors() -> dict[str, tuple[str, bytes]]:
    """The status and the bytes by name. The checksum is correct unless it is the fault."""
    frame = builder(raw.NUMBER)
    good = frame(3, struct.pack("<3f", 1.0, -2.0, 0.5))

    def edited(at: int, replacement: bytes) -> bytes:
        return seal(put(good, at, replacement))

    def claims(n: int) -> bytes:
        return frame(n, bytes(8))

    return {
        "marker-with-payload": ("corrupt_payload", frame(2, bytes(8), flags=1)),
        "empty": ("truncated", b""),
        "one-byte": ("truncated", good[:1]),
        "header-cut": ("truncated", good[:31]),
        "payload-missing": ("truncated", good[:32]),
        "payload-cut": ("truncated", good[:-1]),
        "length-2-32": ("truncated", edited(24, u64(2**32 + 12))),
        "length-2-63": ("truncated", edited(24, u64(2**63))),
        "length-2-64-minus-1": ("truncated", edited(24, b"\xff" * 8)),
        "length-wraps-to-0": ("truncated", edited(24, u64(2**64 - 32))),
        "short-and-bad-magic": ("truncated", b"XX"),
        "bad-magic": ("bad_magic", edited(0, b"WG")),
        "magic-of-a-packet": ("bad_magic", edited(0, b"GP")),
        "version-0": ("unsupported_version", edited(2, b"\x00")),
        "version-2": ("unsupported_version", edited(2, b"\x02")),
        **{f"flag-{i}": ("reserved_bits", edited(5, bytes([1 << i]))) for i in range(1, 8)},
        "codec-0": ("unknown_codec", edited(3, b"\x00")),
        "codec-255": ("unknown_codec", edited(3, b"\xff")),
        "dtype-3": ("unsupported_dtype", edited(4, b"\x03")),
        "n-beyond-2-40": ("limit_exceeded", claims(2**40 + 1)),
        "n-2-63": ("limit_exceeded", claims(2**63)),
        "n-2-64-minus-1": ("limit_exceeded", claims(2**64 - 1)),
        "n-times-4-wraps": ("limit_exceeded", claims(2**62 + 2)),
        "one-byte-more": ("trailing_bytes", good + b"\x00"),
        "a-second-frame": ("trailing_bytes", good + good),
        "checksum": ("checksum_mismatch", put(good, 20, bytes([good[20] ^ 1]))),
        "checksum-of-payload": ("checksum_mismatch", put(good, 35, bytes([good[35] ^ 0x80]))),
        "checksum-of-n": ("checksum_mismatch", put(good, 8, b"\x04")),
        # With two faults, the status is that of the first check.
        "magic-before-version": ("bad_magic", put(good, 0, b"\0\0\x07")),
        "version-before-flags": ("unsupported_version", put(put(good, 2, b"\x07"), 5, b"\xff")),
        "flags-before-codec": ("reserved_bits", put(put(good, 3, b"\x63"), 5, b"\x80")),
        "codec-before-dtype": ("unknown_codec", put(good, 3, b"\x63\x09")),
        "dtype-before-n": ("unsupported_dtype", put(claims(2**50), 4, b"\x09")),
        "n-before-length": ("limit_exceeded", claims(2**50) + b"\x00"),
        "length-before-checksum": ("truncated", put(good, 20, b"\0\0\0\0")[:-1]),
        "checksum-before-parameters": ("checksum_mismatch", put(good, 6, b"\x01")),
        "parameters-before-payload": (
            "reserved_bits",
            builder(three_lc.NUMBER)(5, b"\x00", a=3, flags=spec.NON_FINITE_FLAG),
        ),
    }
