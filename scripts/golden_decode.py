"""What tests/golden/decode holds: frames and packets, some of them such as no encoder makes."""

from __future__ import annotations

import common
import payloads
import reference as spec
import reference_encoder as encoder
from golden_encode import INPUTS, MAX, TINY, gradient, take
from golden_frames import (
    FULL_CHUNK,
    SIGNALLING_NAN,
    inceptionn,
    qsgd,
    scales,
    three_lc,
    two_chunks,
)
from payloads import ternary
from payloads.bf16 import NUMBER as BF16
from payloads.fp16 import NUMBER as FP16
from payloads.int8 import NUMBER as INT8
from payloads.onebit import NUMBER as ONEBIT
from payloads.raw import NUMBER as RAW
from payloads.stoch3 import NUMBER as STOCH3
from payloads.terngrad import NUMBER as TERNGRAD
from payloads.three_lc import NUMBER as THREE_LC


def decode_frames() -> dict[str, bytes]:
    gradients = common.to_bytes(gradient(20, 39))
    spike = take(common.to_bytes(INPUTS["spike"]), 40961)
    markers = {
        f"marker-{codec.NAME}": encoder.seal_frame(
            number, *codec.parameters(codec.read({})), 3, b"", spec.NON_FINITE_FLAG
        )
        for number, codec in payloads.CODECS.items()
    }
    return {
        "raw": encoder.encode_frame(gradients, "raw"),
        "raw-any-bits": encoder.seal_frame(
            RAW, 0, 0, 3, SIGNALLING_NAN + bytes.fromhex("00000080000080ff")
        ),
        "bf16": encoder.encode_frame(gradients, "bf16"),
        "bf16-any-bits": encoder.seal_frame(BF16, 0, 0, 4, bytes.fromhex("817f 80ff 0080 0100")),
        "fp16-any-bits": encoder.seal_frame(
            FP16, 0, 0, 6, bytes.fromhex("017c 00fc 0080 0100 ff03 ff7b")
        ),
        "int8-nothing-sent": encoder.seal_frame(INT8, 0, 2, 7, b""),
        "int8-every-level": encoder.seal_frame(
            INT8, 0, 0, 255, scales(0.1) + bytes(q & 0xFF for q in range(-127, 128))
        ),
        "int8-a-unit-of-zero": encoder.seal_frame(INT8, 0, 1, 2, scales(0.0, 4.0) + b"\x7f\x81"),
        "int8-largest-unit": encoder.seal_frame(INT8, 0, 0, 2, bytes.fromhex("0302017c 7f81")),
        "onebit-nothing-sent": encoder.seal_frame(ONEBIT, 0, 0, 7, b""),
        "onebit-one-sign": encoder.seal_frame(ONEBIT, 0, 0, 9, scales(0.0, -2.0) + b"\xff\x00"),
        "terngrad-every-code": encoder.seal_frame(
            TERNGRAD, ternary.TWO_BIT, 0, 7, scales(0.25) + bytes.fromhex("24 12")
        ),
        "terngrad-coder-none": encoder.seal_frame(
            TERNGRAD, ternary.NONE, 320, 4, scales(2.0) + bytes([100])
        ),
        "terngrad-told-clip-is-ignored": encoder.seal_frame(
            TERNGRAD, ternary.TWO_BIT | 16383 << 2, 0, 4, scales(2.0) + b"\x21"
        ),
        "stoch3-zre": encoder.seal_frame(STOCH3, ternary.ZRE, 0, 12, scales(2.0) + b"\xf3\xca"),
        "3lc": encoder.encode_frame(gradients, "3lc"),
        "3lc-bucket": encoder.encode_frame(gradients, "3lc:s=1.5,bucket=10"),
        "3lc-none": encoder.encode_frame(gradients, "3lc:s=1.5,coder=none"),
        "3lc-two-chunks": encoder.encode_frame(spike, "3lc"),
        "3lc-no-values": three_lc(0, b""),
        "3lc-nothing-sent": three_lc(7, b""),
        "3lc-nothing-sent-buckets": three_lc(7, b"", bucket=5),
        "3lc-every-code": three_lc(5 * (243 + sum(range(2, 15))), scales(0.25) + bytes(range(256))),
        "3lc-lone-zero-bytes": three_lc(20, scales(2.0) + bytes([121, 121, 121, 0])),
        "3lc-short-runs-first": three_lc(5 * 18, scales(2.0) + bytes([243, 255, 121, 242])),
        "3lc-run-split": three_lc(5 * 16, scales(2.0) + bytes([244, 121, 252, 121])),
        "3lc-two-chunks-not-greedy": three_lc(
            40966, two_chunks(FULL_CHUNK[::-1], bytes([121, 121]))
        ),
        "3lc-only-zeros-but-scale": three_lc(5, scales(3.0) + bytes([121])),
        "3lc-rice": encoder.encode_frame(gradients, "3lc:coder=rice"),
        "3lc-rice-no-bytes": three_lc(100, scales(3.0), ternary.RICE),
        "3lc-rice-two-chunks-no-bytes": three_lc(40966, two_chunks(b"", b""), ternary.RICE),
        "3lc-rice-packed": three_lc(10, scales(3.0) + bytes([242, 121]), ternary.RICE),
        "3lc-rice-escape-not-needed": three_lc(
            100, scales(3.0) + bytes.fromhex("0f801100"), ternary.RICE
        ),
        "3lc-rice-a-worse-k": three_lc(100, scales(3.0) + bytes.fromhex("170a"), ternary.RICE),
        "3lc-a-scale-of-zero": three_lc(10, scales(0.0, 4.0) + bytes([121, 0]), bucket=5),
        "3lc-trits-times-zero": three_lc(10, scales(0.0, 4.0) + bytes([0, 242]), bucket=5),
        "3lc-smallest-scale": three_lc(5, scales(TINY) + bytes([6])),
        "3lc-largest-scale": three_lc(5, scales(MAX) + bytes([236])),
        "3lc-told-s-is-ignored": three_lc(5, scales(1.5) + bytes([100]), told=16383),
        "3lc-bucket-beyond-n": three_lc(6, scales(1.5) + bytes([100, 40]), bucket=0xFFFFFFFF),
        "inceptionn": encoder.encode_frame(gradients, "inceptionn"),
        "inceptionn-no-values": inceptionn(0, b""),
        "inceptionn-any-codes": inceptionn(
            10, bytes.fromhex("e5 f9 00 80 0080 01000080 ff ffff ffffff3f 0000807f 0500 ab cd")
        ),
        "inceptionn-longer-than-needed": inceptionn(1, bytes.fromhex("0300 0000003f")),
        "qsgd": encoder.encode_frame(gradients, "qsgd"),
        "qsgd-elias": encoder.encode_frame(gradients, "qsgd:levels=2,coder=elias"),
        "qsgd-elias-dense": encoder.encode_frame(gradients, "qsgd:bits=3,coder=elias-dense"),
        "qsgd-nothing-sent": qsgd(7, b""),
        "qsgd-unit-of-zero": qsgd(9, scales(0.0, 4.0) + b"\x02" + bytes(8), s=127, bucket=8),
        "qsgd-only-zeros-but-unit": qsgd(2, scales(1.0) + b"\x77"),
        "qsgd-largest-unit": qsgd(1, scales(MAX) + b"\x02", s=1),
        "qsgd-told-norm-is-ignored": qsgd(2, scales(1.0) + b"\x0e", told=1),
        **markers,
        "marker-no-values": encoder.seal_frame(THREE_LC, 1, 0, 0, b"", spec.NON_FINITE_FLAG),
    }


def packets() -> dict[str, spec.Packet]:
    texts = [("3lc:s=1.75", 39), ("raw", 3), ("3lc:s=1.75", 320), ("bf16", 5), ("3lc", 0)]
    frames = tuple(
        spec.parse_frame(encoder.encode_frame(common.to_bytes(gradient(30 + i, n)), codec))
        for i, (codec, n) in enumerate(texts)
    )
    marker = spec.Packet(spec.PULL, 2, 8, 1, (), spec.NonFiniteReport(3, 7, 2**32 + 5))
    return {
        "push": spec.Packet(spec.PUSH, 3, 1000, 0x0123456789ABCDEF, frames),
        "pull-no-frames": spec.Packet(spec.PULL, 65535, 2**64 - 1, 0, ()),
        "non-finite": marker,
    }
