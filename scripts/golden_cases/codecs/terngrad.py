from golden_cases.inputs import NAN, builder, scales
from payloads.ternary import NONE, TWO_BIT
from payloads.terngrad import NUMBER

frame = builder(NUMBER)

ENCODE = [
    *(("terngrad", "gradient", n) for n in (9, 1021, 40961)),
    ("terngrad:clip=0", "gradient", 320),
    ("terngrad:clip=0.5,bucket=320", "gradient", 1021),
    ("terngrad:pack=trits5", "gradient", 1021),
    ("terngrad:pack=trits5,coder=zre", "gradient", 40961),
    ("terngrad:clip=1.5,pack=trits5,coder=rice,bucket=640", "gradient", 1021),
    ("terngrad", "equal", 1021),
    ("terngrad", "tiny", 3),
]
DECODE = {
    "every-code": frame(7, scales(0.25) + bytes.fromhex("24 12"), TWO_BIT),
    "coder-none": frame(4, scales(2.0) + bytes([100]), NONE, 320),
    "informative-clip": frame(4, scales(2.0) + b"\x21", TWO_BIT | 16383 << 2),
    "trits-times-zero": frame(640, scales(0.0, 4.0) + b"\x28" * 160, TWO_BIT, 320),
}
ERRORS = {
    "corrupt_payload": {
        "code-3": frame(4, scales(1.0) + b"\x0c", TWO_BIT),
        "padding": frame(3, scales(1.0) + b"\x40", TWO_BIT),
        "two-bits-too-long": frame(4, scales(1.0) + b"\x00\x00", TWO_BIT),
        "two-bits-too-short": frame(5, scales(1.0) + b"\x00", TWO_BIT),
        "five-byte-243": frame(5, scales(1.0) + b"\xf3", NONE),
        "scale-nan": frame(4, scales(NAN) + b"\x01", TWO_BIT),
    },
    "reserved_bits": {"bucket-5": frame(1, b"", b=5)},
}
