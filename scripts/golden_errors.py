"""Broken frames and packets for tests/golden/errors, each with the status that refuses it."""

from __future__ import annotations

import math
import struct

import common
import reference as spec
import reference_encoder as encoder
from golden_frames import FULL_CHUNK, inceptionn, qsgd, scales, three_lc, two_chunks
from payloads import ternary
from payloads.bf16 import NUMBER as BF16
from payloads.fp16 import NUMBER as FP16
from payloads.inceptionn import NUMBER as INCEPTIONN
from payloads.int8 import NUMBER as INT8
from payloads.onebit import NUMBER as ONEBIT
from payloads.raw import NUMBER as RAW
from payloads.stoch3 import NUMBER as STOCH3
from payloads.terngrad import NUMBER as TERNGRAD
from payloads.three_lc import NUMBER as THREE_LC

NAN, INF = math.nan, math.inf


def put(data: bytes, at: int, replacement: bytes) -> bytes:
    return data[:at] + replacement + data[at + len(replacement) :]


def frame_errors() -> dict[str, tuple[str, bytes]]:
    """name -> (status, bytes). In each the checksum is right where it is not what is wrong."""
    good = encoder.encode_frame(common.to_bytes([1.0, -2.0, 0.5]), "raw")
    small = three_lc(12, scales(1.5) + bytes([121, 0, 130]))

    def edited(frame: bytes, at: int, replacement: bytes) -> bytes:
        frame = put(frame, at, replacement)
        return put(frame, 20, struct.pack("<I", spec.checksum(frame[:20], frame[24:])))

    def raw(n: int, payload: bytes = bytes(8)) -> bytes:
        return encoder.seal_frame(RAW, 0, 0, n, payload)

    corrupt = {
        "raw-n-too-large": raw(3),
        "raw-n-too-small": raw(1),
        "raw-n-2-32": raw(2**32),
        "raw-n-wraps": raw(2**30 + 2),
        "bf16-odd-payload": encoder.seal_frame(BF16, 0, 0, 1, bytes(3)),
        "bf16-n-2-31": encoder.seal_frame(BF16, 0, 0, 2**31, bytes(2)),
        "marker-with-payload": encoder.seal_frame(RAW, 0, 0, 2, bytes(8), 1),
        "qsgd-no-values-but-payload": qsgd(0, scales(1.0)),
        "qsgd-unit-cut": qsgd(2, scales(1.0)[:3]),
        "qsgd-unit-negative": qsgd(2, scales(-1.0) + b"\x77"),
        "qsgd-unit-nan": qsgd(2, scales(NAN) + b"\x77"),
        "qsgd-unit-times-levels-overflows": qsgd(2, scales(math.ldexp(1.0, 126)) + b"\x77"),
        "qsgd-units-all-zero": qsgd(2, scales(0.0) + b"\x77"),
        "qsgd-level-above-s": qsgd(2, scales(1.0) + b"\x7f"),
        "qsgd-padding": qsgd(1, scales(1.0) + b"\x17"),
        "qsgd-too-long": qsgd(2, scales(1.0) + b"\x77\x00"),
        "qsgd-elias-level-above-s": qsgd(1, scales(1.0) + b"\x20", 1, s=1),
        "qsgd-elias-no-end": qsgd(9, scales(1.0) + b"\xfc", 1),
        "qsgd-elias-beyond-the-end": qsgd(3, scales(1.0) + b"\xaa", 1),
        "qsgd-elias-padding": qsgd(1, scales(1.0) + b"\x81", 1),
        "qsgd-elias-byte-behind": qsgd(1, scales(1.0) + b"\x80\x00", 1),
        "qsgd-elias-huge-number": qsgd(40960, scales(*[1.0] * 80) + b"\xff" * 8, 1),
        "qsgd-dense-cut": qsgd(3, scales(1.0) + b"\xa1", 2),
        "qsgd-dense-level-above-s": qsgd(1, scales(1.0) + b"\xc0", 2, s=1),
        "qsgd-dense-padding": qsgd(1, scales(1.0) + b"\x40", 2),
        "qsgd-sizes-too-small": qsgd(
            40961, scales(*[1.0] * 81) + struct.pack("<HH", 3, 0) + bytes(6), 1
        ),
        "fp16-too-short": encoder.seal_frame(FP16, 0, 0, 2, bytes(3)),
        **{
            f"int8-{name}": encoder.seal_frame(INT8, 0, bucket, n, payload)
            for name, bucket, n, payload in (
                ("no-values-but-payload", 0, 0, scales(1.0)),
                ("too-short", 0, 3, scales(1.0) + b"\x01\x02"),
                ("too-long", 0, 1, scales(1.0) + b"\x01\x02"),
                ("one-unit-missing", 2, 3, scales(1.0) + b"\x01\x02\x03"),
                ("n-2-40", 0, 2**40, scales(1.0) + b"\x01"),
                ("level-128", 0, 1, scales(1.0) + b"\x80"),
                ("unit-negative", 0, 1, scales(-1.0) + b"\x01"),
                ("unit-too-large", 0, 1, bytes.fromhex("0402017c 01")),
                ("units-zero", 0, 1, scales(0.0) + b"\x01"),
            )
        },
        **{
            f"onebit-{name}": encoder.seal_frame(ONEBIT, 0, 0, n, payload)
            for name, n, payload in (
                ("too-short", 9, scales(1.0, -1.0) + b"\x01"),
                ("padding", 7, scales(1.0, -1.0) + b"\x80"),
                ("first-mean-negative", 1, scales(-1.0, -1.0) + b"\x00"),
                ("first-mean-minus-zero", 1, scales(-0.0, -1.0) + b"\x00"),
                ("second-mean-positive", 1, scales(1.0, 1.0) + b"\x00"),
                ("second-mean-minus-zero", 1, scales(1.0, -0.0) + b"\x00"),
                ("mean-infinite", 1, scales(1.0, -INF) + b"\x00"),
                ("mean-nan", 1, scales(NAN, -1.0) + b"\x00"),
                ("means-zero", 1, scales(0.0, 0.0) + b"\x00"),
            )
        },
        **{
            f"terngrad-{name}": encoder.seal_frame(TERNGRAD, coder, 0, n, payload)
            for name, coder, n, payload in (
                ("code-3", ternary.TWO_BIT, 4, scales(1.0) + b"\x0c"),
                ("padding", ternary.TWO_BIT, 3, scales(1.0) + b"\x40"),
                ("two-bits-too-long", ternary.TWO_BIT, 4, scales(1.0) + b"\x00\x00"),
                ("two-bits-too-short", ternary.TWO_BIT, 5, scales(1.0) + b"\x00"),
                ("five-byte-243", ternary.NONE, 5, scales(1.0) + b"\xf3"),
                ("scale-nan", ternary.TWO_BIT, 4, scales(NAN) + b"\x01"),
            )
        },
        "stoch3-run-overruns": encoder.seal_frame(STOCH3, ternary.ZRE, 0, 5, scales(1.0) + b"\xff"),
        "3lc-no-values-but-payload": three_lc(0, scales(1.0)),
        "3lc-scale-cut": three_lc(5, scales(1.0)[:3]),
        "3lc-scale-alone": three_lc(5, scales(1.0)),
        "3lc-scale-negative": three_lc(5, scales(-1.0) + b"\x79"),
        "3lc-scale-minus-zero": three_lc(10, scales(1.0, -0.0) + b"\x00\x79", bucket=5),
        "3lc-scale-infinite": three_lc(5, scales(INF) + b"\x79"),
        "3lc-scale-nan": three_lc(5, scales(NAN) + b"\x79"),
        "3lc-scales-all-zero": three_lc(10, scales(0.0, 0.0) + b"\x79\x79", bucket=5),
        "3lc-buckets-than-scales": three_lc(15, scales(1.0, 1.0) + b"\x79\x79\x79", bucket=5),
        "3lc-none-too-long": three_lc(5, scales(1.0) + b"\x79\x79", ternary.NONE),
        "3lc-none-too-short": three_lc(6, scales(1.0) + b"\x79", ternary.NONE),
        "3lc-none-byte-243": three_lc(5, scales(1.0) + b"\xf3", ternary.NONE),
        "3lc-none-byte-255": three_lc(10, scales(1.0) + b"\x00\xff", ternary.NONE),
        "3lc-none-padding": three_lc(4, scales(1.0) + bytes([122]), ternary.NONE),
        "3lc-padding": three_lc(4, scales(1.0) + bytes([120])),
        "3lc-padding-of-one": three_lc(1, scales(1.0) + bytes([2 * 81 + 27 + 9 + 3 + 2])),
        "3lc-codes-too-few": three_lc(11, scales(1.0) + b"\x79\x00"),
        "3lc-codes-too-many": three_lc(10, scales(1.0) + b"\x79\x00\x79"),
        "3lc-run-overruns": three_lc(10, scales(1.0) + b"\x79\xf3"),
        "3lc-run-overruns-at-once": three_lc(5, scales(1.0) + b"\xff"),
        "3lc-n-2-40": three_lc(2**40, scales(1.0) + b"\xff"),
        "3lc-n-2-40-buckets": three_lc(2**40, scales(1.0) + b"\xff", bucket=5),
        "3lc-n-2-32": three_lc(2**32 + 5, scales(1.0) + b"\x79"),
        "3lc-sizes-cut": three_lc(40961, scales(1.0) + b"\x01\x00\x01"),
        "3lc-size-of-zero": three_lc(40961, two_chunks(FULL_CHUNK + b"\x79", b"")),
        "3lc-first-size-of-zero": three_lc(40961, two_chunks(b"", FULL_CHUNK + b"\x79")),
        "3lc-size-beyond-8192": three_lc(
            2 * 40960, two_chunks(b"\x79" * 8193, FULL_CHUNK[1:] + b"\x79" * 13)
        ),
        "3lc-sizes-beyond-payload": three_lc(
            40961, scales(1.0) + b"\xff\xff\x01\x00" + FULL_CHUNK + b"\x79"
        ),
        "3lc-bytes-after-last-chunk": three_lc(40961, two_chunks(FULL_CHUNK, b"\x79") + b"\x79"),
        "3lc-run-across-chunks": three_lc(40965, two_chunks(b"\xff" * 586, b"\x00")),
        "3lc-chunk-too-short": three_lc(40970, two_chunks(FULL_CHUNK[:-1], b"\x00\x00\x79\x79")),
        "3lc-rice-padding": three_lc(100, scales(1.0) + b"\x10\x83", ternary.RICE),
        "3lc-rice-byte-of-padding": three_lc(100, scales(1.0) + b"\x10\x03\x00", ternary.RICE),
        "3lc-rice-k-alone": three_lc(100, scales(1.0) + b"\x0c", ternary.RICE),
        "3lc-rice-code-cut": three_lc(100, scales(1.0) + b"\xe6", ternary.RICE),
        "3lc-rice-escape-cut": three_lc(100, scales(1.0) + b"\x0f\x00\x00", ternary.RICE),
        "3lc-rice-behind-the-end": three_lc(99, scales(1.0) + b"\xe6\x11", ternary.RICE),
        "3lc-rice-too-long": three_lc(10, scales(1.0) + b"\x79\x79\x79", ternary.RICE),
        "3lc-rice-chunk-too-long": three_lc(40970, two_chunks(b"", b"\x79\x79\x79"), ternary.RICE),
        "3lc-rice-packed-byte-243": three_lc(5, scales(1.0) + b"\xf3", ternary.RICE),
        "3lc-rice-packed-padding": three_lc(4, scales(1.0) + b"\x7a", ternary.RICE),
        "3lc-padding-second-chunk": three_lc(40961, two_chunks(FULL_CHUNK, b"\x7a")),
        "inceptionn-no-values-but-payload": inceptionn(0, bytes(2)),
        "inceptionn-too-short": inceptionn(9, bytes(3)),
        "inceptionn-too-long": inceptionn(1, b"\x03\x00" + bytes(5)),
        "inceptionn-n-2-40": inceptionn(2**40, bytes(100)),
        "inceptionn-n-2-32": inceptionn(2**32 + 8, bytes(2)),
        "inceptionn-tags-cut": inceptionn(9, b"\x02\x00" + bytes(2)),
        "inceptionn-code-cut": inceptionn(2, b"\x0e\x00" + bytes(5)),
        "inceptionn-codes-missing": inceptionn(8, b"\xff\xff"),
        "inceptionn-byte-behind": inceptionn(2, b"\x05\x00" + bytes(3)),
        "inceptionn-absent-value": inceptionn(3, b"\x40\x00" + bytes(1)),
        "inceptionn-absent-last-value": inceptionn(7, b"\x00\xc0" + bytes(4)),
        "inceptionn-sizes-cut": inceptionn(40961, bytes(7)),
        "inceptionn-size-of-zero": inceptionn(40961, struct.pack("<II", 0, 10242) + bytes(10242)),
        "inceptionn-byte-from-next": inceptionn(40961, struct.pack("<II", 10241, 1) + bytes(10242)),
    }
    cases = {name: ("corrupt_payload", data) for name, data in corrupt.items()}
    cases |= {
        "empty": ("truncated", b""),
        "one-byte": ("truncated", good[:1]),
        "header-cut": ("truncated", good[:31]),
        "payload-missing": ("truncated", good[:32]),
        "payload-cut": ("truncated", good[:-1]),
        "length-2-32": ("truncated", edited(good, 24, struct.pack("<Q", 2**32 + 12))),
        "length-2-63": ("truncated", edited(good, 24, struct.pack("<Q", 2**63))),
        "length-2-64-minus-1": ("truncated", edited(good, 24, b"\xff" * 8)),
        "length-wraps-to-0": ("truncated", edited(good, 24, struct.pack("<Q", 2**64 - 32))),
        "short-and-bad-magic": ("truncated", b"XX"),
        "bad-magic": ("bad_magic", edited(good, 0, b"WG")),
        "magic-of-a-packet": ("bad_magic", edited(good, 0, b"GP")),
        "version-0": ("unsupported_version", edited(good, 2, b"\x00")),
        "version-2": ("unsupported_version", edited(good, 2, b"\x02")),
        **{
            f"flag-{bit}": ("reserved_bits", edited(good, 5, bytes([1 << bit])))
            for bit in range(1, 8)
        },
        "codec-0": ("unknown_codec", edited(good, 3, b"\x00")),
        "codec-255": ("unknown_codec", edited(good, 3, b"\xff")),
        "dtype-3": ("unsupported_dtype", edited(good, 4, b"\x03")),
        "n-beyond-2-40": ("limit_exceeded", raw(2**40 + 1)),
        "n-2-63": ("limit_exceeded", raw(2**63)),
        "n-2-64-minus-1": ("limit_exceeded", raw(2**64 - 1)),
        "n-times-4-wraps": ("limit_exceeded", raw(2**62 + 2)),
        "one-byte-more": ("trailing_bytes", good + b"\x00"),
        "a-frame-behind": ("trailing_bytes", good + good),
        "checksum": ("checksum_mismatch", put(good, 20, bytes([good[20] ^ 1]))),
        "checksum-of-payload": ("checksum_mismatch", put(good, 35, bytes([good[35] ^ 0x80]))),
        "checksum-of-n": ("checksum_mismatch", put(good, 8, b"\x04")),
        "fp16-param-a": ("reserved_bits", encoder.seal_frame(FP16, 1, 0, 1, bytes(2))),
        "int8-param-a": ("reserved_bits", encoder.seal_frame(INT8, 1, 0, 1, b"")),
        "onebit-param-a": ("reserved_bits", encoder.seal_frame(ONEBIT, 1, 0, 1, b"")),
        "onebit-bucket-4": ("reserved_bits", encoder.seal_frame(ONEBIT, 0, 4, 1, b"")),
        "terngrad-bucket-5": ("reserved_bits", encoder.seal_frame(TERNGRAD, 0, 5, 1, b"")),
        "stoch3-coder-3": ("reserved_bits", encoder.seal_frame(STOCH3, 3, 0, 1, b"")),
        "stoch3-bucket-5": ("reserved_bits", encoder.seal_frame(STOCH3, 0, 5, 1, b"")),
        "raw-param-a": ("reserved_bits", edited(good, 6, b"\x00\x80")),
        "raw-param-b": ("reserved_bits", edited(good, 16, b"\x05\x00\x00\x00")),
        "3lc-coder-3": ("reserved_bits", edited(small, 6, b"\x03")),
        "3lc-bucket-4": ("reserved_bits", edited(small, 16, b"\x04\x00\x00\x00")),
        "3lc-bucket-2-32-minus-2": ("reserved_bits", edited(small, 16, b"\xfe\xff\xff\xff")),
        **{
            f"inceptionn-param-a-{a}": ("reserved_bits", inceptionn(1, bytes(2), a))
            for a in (3, 7, 8, 16, 0x8000)
        },
        "inceptionn-param-b": (
            "reserved_bits",
            encoder.seal_frame(INCEPTIONN, 0, 1, 1, bytes(2)),
        ),
        # Two faults: the one that is checked first is named.
        "magic-before-version": ("bad_magic", put(good, 0, b"\0\0\x07")),
        "version-before-flags": ("unsupported_version", put(put(good, 2, b"\x07"), 5, b"\xff")),
        "flags-before-codec": ("reserved_bits", put(put(good, 3, b"\x63"), 5, b"\x80")),
        "codec-before-dtype": ("unknown_codec", put(good, 3, b"\x63\x09")),
        "dtype-before-n": ("unsupported_dtype", put(raw(2**50), 4, b"\x09")),
        "n-before-length": ("limit_exceeded", raw(2**50) + b"\x00"),
        "length-before-checksum": ("truncated", put(good, 20, b"\0\0\0\0")[:-1]),
        "checksum-before-parameters": ("checksum_mismatch", put(good, 6, b"\x01")),
        "parameters-before-payload": (
            "reserved_bits",
            encoder.seal_frame(THREE_LC, 3, 0, 5, b"\x00", spec.NON_FINITE_FLAG),
        ),
    }
    return cases


def packet_errors() -> dict[str, tuple[str, bytes]]:
    """name -> (status, bytes). In each the checksum is right where it is not what is wrong."""
    header = spec.Packet(spec.PUSH, 1, 7, 99, ())
    raw_entry = struct.pack("<BBHI", RAW, 0, 0, 0)
    three_lc_entry = struct.pack("<BBHI", THREE_LC, 0, ternary.ZRE, 0)
    value = bytes.fromhex("0000803f")

    def edited(packet: bytes, at: int, replacement: bytes) -> bytes:
        packet = put(packet, at, replacement)
        return put(packet, 28, struct.pack("<I", spec.checksum(packet[:28], packet[32:])))

    def packet(body: bytes, table_length: int = 1, frame_count: int = 1, flags: int = 0) -> bytes:
        sealed = encoder.seal_packet(header, flags, table_length, body)
        return edited(sealed, 24, struct.pack("<I", frame_count))

    def entry(codec: int = 1, dtype: int = 0, param_a: int = 0, param_b: int = 0) -> bytes:
        body = struct.pack("<BBHI", codec, dtype, param_a, param_b) + b"\x00\x01\x04" + value
        return packet(body)

    good = packet(raw_entry + b"\x00\x01\x04" + value)
    marker = packet(struct.pack("<IIQ", 1, 2, 3), 0, 0, spec.NON_FINITE_FLAG)
    spec.parse_packet(good)
    spec.parse_packet(marker)

    corrupt = {
        "table-entry-repeated": packet(raw_entry * 2 + b"\x00\x01\x04" + value, 2),
        "index-beyond-table": packet(raw_entry + b"\x01\x01\x04" + value),
        "frames-but-no-table": packet(b"\x00\x01\x04" + value, 0),
        "n-not-shortest": packet(raw_entry + b"\x00\x81\x00\x04" + value),
        "length-not-shortest": packet(raw_entry + b"\x00\x01\x84\x80\x00" + value),
        "zero-not-shortest": packet(raw_entry + b"\x00\x80\x00\x00"),
        "leb128-of-11-bytes": packet(raw_entry + b"\x00" + b"\x80" * 10 + b"\x01\x04" + value),
        "leb128-beyond-64-bits": packet(raw_entry + b"\x00" + b"\xff" * 9 + b"\x02\x04" + value),
        "leb128-cut": packet(raw_entry + b"\x00\x81\x81"),
        "length-wrong-for-n": packet(raw_entry + b"\x00\x02\x04" + value),
        "no-payload-for-n": packet(raw_entry + b"\x00\x01\x00"),
        "3lc-n-2-40": packet(
            three_lc_entry + b"\x00\x80\x80\x80\x80\x80\x20\x05" + value + b"\xff"
        ),
        "marker-cut": packet(struct.pack("<IIQ", 1, 2, 3)[:-1], 0, 0, spec.NON_FINITE_FLAG),
        "marker-without-report": packet(b"", 0, 0, spec.NON_FINITE_FLAG),
        "marker-and-more": packet(struct.pack("<IIQ", 1, 2, 3) + b"\0", 0, 0, spec.NON_FINITE_FLAG),
        "marker-with-table": packet(raw_entry * 2, 1, 0, spec.NON_FINITE_FLAG),
        "marker-with-frames": packet(bytes(16), 0, 1, spec.NON_FINITE_FLAG),
    }
    return {name: ("corrupt_payload", data) for name, data in corrupt.items()} | {
        "empty": ("truncated", b""),
        "header-cut": ("truncated", good[:31]),
        "payload-cut": ("truncated", packet(raw_entry + b"\x00\x01\x04" + value[:3])),
        "no-payload": ("truncated", packet(raw_entry + b"\x00\x01\x04")),
        "table-cut": ("truncated", packet(raw_entry[:7], 1, 0)),
        "table-missing": ("truncated", packet(b"", 255, 0)),
        "entries-missing": ("truncated", packet(raw_entry)),
        "second-entry-missing": (
            "truncated",
            packet(raw_entry + b"\x00\x01\x04" + value[:2], 1, 2),
        ),
        "second-entry-cut": (
            "truncated",
            packet(raw_entry + b"\x00\x80\x80\x01\x80\x01", 1, 2),
        ),
        "frames-2-32-minus-1": (
            "truncated",
            packet(raw_entry + b"\x00\x01\x04" + value, 1, 2**32 - 1),
        ),
        "length-2-32": ("truncated", packet(raw_entry + b"\x00\x01\x80\x80\x80\x80\x10" + value)),
        "length-2-64-minus-1": (
            "truncated",
            packet(raw_entry + b"\x00\x01" + b"\xff" * 9 + b"\x01" + value),
        ),
        "bad-magic": ("bad_magic", edited(good, 0, b"PG")),
        "magic-of-a-frame": ("bad_magic", edited(good, 0, b"GW")),
        "version-0": ("unsupported_version", edited(good, 2, b"\x00")),
        "version-2": ("unsupported_version", edited(good, 2, b"\x02")),
        **{
            f"flag-{bit}": ("reserved_bits", edited(good, 3, bytes([1 << bit])))
            for bit in range(1, 8)
        },
        "kind-2": ("reserved_bits", edited(good, 4, b"\x02")),
        "kind-255": ("reserved_bits", edited(good, 4, b"\xff")),
        "checksum": ("checksum_mismatch", put(good, 28, bytes([good[28] ^ 0x10]))),
        "checksum-of-step": ("checksum_mismatch", put(good, 8, b"\x08")),
        "checksum-of-payload": ("checksum_mismatch", put(good, len(good) - 1, b"\x3e")),
        "cut-and-not-sealed": ("checksum_mismatch", good[:-1]),
        "longer-and-not-sealed": ("checksum_mismatch", good + b"\x00"),
        "one-byte-more": ("trailing_bytes", packet(raw_entry + b"\x00\x01\x04" + value + b"\0")),
        "only-a-byte": ("trailing_bytes", packet(b"\0", 0, 0)),
        "codec-0": ("unknown_codec", entry(codec=0)),
        "codec-200": ("unknown_codec", entry(codec=200)),
        "dtype-1": ("unsupported_dtype", entry(dtype=1)),
        "raw-param-a": ("reserved_bits", entry(param_a=4)),
        "raw-param-b": ("reserved_bits", entry(param_b=5)),
        "3lc-coder-3": ("reserved_bits", entry(codec=THREE_LC, param_a=3)),
        "3lc-bucket-7": ("reserved_bits", entry(codec=THREE_LC, param_b=7)),
        "n-beyond-2-40": (
            "limit_exceeded",
            packet(raw_entry + b"\x00\x81\x80\x80\x80\x80\x20\x04" + value),
        ),
        "n-2-64-minus-1": (
            "limit_exceeded",
            packet(raw_entry + b"\x00" + b"\xff" * 9 + b"\x01\x04" + value),
        ),
    }
