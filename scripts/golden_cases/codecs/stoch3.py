from golden_cases.inputs import builder, scales
from payloads.stoch3 import NUMBER
from payloads.ternary import ZRE

frame = builder(NUMBER)

ENCODE = [
    *(("stoch3", "gradient", n) for n in (9, 1021, 40961)),
    ("stoch3:bucket=320", "gradient", 1021),
    ("stoch3:coder=zre", "gradient", 40961),
    ("stoch3:coder=rice", "runs", 2475),
    ("stoch3", "tiny", 3),
]
DECODE = {"zre": frame(12, scales(2.0) + b"\xf3\xca", ZRE)}
ERRORS = {
    "corrupt_payload": {"run-overruns": frame(5, scales(1.0) + b"\xff", ZRE)},
    "reserved_bits": {"coder-3": frame(1, b"", a=3), "bucket-5": frame(1, b"", b=5)},
}
