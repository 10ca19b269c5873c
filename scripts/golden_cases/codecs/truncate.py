from golden_cases.inputs import MAX, NAN, builder, classes, gradient
from payloads.truncate import NUMBER

frame = builder(NUMBER)

ENCODE = [
    *((f"truncate:bits={bits}", "gradient", n) for bits in (16, 22, 24) for n in (320, 7)),
    *((f"truncate:bits={bits}", "classes", 308) for bits in (16, 22, 24)),
    *((f"truncate:bits={bits}", "huge", 6) for bits in (16, 22, 24)),
    *((f"truncate:bits={bits}", "denormals", 7) for bits in (16, 22, 24)),
    ("truncate", "special", 7),
]
FEEDBACK = [
    ("truncate", "truncate:ef=on", classes(), gradient(21, 308)),
    ("truncate-half", "truncate:bits=22,ef=on,residual=bf16", gradient(22, 308), classes()),
    ("truncate-overflow", "truncate:bits=24,ef=on", [MAX, 1.0], [MAX, 0.0]),
    ("truncate-nan", "truncate:ef=on", [1.0, NAN], [0.5, -0.25]),
]
DECODE = {
    "no-values": frame(0, b""),
    "any-bits": frame(4, bytes.fromhex("7f ff 80 00 e4"), a=1),
    "any-halves": frame(2, bytes.fromhex("7f ff 80 c0")),
}
ERRORS = {
    "corrupt_payload": {
        "no-values-but-payload": frame(0, bytes(1)),
        "empty": frame(4, b""),
        "too-short": frame(4, bytes(4), a=1),
        "too-long": frame(4, bytes(6), a=1),
        "padding": frame(3, bytes(3) + b"\x40", a=1),
        "n-2-40": frame(2**40, bytes(100), a=2),
        "two-chunks-too-short": frame(40961, bytes(40961 + 10240), a=1),
    },
    "reserved_bits": {
        **{f"param-a-{a}": frame(1, bytes(2), a=a) for a in (3, 4, 0x8000)},
        "param-b": frame(1, bytes(2), b=1),
    },
}
