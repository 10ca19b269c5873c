from golden_cases.inputs import INF, NAN, builder, gradient, scales
from payloads.topk2bit import NUMBER

frame = builder(NUMBER)


def chunk(low: float, high: float, rest: str) -> bytes:
    return scales(low, high) + bytes.fromhex(rest)


ENCODE = [
    ("topk2bit", "gradient", 1021),
    ("topk2bit:density=0.001", "gradient", 40961),
    ("topk2bit:density=0.3", "gradient", 39),
    ("topk2bit:density=0.9", "spike", 39),
    ("topk2bit:density=0.5", "blocks", 16),
]
# The mean lies between two neighbouring float32, and rounds to the larger.
NEIGHBOURS = [1 + 2.0**-23, 1 + 2.0**-22]
FEEDBACK = [
    ("topk2bit", "topk2bit:density=0.2", gradient(60, 101), gradient(61, 101)),
    ("topk2bit-mean", "topk2bit:density=0.9", NEIGHBOURS, [0.0, 0.0]),
]
# The trits 0, -1, 0, +1 are the packed byte 0x61.
DECODE = {
    "high-below-low": frame(4, chunk(2.0, 0.0, "0100 61 02")),
    "nothing-sent": frame(4, chunk(0.0, 0.0, "0100 79")),
}
ERRORS = {
    "corrupt_payload": {
        "head-cut": frame(4, chunk(1.0, 2.0, "01")),
        "magnitude-nan": frame(4, chunk(NAN, 2.0, "0100 61 02")),
        "magnitude-infinite": frame(4, chunk(1.0, INF, "0100 61 02")),
        "magnitude-negative": frame(4, chunk(-0.0, 2.0, "0100 61 02")),
        "trits-cut": frame(4, chunk(1.0, 2.0, "0300 61 02")),
        "bits-missing": frame(4, chunk(1.0, 2.0, "0100 61")),
        "bits-too-many": frame(4, chunk(1.0, 2.0, "0100 79 02")),
        "bits-padding": frame(4, chunk(1.0, 2.0, "0100 61 04")),
    },
    "reserved_bits": {"param-a": frame(1, b"", a=1)},
}
