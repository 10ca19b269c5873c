from golden_cases.inputs import MAX, builder, gradient
from payloads.topk import BF16, NUMBER

frame = builder(NUMBER)

ENCODE = [
    *(("topk", "gradient", n) for n in (320, 40961)),
    ("topk:ratio=0.3,values=bf16", "gradient", 1021),
    *(("topk:ratio=0.1,index=rice", "gradient", n) for n in (1, 1021, 40961)),
    ("topk:ratio=0.9,values=bf16,index=rice", "gradient", 39),
    ("topk:ratio=0.0001", "spike", 81925),
    ("topk:ratio=0.9", "spike", 39),
    ("topk", "blocks", 16),
]
FEEDBACK = [
    ("topk", "topk:ratio=0.2", gradient(15, 101), gradient(16, 101)),
    ("topk-overflow", "topk:values=bf16", [MAX, 1.0], [0.0, 0.125]),
    ("topk-half", "topk:ratio=0.2,values=bf16,residual=bf16", gradient(17, 101), gradient(18, 101)),
]
DECODE = {
    "any-bits": frame(6, bytes.fromhex("37 00000080 010080ff 0000807f 010000c0 0000a07f")),
    "bf16-any-bits": frame(6, bytes.fromhex("1e 0080 81ff 807f 0100"), BF16),
}
