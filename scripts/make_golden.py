"""Writes tests/golden/ anew, with spec/reference.py and spec/reference_encoder.py alone.

Run by hand when the format changes on purpose; look at the difference before you keep it. No test
runs it, and it asks the C++ code nothing: golden files are a second opinion, not a recording.
What the index means stands in tests/golden/README.md.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "spec"))

import common  # noqa: E402
import payloads  # noqa: E402
import reference as spec  # noqa: E402
import reference_encoder as encoder  # noqa: E402
from golden_errors import (  # noqa: E402
    FULL_CHUNK,
    SIGNALLING_NAN,
    frame_errors,
    inceptionn,
    packet_errors,
    qsgd,
    scales,
    three_lc,
    two_chunks,
)
from payloads import ternary  # noqa: E402
from payloads.bf16 import NUMBER as BF16  # noqa: E402
from payloads.fp16 import NUMBER as FP16  # noqa: E402
from payloads.int8 import NUMBER as INT8  # noqa: E402
from payloads.onebit import NUMBER as ONEBIT  # noqa: E402
from payloads.raw import NUMBER as RAW  # noqa: E402
from payloads.stoch3 import NUMBER as STOCH3  # noqa: E402
from payloads.terngrad import NUMBER as TERNGRAD  # noqa: E402
from payloads.three_lc import NUMBER as THREE_LC  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
NAN, INF, MAX = math.nan, math.inf, common.FLT_MAX
TINY = 2.0**-149  # the smallest denormal


def gradient(seed: int, count: int) -> list[float]:
    """Heavy-tailed values around zero, as gradients are."""
    draw = random.Random(seed)
    return [common.f32(draw.gauss(0, 1) ** 3 * 1e-3) for _ in range(count)]


def zero_runs() -> list[float]:
    """Ones, with 1, 2, ... 30 packed bytes of zeros between them."""
    return [value for run in range(1, 31) for value in [1.0] * 5 + [0.0] * (5 * run)]


def classes() -> list[float]:
    """Magnitudes from 2^-12 to below 4, with the first and last of each exponent."""
    draw = random.Random(2)
    parts = [
        1.0,
        1.0 + 2.0**-23,
        2.0 - 2.0**-23,
        1.5,
        1.125,
        1.875,
        *(draw.random() + 1 for _ in range(5)),
    ]
    values = [common.f32(part) * 2.0**e for e in range(-12, 2) for part in parts]
    values = [value * sign for value in values for sign in (1.0, -1.0)]
    draw.shuffle(values)
    return values


INPUTS: dict[str, list[float]] = {
    "gradient": gradient(1, 1021),
    "spike": [0.0] * 700 + [-2.0] + [0.0] * 320,
    "runs": zero_runs(),
    "classes": classes(),
    "zero": [0.0, -0.0, 0.0],
    "ties": [1.0, 0.5, -0.5, 0.50000006, -0.50000006, 0.49999997, -0.49999997, -1.0],
    "ties-175": [1.0, 0.875, -0.875, 0.87500006, -0.87500006, 0.87499994, 0.0, -0.0, 0.5, -1.0],
    "denormals": [TINY, -TINY, 0.0, 2 * TINY, 3 * TINY, -4 * TINY, 5 * TINY],
    "tiny": [TINY, -0.0, -TINY],
    "huge": [MAX, -MAX, MAX / 2, -MAX / 2, 0.75 * MAX, 1.0],
    "rounding": [1.00390625, 1.01171875, 1.00390637, -1.00390625, 3.3895314e38, 3.3961776e38, -MAX],
    "rounding-f16": [
        *(1.00048828125, 1.00146484375, 1.0004884004592896, -1.00048828125, 65504.0, 65519.996),
        *(65520.0, -65520.0, 2.0**-25, 2.0**-25 + 2.0**-48, 1.5 * 2.0**-24, -(2.0**-14), 6.1e-5),
    ],
    "equal": [common.f32(0.1)],
    "special": [NAN, INF, -INF, -0.0, TINY, MAX, 1.0],
    "nan": [1.0, NAN, 2.0],
    "infinity": [1.0, 2.0, -INF],
    "blocks": [0.0] * 5 + [1.0, -0.25] + [0.0] * 3 + [-0.0] * 5 + [-8.0],
}

MODES = ("paper", "strict")
# codec, input, number of values
PLAIN: list[tuple[str, str, int]] = [
    *(("raw", "gradient", n) for n in (0, 1, 39)),
    *(("bf16", "gradient", n) for n in (0, 1, 39, 320)),
    ("raw", "special", 8),
    ("bf16", "special", 8),
    ("bf16", "rounding", 7),
    *(("fp16", "gradient", n) for n in (0, 1, 39, 320)),
    ("fp16", "special", 8),
    ("fp16", "rounding-f16", 13),
    *((codec, "gradient", n) for codec in ("int8", "onebit") for n in (0, 1, 9, 320)),
    ("onebit", "gradient", 40961),
    ("int8:bucket=7", "gradient", 1021),
    ("int8:bucket=4294967295", "gradient", 39),
    ("onebit:bucket=8", "gradient", 1021),
    ("onebit:bucket=40968", "gradient", 81925),
    *((codec, "gradient", n) for codec in ("terngrad", "stoch3") for n in (0, 1, 9, 1021, 40961)),
    ("terngrad:clip=0", "gradient", 320),
    ("terngrad:clip=0.5,bucket=320", "gradient", 1021),
    ("terngrad:pack=trits5", "gradient", 1021),
    ("terngrad:pack=trits5,coder=zre", "gradient", 40961),
    ("terngrad:clip=1.5,pack=trits5,coder=rice,bucket=640", "gradient", 1021),
    ("terngrad", "equal", 1021),
    ("stoch3:bucket=320", "gradient", 1021),
    ("stoch3:coder=zre", "gradient", 40961),
    ("stoch3:coder=rice", "runs", 2475),
    *(
        (codec, source, n)
        for codec in ("int8", "onebit", "terngrad", "stoch3")
        for source, n in (("zero", 39), ("denormals", 7), ("tiny", 3), ("huge", 6), ("nan", 3))
    ),
    *(("topk", "gradient", n) for n in (0, 1, 39, 320, 40961)),
    ("topk:ratio=0.3,values=bf16", "gradient", 1021),
    *(("topk:ratio=0.1,index=rice", "gradient", n) for n in (1, 1021, 40961)),
    ("topk:ratio=0.9,values=bf16,index=rice", "gradient", 39),
    ("topk:ratio=0.0001", "spike", 81925),
    ("topk:ratio=0.9", "spike", 39),
    ("topk", "zero", 39),
    *(("stc", "gradient", n) for n in (0, 1, 39, 1021, 40961)),
    ("stc:density=0.3,coder=zre", "gradient", 320),
    ("stc:density=0.3,coder=none", "gradient", 39),
    ("stc", "spike", 1021),
    ("stc", "zero", 39),
    ("stc", "denormals", 7),
    ("stc", "huge", 6),
    ("stc", "nan", 3),
    ("topk", "blocks", 16),
    ("topk", "denormals", 7),
    ("topk", "huge", 6),
    ("topk", "nan", 3),
    *(("qsgd", "gradient", n) for n in (0, 1, 39, 40961)),
    *((f"qsgd:bits={bits}", "gradient", 1021) for bits in (2, 3, 5, 6, 7, 8)),
    ("qsgd:levels=9,bucket=8,norm=l2", "gradient", 320),
    ("qsgd:bits=3,bucket=12344,norm=l2,coder=elias", "gradient", 40961),
    *(("qsgd:bits=2,coder=elias", "gradient", n) for n in (1, 39, 40960, 81925)),
    *(("qsgd:coder=elias-dense", "gradient", n) for n in (1, 39, 40961)),
    ("qsgd:bits=8,coder=elias-dense", "gradient", 40961),
    *(
        (f"qsgd:bits=8,{keys}", source, n)
        for keys in ("coder=fixed", "coder=elias,norm=l2")
        for source, n in (("spike", 1021), ("zero", 39), ("denormals", 7), ("huge", 6), ("tiny", 3))
    ),
    ("qsgd:bits=6", "huge", 6),
    ("qsgd:bucket=8,coder=elias", "blocks", 16),
    ("qsgd", "nan", 3),
    *(("3lc:s=1.75", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40960, 40961, 81925)),
    *(("3lc:s=1.75,coder=none", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40961)),
    *((f"3lc{key}", "gradient", 320) for key in ("", ":coder=none", ":s=1.5", ":s=1.9")),
    *(("3lc:s=1.75,coder=rice", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40961)),
    *((f"3lc:coder=rice{key}", "gradient", 1021) for key in ("", ",bucket=5", ",bucket=320")),
    ("3lc:s=1.5,coder=rice,bucket=12345", "gradient", 40961),
    *(("3lc:coder=rice", source, n) for source, n in [("spike", 81925), ("runs", 2475)]),
    ("3lc:coder=rice", "ties", 8),
    ("3lc:s=1.9999999", "gradient", 1021),
    ("3lc:s=1.000030517578125", "gradient", 6),
    ("3lc:s=1.75,bucket=5", "gradient", 39),
    ("3lc:s=1.75,bucket=5,coder=none", "gradient", 39),
    ("3lc:bucket=320", "gradient", 1021),
    ("3lc:s=1.9,bucket=320", "gradient", 320),
    ("3lc:s=1.75,bucket=12345", "gradient", 81925),
    ("3lc:s=1.75,bucket=40960", "gradient", 40961),
    ("3lc:bucket=4294967295", "gradient", 39),
    ("3lc", "runs", 2475),
    ("3lc", "spike", 81925),
    ("3lc:bucket=320", "spike", 40961),
    ("3lc", "zero", 39),
    ("3lc:bucket=5", "zero", 39),
    ("3lc:bucket=5", "blocks", 16),
    ("3lc", "ties", 8),
    ("3lc:s=1.75", "ties-175", 10),
    *((f"3lc:s={s}", "denormals", 7) for s in ("1", "1.25", "1.75")),
    *((f"3lc:s={s}", "tiny", 3) for s in ("1", "1.25", "1.5", "1.75")),
    *((f"3lc:s={s}", "huge", 6) for s in ("1", "1.9")),
    ("3lc", "nan", 3),
    ("3lc:s=1.75,bucket=5,coder=none", "infinity", 39),
    *((f"inceptionn:bound={b},mode={m}", "classes", 308) for b in (10, 8, 6) for m in MODES),
    *(("inceptionn", "classes", n) for n in (0, 1, 7, 8, 9, 39)),
    ("inceptionn", "spike", 40961),
    ("inceptionn", "zero", 39),
    ("inceptionn:bound=6", "special", 7),
    ("inceptionn", "huge", 6),
]

# name, codec, input, residual before
FEEDBACK: list[tuple[str, str, list[float], list[float]]] = [
    ("first", "3lc:s=1.75", gradient(2, 320), [0.0] * 320),
    ("later", "3lc:s=1.75", gradient(3, 320), gradient(4, 320)),
    ("half", "3lc:s=1.75,residual=bf16", gradient(5, 320), gradient(6, 320)),
    ("bucket", "3lc:s=1.9,bucket=35,coder=none", gradient(7, 101), gradient(8, 101)),
    ("bucket-half", "3lc:bucket=35,residual=bf16", gradient(9, 101), gradient(10, 101)),
    ("rice", "3lc:s=1.9,coder=rice", gradient(15, 320), gradient(16, 320)),
    (
        "rice-bucket-half",
        "3lc:bucket=35,coder=rice,residual=bf16",
        gradient(17, 101),
        gradient(18, 101),
    ),
    ("bf16", "bf16:ef=on", gradient(11, 39), gradient(12, 39)),
    ("bf16-half", "bf16:ef=on,residual=bf16", gradient(13, 39), gradient(14, 39)),
    ("bf16-overflow", "bf16:ef=on", [MAX, 1.0], [0.0, 0.125]),
    ("cancelled", "3lc", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
    ("cancelled-bucket", "3lc:bucket=5", [1.0] * 5 + [3.0], [-1.0] * 5 + [0.5]),
    ("signed-zero", "3lc", [-0.0, -0.0, 0.0, 1.0], [-0.0, 0.0, -0.0, 0.0]),
    ("denormals", "3lc:s=1.25", [TINY, -TINY, 4 * TINY], [TINY, 3 * TINY, -TINY]),
    ("huge", "3lc:s=1.9", [0.75 * MAX, -MAX, 0.4 * MAX], [0.0, 0.0, 0.05 * MAX]),
    ("overflow", "3lc", [0.75 * MAX, 1.0], [0.5 * MAX, 0.25]),
    ("nan", "3lc:s=1.75", [1.0, NAN], [0.5, -0.25]),
    ("empty", "3lc", [], []),
    ("qsgd", "qsgd:bits=3,ef=on", gradient(21, 101), gradient(22, 101)),
    ("qsgd-half", "qsgd:coder=elias,ef=on,residual=bf16", gradient(23, 101), gradient(24, 101)),
    ("qsgd-cancelled", "qsgd:ef=on", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
    ("fp16", "fp16:ef=on", gradient(21, 39), gradient(22, 39)),
    ("fp16-overflow", "fp16:ef=on", [65504.0, 1.0], [16.0, 0.125]),
    ("int8", "int8", gradient(23, 101), gradient(24, 101)),
    ("int8-half", "int8:bucket=10,residual=bf16", gradient(25, 101), gradient(26, 101)),
    ("onebit", "onebit", gradient(27, 101), gradient(28, 101)),
    ("onebit-half", "onebit:bucket=16,residual=bf16", gradient(29, 101), gradient(40, 101)),
    ("terngrad", "terngrad:ef=on", gradient(41, 101), gradient(42, 101)),
    ("stoch3", "stoch3:ef=on,residual=bf16", gradient(43, 101), gradient(44, 101)),
    ("stc", "stc:density=0.2", gradient(50, 101), gradient(51, 101)),
    ("topk", "topk:ratio=0.2", gradient(15, 101), gradient(16, 101)),
    ("topk-overflow", "topk:values=bf16", [MAX, 1.0], [0.0, 0.125]),
    ("topk-half", "topk:ratio=0.2,values=bf16,residual=bf16", gradient(17, 101), gradient(18, 101)),
    ("inceptionn", "inceptionn:ef=on", classes(), gradient(19, 308)),
    (
        "inceptionn-half",
        "inceptionn:bound=8,mode=strict,ef=on,residual=bf16",
        gradient(20, 308),
        classes(),
    ),
    ("inceptionn-nan", "inceptionn:ef=on", [1.0, NAN], [0.5, -0.25]),
]


class Writer:
    """Writes files below tests/golden and gathers the index."""

    def __init__(self) -> None:
        self.index: dict[str, list[dict[str, Any]]] = {"encode": [], "decode": [], "errors": []}

    def file(self, name: str, data: bytes) -> str:
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return name

    def add(self, kind: str, **case: Any) -> None:
        names = [known["name"] for known in self.index[kind]]
        assert case["name"] not in names, case["name"]
        self.index[kind].append(case)


def take(values: bytes, n: int) -> bytes:
    """The first n values of a file that is repeated as often as needed."""
    return (values * (4 * n // len(values) + 1))[: 4 * n]


def file_name(text: str) -> str:
    return text.replace(":", "-").replace("=", "").replace(",", "-").replace(".", "_")


def write_encode(out: Writer) -> None:
    tensors = {name: common.to_bytes(values) for name, values in INPUTS.items()}
    tensors["special"] += SIGNALLING_NAN
    for name, tensor in tensors.items():
        out.file(f"encode/{name}.f32", tensor)
    for codec, source, n in PLAIN:
        name = f"{file_name(codec)}-{source}-{n}"
        out.add(
            "encode",
            name=name,
            codec=codec,
            n=n,
            input=f"encode/{source}.f32",
            frame=out.file(
                f"encode/{name}.frame", encoder.encode_frame(take(tensors[source], n), codec)
            ),
        )
    for title, codec, values, residual in FEEDBACK:
        name = f"feedback-{title}"
        before = common.to_bytes(residual)
        if "residual=bf16" in codec:
            before = common.widen_bf16(common.narrow_tensor(before))
        tensor = common.to_bytes(values)
        frame, after = encoder.encode_with_residual(tensor, codec, before)
        out.add(
            "encode",
            name=name,
            codec=codec,
            n=len(values),
            input=out.file(f"encode/{name}.f32", tensor),
            residual_in=out.file(f"encode/{name}.in.f32", before),
            residual_out=out.file(f"encode/{name}.out.f32", after),
            frame=out.file(f"encode/{name}.frame", frame),
        )


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


def write_decode(out: Writer) -> None:
    for name, frame in decode_frames().items():
        values = spec.decode_frame(frame)
        n = len(values) // 4
        out.add(
            "decode",
            name=name,
            frame=out.file(f"decode/{name}.frame", frame),
            n=n,
            values=out.file(f"decode/{name}.f32", values[: 4 * period(values)]),
        )
    for name, packet in packets().items():
        data = encoder.encode_packet(packet)
        assert spec.parse_packet(data) == packet
        report = vars(packet.report) if packet.report else None
        frames = [
            {
                "codec": payloads.CODECS[frame.codec].NAME,
                "n": frame.n,
                "payload_bytes": len(frame.payload),
                "values": out.file(f"decode/packet-{name}-{i}.f32", spec.decode(frame)),
            }
            for i, frame in enumerate(packet.frames)
        ]
        out.add(
            "decode",
            name=f"packet-{name}",
            packet=out.file(f"decode/{name}.packet", data),
            role=("push", "pull")[packet.kind],
            source=packet.source,
            step=packet.step,
            layout_digest=f"{packet.layout_digest:016x}",
            non_finite=report,
            frames=frames,
        )


def period(values: bytes) -> int:
    """The shortest start that gives all values when it is repeated; all of them for few."""
    n = len(values) // 4
    if n <= 2048:
        return n
    return next(p for p in range(1, n + 1) if take(values[: 4 * p], n) == values)


def status_of(form: str, data: bytes) -> str:
    try:
        if form == "frame":
            spec.decode_frame(data)
        else:
            spec.parse_packet(data)
    except common.FormatError as error:
        return error.status
    return "ok"


def write_errors(out: Writer) -> None:
    for form, cases in (("frame", frame_errors()), ("packet", packet_errors())):
        for name, (status, data) in cases.items():
            assert status_of(form, data) == status, (name, status_of(form, data))
            file = out.file(f"errors/{name}.{form}", data)
            out.add("errors", name=f"{form}-{name}", **{form: file}, status=status)


def main() -> None:
    for folder in ("encode", "decode", "errors"):
        shutil.rmtree(GOLDEN / folder, ignore_errors=True)
    out = Writer()
    write_encode(out)
    write_decode(out)
    write_errors(out)
    out.file("index.json", (json.dumps(out.index, indent=1) + "\n").encode())
    counts = ", ".join(f"{len(cases)} {kind}" for kind, cases in out.index.items())
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{counts}, {size} bytes")


if __name__ == "__main__":
    main()
