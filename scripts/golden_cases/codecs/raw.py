from common import BFLOAT16, FLOAT16
from golden_cases.inputs import SIGNALLING_NAN, builder, scales
from payloads.raw import NUMBER

frame = builder(NUMBER)

ENCODE = [("raw", "special", 8)]
DECODE = {
    "any-bits": frame(3, SIGNALLING_NAN + bytes.fromhex("00000080000080ff")),
    "of-bf16": frame(4, bytes.fromhex("803f 0080 81ff 0100"), dtype=BFLOAT16),
    "of-f16": frame(4, bytes.fromhex("003c 0080 01fd 0100"), dtype=FLOAT16),
}
ERRORS = {
    "corrupt_payload": {
        "n-too-large": frame(3, bytes(8)),
        "n-too-small": frame(1, bytes(8)),
        "n-2-32": frame(2**32, bytes(8)),
        "n-wraps": frame(2**30 + 2, bytes(8)),
        "of-bf16-with-4-bytes-a-value": frame(2, bytes(8), dtype=BFLOAT16),
        "of-f16-too-short": frame(2, bytes(3), dtype=FLOAT16),
    },
    "reserved_bits": {
        "param-a": frame(3, scales(1.0, -2.0, 0.5), a=0x8000),
        "param-b": frame(3, scales(1.0, -2.0, 0.5), b=5),
    },
}
