from golden_cases.inputs import INF, NAN, builder, gradient, scales
from payloads.onebit import NUMBER

frame = builder(NUMBER)

ENCODE = [
    *(("onebit", "gradient", n) for n in (9, 320, 40961)),
    ("onebit:bucket=8", "gradient", 1021),
    ("onebit:bucket=40968", "gradient", 81925),
    ("onebit", "tiny", 3),
]
FEEDBACK = [
    ("onebit", "onebit", gradient(27, 101), gradient(28, 101)),
    ("onebit-half", "onebit:bucket=16,residual=bf16", gradient(29, 101), gradient(40, 101)),
]
DECODE = {
    "one-sign": frame(9, scales(0.0, -2.0) + b"\xff\x00"),
}
ERRORS = {
    "corrupt_payload": {
        "too-short": frame(9, scales(1.0, -1.0) + b"\x01"),
        "padding": frame(7, scales(1.0, -1.0) + b"\x80"),
        "first-mean-negative": frame(1, scales(-1.0, -1.0) + b"\x00"),
        "first-mean-minus-zero": frame(1, scales(-0.0, -1.0) + b"\x00"),
        "second-mean-positive": frame(1, scales(1.0, 1.0) + b"\x00"),
        "second-mean-minus-zero": frame(1, scales(1.0, -0.0) + b"\x00"),
        "mean-infinite": frame(1, scales(1.0, -INF) + b"\x00"),
        "mean-nan": frame(1, scales(NAN, -1.0) + b"\x00"),
        "means-zero": frame(1, scales(0.0, 0.0) + b"\x00"),
    },
    "reserved_bits": {"param-a": frame(1, b"", a=1), "bucket-4": frame(1, b"", b=4)},
}
