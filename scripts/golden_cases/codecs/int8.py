from golden_cases.inputs import builder, gradient, scales
from payloads.int8 import NUMBER

frame = builder(NUMBER)

ENCODE = [
    *(("int8", "gradient", n) for n in (9, 320)),
    ("int8:bucket=7", "gradient", 1021),
    ("int8:bucket=4294967295", "gradient", 39),
    ("int8", "tiny", 3),
]
FEEDBACK = [
    ("int8", "int8", gradient(23, 101), gradient(24, 101)),
    ("int8-half", "int8:bucket=10,residual=bf16", gradient(25, 101), gradient(26, 101)),
]
DECODE = {
    "nothing-sent": frame(7, b"", b=2),
    "every-level": frame(255, scales(0.1) + bytes(q & 0xFF for q in range(-127, 128))),
    "a-unit-of-zero": frame(2, scales(0.0, 4.0) + b"\x7f\x81", b=1),
    "largest-unit": frame(2, bytes.fromhex("0302017c 7f81")),
}
ERRORS = {
    "corrupt_payload": {
        "no-values-but-payload": frame(0, scales(1.0)),
        "too-short": frame(3, scales(1.0) + b"\x01\x02"),
        "too-long": frame(1, scales(1.0) + b"\x01\x02"),
        "one-unit-missing": frame(3, scales(1.0) + b"\x01\x02\x03", b=2),
        "n-2-40": frame(2**40, scales(1.0) + b"\x01"),
        "level-128": frame(1, scales(1.0) + b"\x80"),
        "unit-negative": frame(1, scales(-1.0) + b"\x01"),
        "unit-too-large": frame(1, bytes.fromhex("0402017c 01")),
        "units-zero": frame(1, scales(0.0) + b"\x01"),
    },
    "reserved_bits": {"param-a": frame(1, b"", a=1)},
}
