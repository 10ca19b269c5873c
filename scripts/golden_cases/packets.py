"""Valid packets, and packets with a fault, each with the status that refuses it."""

from __future__ import annotations

import struct

import common
import reference as spec
import reference_encoder as encoder
from golden_cases.inputs import gradient, put
from payloads import raw, ternary, three_lc

ENTRY = b"\x00\x01\x04"  # table entry 0, one value, 4 bytes
VALUE = bytes.fromhex("0000803f")
REPORT = struct.pack("<IIQ", 1, 2, 3)


def packets() -> dict[str, spec.Packet]:
    texts = [("3lc:s=1.75", 39), ("raw", 3), ("3lc:s=1.75", 320), ("bf16", 5), ("3lc", 0)]
    frames = tuple(
        spec.parse_frame(encoder.encode_frame(common.to_bytes(gradient(30 + i, n)), codec))
        for i, (codec, n) in enumerate(texts)
    )
    return {
        "push": spec.Packet(spec.PUSH, 3, 1000, 0x0123456789ABCDEF, frames),
        "pull-no-frames": spec.Packet(spec.PULL, 65535, 2**64 - 1, 0, ()),
        "non-finite": spec.Packet(spec.PULL, 2, 8, 1, (), spec.NonFiniteReport(3, 7, 2**32 + 5)),
    }


def seal(packet: bytes) -> bytes:
    return put(packet, 28, struct.pack("<I", spec.checksum(packet[:28], packet[32:])))


def build(body: bytes, table_length: int = 1, frame_count: int = 1, flags: int = 0) -> bytes:
    header = spec.Packet(spec.PUSH, 1, 7, 99, ())
    packet = encoder.seal_packet(header, flags, table_length, body)
    return seal(put(packet, 24, struct.pack("<I", frame_count)))


def table(codec: int = raw.NUMBER, dtype: int = 0, a: int = 0, b: int = 0) -> bytes:
    return struct.pack("<BBHI", codec, dtype, a, b)


def errors() -> dict[str, tuple[str, bytes]]:
    """The status and the bytes by name. The checksum is correct unless it is the fault."""
    raw_entry = table()
    good = build(raw_entry + ENTRY + VALUE)
    spec.parse_packet(good)
    spec.parse_packet(build(REPORT, 0, 0, spec.NON_FINITE_FLAG))

    def edited(at: int, replacement: bytes) -> bytes:
        return seal(put(good, at, replacement))

    def entries(text: str, payload: bytes = VALUE, count: int = 1) -> bytes:
        return build(raw_entry + bytes.fromhex(text) + payload, 1, count)

    def with_table(**fields: int) -> bytes:
        return build(table(**fields) + ENTRY + VALUE)

    def marker(body: bytes, table_length: int = 0, frame_count: int = 0) -> bytes:
        return build(body, table_length, frame_count, spec.NON_FINITE_FLAG)

    cases = {
        "corrupt_payload": {
            "table-entry-repeated": build(raw_entry * 2 + ENTRY + VALUE, 2),
            "index-beyond-table": entries("01 01 04"),
            "frames-but-no-table": build(ENTRY + VALUE, 0),
            "n-not-shortest": entries("00 8100 04"),
            "length-not-shortest": entries("00 01 848000"),
            "zero-not-shortest": entries("00 8000 00", b""),
            "leb128-of-11-bytes": entries("00" + "80" * 10 + "01 04"),
            "leb128-beyond-64-bits": entries("00" + "ff" * 9 + "02 04"),
            "leb128-cut": entries("00 8181", b""),
            "length-wrong-for-n": entries("00 02 04"),
            "no-payload-for-n": entries("00 01 00", b""),
            "3lc-n-2-40": build(
                table(three_lc.NUMBER, 0, ternary.ZRE)
                + bytes.fromhex("00 808080808020 05 0000803f ff")
            ),
            "marker-cut": marker(REPORT[:-1]),
            "marker-without-report": marker(b""),
            "marker-and-more": marker(REPORT + b"\0"),
            "marker-with-table": marker(raw_entry * 2, 1),
            "marker-with-frames": marker(bytes(16), 0, 1),
        },
        "truncated": {
            "empty": b"",
            "header-cut": good[:31],
            "payload-cut": entries("00 01 04", VALUE[:3]),
            "no-payload": entries("00 01 04", b""),
            "table-cut": build(raw_entry[:7], 1, 0),
            "table-missing": build(b"", 255, 0),
            "entries-missing": build(raw_entry),
            "second-entry-missing": entries("00 01 04", VALUE[:2], 2),
            "second-entry-cut": entries("00 8080 01 8001", b"", 2),
            "frames-2-32-minus-1": entries("00 01 04", VALUE, 2**32 - 1),
            "length-2-32": entries("00 01 8080808010"),
            "length-2-64-minus-1": entries("00 01" + "ff" * 9 + "01"),
        },
        "bad_magic": {
            "bad-magic": edited(0, b"PG"),
            "magic-of-a-frame": edited(0, b"GW"),
        },
        "unsupported_version": {"version-0": edited(2, b"\x00"), "version-2": edited(2, b"\x02")},
        "reserved_bits": {
            **{f"flag-{bit}": edited(3, bytes([1 << bit])) for bit in range(1, 8)},
            "direction-2": edited(4, b"\x02"),
            "direction-255": edited(4, b"\xff"),
            "raw-param-a": with_table(a=4),
            "raw-param-b": with_table(b=5),
            "3lc-coder-3": with_table(codec=three_lc.NUMBER, a=3),
            "3lc-bucket-7": with_table(codec=three_lc.NUMBER, b=7),
        },
        "checksum_mismatch": {
            "checksum": put(good, 28, bytes([good[28] ^ 0x10])),
            "checksum-of-step": put(good, 8, b"\x08"),
            "checksum-of-payload": put(good, len(good) - 1, b"\x3e"),
            "cut-and-not-sealed": good[:-1],
            "longer-and-not-sealed": good + b"\x00",
        },
        "trailing_bytes": {
            "one-byte-more": build(raw_entry + ENTRY + VALUE + b"\0"),
            "only-a-byte": build(b"\0", 0, 0),
        },
        "unknown_codec": {"codec-0": with_table(codec=0), "codec-200": with_table(codec=200)},
        "unsupported_dtype": {"dtype-1": with_table(dtype=1)},
        "limit_exceeded": {
            "n-beyond-2-40": entries("00 818080808020 04"),
            "n-2-64-minus-1": entries("00" + "ff" * 9 + "01 04"),
        },
    }
    return {name: (status, data) for status, group in cases.items() for name, data in group.items()}
