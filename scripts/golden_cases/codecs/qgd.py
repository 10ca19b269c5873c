from golden_cases.inputs import builder, scales
from payloads.qgd import NUMBER
from payloads.ternary import RICE, ZRE

frame = builder(NUMBER)

ENCODE = [
    *(("qgd", "gradient", n) for n in (9, 1021, 40961)),
    ("qgd:coder=zre", "gradient", 40961),
    ("qgd:coder=none", "gradient", 320),
    ("qgd", "spike", 1021),
    ("qgd", "blocks", 16),
    ("qgd", "tiny", 3),
]
DECODE = {"zre": frame(12, scales(2.0) + b"\xf3\xca", ZRE)}
ERRORS = {
    "corrupt_payload": {"scale-nan": frame(5, scales(float("nan")) + b"\x79", RICE)},
    "reserved_bits": {"coder-3": frame(1, b"", a=3), "param-b": frame(1, b"", b=320)},
}
