from golden_cases.inputs import INF, builder, gradient
from payloads.fp16 import NUMBER

frame = builder(NUMBER)

ENCODE = [("fp16", "gradient", 320), ("fp16", "special", 8), ("fp16", "rounding-f16", 13)]
FEEDBACK = [
    ("fp16", "fp16:ef=on", gradient(21, 39), gradient(22, 39)),
    ("fp16-overflow", "fp16:ef=on", [65504.0, 1.0], [16.0, 0.125]),
    ("fp16-infinity", "fp16:ef=on", [-INF, 1.0], [0.0, 0.125]),
]
DECODE = {"any-bits": frame(6, bytes.fromhex("017c 00fc 0080 0100 ff03 ff7b"))}
ERRORS = {
    "corrupt_payload": {"too-short": frame(2, bytes(3))},
    "reserved_bits": {"param-a": frame(1, bytes(2), a=1)},
}
