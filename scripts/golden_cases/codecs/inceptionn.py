from golden_cases.inputs import NAN, builder, classes, gradient, sizes
from payloads.inceptionn import NUMBER

frame = builder(NUMBER)
TWO = 40961  # values of two chunks

ENCODE = [
    *(
        (f"inceptionn:bound={bound},mode={mode}", "classes", 308)
        for bound in (10, 8, 6)
        for mode in ("paper", "strict")
    ),
    *(("inceptionn", "classes", n) for n in (0, 1, 7, 8, 9, 39)),
    ("inceptionn", "spike", 40961),
    ("inceptionn:bound=6", "special", 7),
]
FEEDBACK = [
    ("inceptionn", "inceptionn:ef=on", classes(), gradient(19, 308)),
    (
        "inceptionn-half",
        "inceptionn:bound=8,mode=strict,ef=on,residual=bf16",
        gradient(20, 308),
        classes(),
    ),
    ("inceptionn-nan", "inceptionn:ef=on", [1.0, NAN], [0.5, -0.25]),
]
DECODE = {
    "no-values": frame(0, b""),
    "any-codes": frame(
        10, bytes.fromhex("e5 f9 00 80 0080 01000080 ff ffff ffffff3f 0000807f 0500 ab cd")
    ),
    "longer-than-needed": frame(1, bytes.fromhex("0300 0000003f")),
}
ERRORS = {
    "corrupt_payload": {
        "no-values-but-payload": frame(0, bytes(2)),
        "too-short": frame(9, bytes(3)),
        "too-long": frame(1, b"\x03\x00" + bytes(5)),
        "n-2-40": frame(2**40, bytes(100)),
        "n-2-32": frame(2**32 + 8, bytes(2)),
        "tags-cut": frame(9, b"\x02\x00" + bytes(2)),
        "code-cut": frame(2, b"\x0e\x00" + bytes(5)),
        "codes-missing": frame(8, b"\xff\xff"),
        "byte-after-the-end": frame(2, b"\x05\x00" + bytes(3)),
        "absent-value": frame(3, b"\x40\x00" + bytes(1)),
        "absent-last-value": frame(7, b"\x00\xc0" + bytes(4)),
        "sizes-cut": frame(TWO, bytes(7)),
        "size-of-zero": frame(TWO, sizes(0, 10242, width=4) + bytes(10242)),
        "byte-from-next": frame(TWO, sizes(10241, 1, width=4) + bytes(10242)),
    },
    "reserved_bits": {
        **{f"param-a-{a}": frame(1, bytes(2), a=a) for a in (3, 7, 8, 16, 0x8000)},
        "param-b": frame(1, bytes(2), b=1),
    },
}
