import math

from common import to_bytes
from golden_cases.inputs import GRADIENTS, MAX, NAN, builder, gradient, scales, sizes
from payloads.qsgd import DENSE, FIXED, NUMBER, SPARSE
from reference_encoder import encode_frame

seal = builder(NUMBER)


def frame(n: int, payload: bytes, coder: int = FIXED, s: int = 7, informative: int = 0) -> bytes:
    """512 values share a unit; `informative` is the encoder's norm."""
    return seal(n, payload, s & 127 | coder << 7 | informative << 9 | s >> 7 << 10, 512)


ENCODE = [
    ("qsgd", "gradient", 40961),
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
    *((f"qsgd:levels={s}", "gradient", 321) for s in (128, 255, 1000, 8191)),
    ("qsgd:levels=200,bucket=40968,norm=l2,coder=elias-dense", "gradient", 40961),
    ("qsgd:levels=1000,bucket=40968,norm=l2,coder=elias", "gradient", 40961),
    *(
        (f"qsgd:bits=14,{keys}", source, n)
        for keys in ("coder=fixed", "coder=elias-dense,norm=l2")
        for source, n in (("spike", 1021), ("zero", 39), ("denormals", 7), ("huge", 6), ("tiny", 3))
    ),
]
FEEDBACK = [
    ("qsgd", "qsgd:bits=3,ef=on", gradient(21, 101), gradient(22, 101)),
    ("qsgd-half", "qsgd:coder=elias,ef=on,residual=bf16", gradient(23, 101), gradient(24, 101)),
    ("qsgd-wide", "qsgd:levels=300,ef=on,residual=bf16", gradient(25, 101), gradient(26, 101)),
    ("qsgd-cancelled", "qsgd:ef=on", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
]
DECODE = {
    "elias": encode_frame(GRADIENTS, "qsgd:levels=2,coder=elias"),
    "elias-dense": encode_frame(GRADIENTS, "qsgd:bits=3,coder=elias-dense"),
    "unit-of-zero": seal(9, scales(0.0, 4.0) + b"\x02" + bytes(8), 127, 8),
    "only-zeros-but-unit": frame(2, scales(1.0) + b"\x77"),
    "largest-unit": frame(1, scales(MAX) + b"\x02", s=1),
    "largest-level": frame(3, scales(1.0) + (0x3FFE | 8191 << 28).to_bytes(6, "little"), s=8191),
    "informative-norm": frame(2, scales(1.0) + b"\x0e", informative=1),
}
ERRORS = {
    "corrupt_payload": {
        "no-values-but-payload": frame(0, scales(1.0)),
        "unit-cut": frame(2, scales(1.0)[:3]),
        "unit-negative": frame(2, scales(-1.0) + b"\x77"),
        "unit-nan": frame(2, scales(NAN) + b"\x77"),
        "unit-times-levels-overflows": frame(2, scales(math.ldexp(1.0, 126)) + b"\x77"),
        "units-all-zero": frame(2, scales(0.0) + b"\x77"),
        "level-above-s": frame(2, scales(1.0) + b"\x7f"),
        "wide-level-above-s": frame(2, scales(1.0) + b"\x01\x01\x01", s=128),
        "wide-dense-level-above-s": frame(1, scales(1.0) + b"\xbc\x10", DENSE, s=128),
        "padding": frame(1, scales(1.0) + b"\x17"),
        "too-long": frame(2, scales(1.0) + b"\x77\x00"),
        "elias-level-above-s": frame(1, scales(1.0) + b"\x20", SPARSE, s=1),
        "elias-no-end": frame(9, scales(1.0) + b"\xfc", SPARSE),
        "elias-beyond-the-end": frame(3, scales(1.0) + b"\xaa", SPARSE),
        "elias-padding": frame(1, scales(1.0) + b"\x81", SPARSE),
        "elias-byte-after-the-end": frame(1, scales(1.0) + b"\x80\x00", SPARSE),
        "elias-huge-number": frame(40960, to_bytes([1.0] * 80) + b"\xff" * 8, SPARSE),
        "dense-cut": frame(3, scales(1.0) + b"\xa1", DENSE),
        "dense-level-above-s": frame(1, scales(1.0) + b"\xc0", DENSE, s=1),
        "dense-padding": frame(1, scales(1.0) + b"\x40", DENSE),
        "sizes-too-small": frame(40961, to_bytes([1.0] * 81) + sizes(3, 0) + bytes(6), SPARSE),
    },
}
