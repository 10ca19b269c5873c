from golden_cases.inputs import MAX, NAN, builder, gradient
from payloads.bf16 import NUMBER

frame = builder(NUMBER)

ENCODE = [("bf16", "gradient", 320), ("bf16", "special", 8), ("bf16", "rounding", 7)]
FEEDBACK = [
    ("bf16", "bf16:ef=on", gradient(11, 39), gradient(12, 39)),
    ("bf16-half", "bf16:ef=on,residual=bf16", gradient(13, 39), gradient(14, 39)),
    ("bf16-overflow", "bf16:ef=on", [MAX, 1.0], [0.0, 0.125]),
    ("bf16-nan", "bf16:ef=on", [1.0, NAN], [0.0, 0.125]),
]
DECODE = {"any-bits": frame(4, bytes.fromhex("817f 80ff 0080 0100"))}
ERRORS = {
    "corrupt_payload": {"odd-payload": frame(1, bytes(3)), "n-2-31": frame(2**31, bytes(2))},
}
