"""What tests/golden/encode holds: values, and the codecs that encode them."""

from __future__ import annotations

import math
import random

import common

NAN, INF, MAX = math.nan, math.inf, common.FLT_MAX
TINY = 2.0**-149  # the smallest denormal


def gradient(seed: int, count: int) -> list[float]:
    """Heavy-tailed values around zero, as gradients are."""
    draw = random.Random(seed)
    return [common.f32(draw.gauss(0, 1) ** 3 * 1e-3) for _ in range(count)]


def zero_runs() -> list[float]:
    """Ones, with 1, 2, ... 30 packed bytes of zeros between them."""
    return [value for run in range(1, 31) for value in [1.0] * 5 + [0.0] * (5 * run)]


def classes() -> list[float]:
    """Magnitudes from 2^-12 to below 4, with the first and last of each exponent."""
    draw = random.Random(2)
    parts = [
        1.0,
        1.0 + 2.0**-23,
        2.0 - 2.0**-23,
        1.5,
        1.125,
        1.875,
        *(draw.random() + 1 for _ in range(5)),
    ]
    values = [common.f32(part) * 2.0**e for e in range(-12, 2) for part in parts]
    values = [value * sign for value in values for sign in (1.0, -1.0)]
    draw.shuffle(values)
    return values


INPUTS: dict[str, list[float]] = {
    "gradient": gradient(1, 1021),
    "spike": [0.0] * 700 + [-2.0] + [0.0] * 320,
    "runs": zero_runs(),
    "classes": classes(),
    "zero": [0.0, -0.0, 0.0],
    "ties": [1.0, 0.5, -0.5, 0.50000006, -0.50000006, 0.49999997, -0.49999997, -1.0],
    "ties-175": [1.0, 0.875, -0.875, 0.87500006, -0.87500006, 0.87499994, 0.0, -0.0, 0.5, -1.0],
    "denormals": [TINY, -TINY, 0.0, 2 * TINY, 3 * TINY, -4 * TINY, 5 * TINY],
    "tiny": [TINY, -0.0, -TINY],
    "huge": [MAX, -MAX, MAX / 2, -MAX / 2, 0.75 * MAX, 1.0],
    "rounding": [1.00390625, 1.01171875, 1.00390637, -1.00390625, 3.3895314e38, 3.3961776e38, -MAX],
    "rounding-f16": [
        *(1.00048828125, 1.00146484375, 1.0004884004592896, -1.00048828125, 65504.0, 65519.996),
        *(65520.0, -65520.0, 2.0**-25, 2.0**-25 + 2.0**-48, 1.5 * 2.0**-24, -(2.0**-14), 6.1e-5),
    ],
    "equal": [common.f32(0.1)],
    "special": [NAN, INF, -INF, -0.0, TINY, MAX, 1.0],
    "nan": [1.0, NAN, 2.0],
    "infinity": [1.0, 2.0, -INF],
    "blocks": [0.0] * 5 + [1.0, -0.25] + [0.0] * 3 + [-0.0] * 5 + [-8.0],
}

MODES = ("paper", "strict")
# codec, input, number of values
PLAIN: list[tuple[str, str, int]] = [
    *(("raw", "gradient", n) for n in (0, 1, 39)),
    *(("bf16", "gradient", n) for n in (0, 1, 39, 320)),
    ("raw", "special", 8),
    ("bf16", "special", 8),
    ("bf16", "rounding", 7),
    *(("fp16", "gradient", n) for n in (0, 1, 39, 320)),
    ("fp16", "special", 8),
    ("fp16", "rounding-f16", 13),
    *((codec, "gradient", n) for codec in ("int8", "onebit") for n in (0, 1, 9, 320)),
    ("onebit", "gradient", 40961),
    ("int8:bucket=7", "gradient", 1021),
    ("int8:bucket=4294967295", "gradient", 39),
    ("onebit:bucket=8", "gradient", 1021),
    ("onebit:bucket=40968", "gradient", 81925),
    *((codec, "gradient", n) for codec in ("terngrad", "stoch3") for n in (0, 1, 9, 1021, 40961)),
    ("terngrad:clip=0", "gradient", 320),
    ("terngrad:clip=0.5,bucket=320", "gradient", 1021),
    ("terngrad:pack=trits5", "gradient", 1021),
    ("terngrad:pack=trits5,coder=zre", "gradient", 40961),
    ("terngrad:clip=1.5,pack=trits5,coder=rice,bucket=640", "gradient", 1021),
    ("terngrad", "equal", 1021),
    ("stoch3:bucket=320", "gradient", 1021),
    ("stoch3:coder=zre", "gradient", 40961),
    ("stoch3:coder=rice", "runs", 2475),
    *(
        (codec, source, n)
        for codec in ("int8", "onebit", "terngrad", "stoch3")
        for source, n in (("zero", 39), ("denormals", 7), ("tiny", 3), ("huge", 6), ("nan", 3))
    ),
    *(("topk", "gradient", n) for n in (0, 1, 39, 320, 40961)),
    ("topk:ratio=0.3,values=bf16", "gradient", 1021),
    *(("topk:ratio=0.1,index=rice", "gradient", n) for n in (1, 1021, 40961)),
    ("topk:ratio=0.9,values=bf16,index=rice", "gradient", 39),
    ("topk:ratio=0.0001", "spike", 81925),
    ("topk:ratio=0.9", "spike", 39),
    ("topk", "zero", 39),
    *(("stc", "gradient", n) for n in (0, 1, 39, 1021, 40961)),
    ("stc:density=0.3,coder=zre", "gradient", 320),
    ("stc:density=0.3,coder=none", "gradient", 39),
    ("stc", "spike", 1021),
    ("stc", "zero", 39),
    ("stc", "denormals", 7),
    ("stc", "huge", 6),
    ("stc", "nan", 3),
    ("topk", "blocks", 16),
    ("topk", "denormals", 7),
    ("topk", "huge", 6),
    ("topk", "nan", 3),
    *(("qsgd", "gradient", n) for n in (0, 1, 39, 40961)),
    *((f"qsgd:bits={bits}", "gradient", 1021) for bits in (2, 3, 5, 6, 7, 8)),
    ("qsgd:levels=9,bucket=8,norm=l2", "gradient", 320),
    ("qsgd:bits=3,bucket=12344,norm=l2,coder=elias", "gradient", 40961),
    *(("qsgd:bits=2,coder=elias", "gradient", n) for n in (1, 39, 40960, 81925)),
    *(("qsgd:coder=elias-dense", "gradient", n) for n in (1, 39, 40961)),
    ("qsgd:bits=8,coder=elias-dense", "gradient", 40961),
    *(
        (f"qsgd:bits=8,{keys}", source, n)
        for keys in ("coder=fixed", "coder=elias,norm=l2")
        for source, n in (("spike", 1021), ("zero", 39), ("denormals", 7), ("huge", 6), ("tiny", 3))
    ),
    ("qsgd:bits=6", "huge", 6),
    ("qsgd:bucket=8,coder=elias", "blocks", 16),
    ("qsgd", "nan", 3),
    *(("3lc:s=1.75", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40960, 40961, 81925)),
    *(("3lc:s=1.75,coder=none", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40961)),
    *((f"3lc{key}", "gradient", 320) for key in ("", ":coder=none", ":s=1.5", ":s=1.9")),
    *(("3lc:s=1.75,coder=rice", "gradient", n) for n in (0, 1, 4, 5, 6, 39, 320, 40961)),
    *((f"3lc:coder=rice{key}", "gradient", 1021) for key in ("", ",bucket=5", ",bucket=320")),
    ("3lc:s=1.5,coder=rice,bucket=12345", "gradient", 40961),
    *(("3lc:coder=rice", source, n) for source, n in [("spike", 81925), ("runs", 2475)]),
    ("3lc:coder=rice", "ties", 8),
    ("3lc:s=1.9999999", "gradient", 1021),
    ("3lc:s=1.000030517578125", "gradient", 6),
    ("3lc:s=1.75,bucket=5", "gradient", 39),
    ("3lc:s=1.75,bucket=5,coder=none", "gradient", 39),
    ("3lc:bucket=320", "gradient", 1021),
    ("3lc:s=1.9,bucket=320", "gradient", 320),
    ("3lc:s=1.75,bucket=12345", "gradient", 81925),
    ("3lc:s=1.75,bucket=40960", "gradient", 40961),
    ("3lc:bucket=4294967295", "gradient", 39),
    ("3lc", "runs", 2475),
    ("3lc", "spike", 81925),
    ("3lc:bucket=320", "spike", 40961),
    ("3lc", "zero", 39),
    ("3lc:bucket=5", "zero", 39),
    ("3lc:bucket=5", "blocks", 16),
    ("3lc", "ties", 8),
    ("3lc:s=1.75", "ties-175", 10),
    *((f"3lc:s={s}", "denormals", 7) for s in ("1", "1.25", "1.75")),
    *((f"3lc:s={s}", "tiny", 3) for s in ("1", "1.25", "1.5", "1.75")),
    *((f"3lc:s={s}", "huge", 6) for s in ("1", "1.9")),
    ("3lc", "nan", 3),
    ("3lc:s=1.75,bucket=5,coder=none", "infinity", 39),
    *((f"inceptionn:bound={b},mode={m}", "classes", 308) for b in (10, 8, 6) for m in MODES),
    *(("inceptionn", "classes", n) for n in (0, 1, 7, 8, 9, 39)),
    ("inceptionn", "spike", 40961),
    ("inceptionn", "zero", 39),
    ("inceptionn:bound=6", "special", 7),
    ("inceptionn", "huge", 6),
]

# name, codec, input, residual before
FEEDBACK: list[tuple[str, str, list[float], list[float]]] = [
    ("first", "3lc:s=1.75", gradient(2, 320), [0.0] * 320),
    ("later", "3lc:s=1.75", gradient(3, 320), gradient(4, 320)),
    ("half", "3lc:s=1.75,residual=bf16", gradient(5, 320), gradient(6, 320)),
    ("bucket", "3lc:s=1.9,bucket=35,coder=none", gradient(7, 101), gradient(8, 101)),
    ("bucket-half", "3lc:bucket=35,residual=bf16", gradient(9, 101), gradient(10, 101)),
    ("rice", "3lc:s=1.9,coder=rice", gradient(15, 320), gradient(16, 320)),
    (
        "rice-bucket-half",
        "3lc:bucket=35,coder=rice,residual=bf16",
        gradient(17, 101),
        gradient(18, 101),
    ),
    ("bf16", "bf16:ef=on", gradient(11, 39), gradient(12, 39)),
    ("bf16-half", "bf16:ef=on,residual=bf16", gradient(13, 39), gradient(14, 39)),
    ("bf16-overflow", "bf16:ef=on", [MAX, 1.0], [0.0, 0.125]),
    ("cancelled", "3lc", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
    ("cancelled-bucket", "3lc:bucket=5", [1.0] * 5 + [3.0], [-1.0] * 5 + [0.5]),
    ("signed-zero", "3lc", [-0.0, -0.0, 0.0, 1.0], [-0.0, 0.0, -0.0, 0.0]),
    ("denormals", "3lc:s=1.25", [TINY, -TINY, 4 * TINY], [TINY, 3 * TINY, -TINY]),
    ("huge", "3lc:s=1.9", [0.75 * MAX, -MAX, 0.4 * MAX], [0.0, 0.0, 0.05 * MAX]),
    ("overflow", "3lc", [0.75 * MAX, 1.0], [0.5 * MAX, 0.25]),
    ("nan", "3lc:s=1.75", [1.0, NAN], [0.5, -0.25]),
    ("empty", "3lc", [], []),
    ("qsgd", "qsgd:bits=3,ef=on", gradient(21, 101), gradient(22, 101)),
    ("qsgd-half", "qsgd:coder=elias,ef=on,residual=bf16", gradient(23, 101), gradient(24, 101)),
    ("qsgd-cancelled", "qsgd:ef=on", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
    ("fp16", "fp16:ef=on", gradient(21, 39), gradient(22, 39)),
    ("fp16-overflow", "fp16:ef=on", [65504.0, 1.0], [16.0, 0.125]),
    ("int8", "int8", gradient(23, 101), gradient(24, 101)),
    ("int8-half", "int8:bucket=10,residual=bf16", gradient(25, 101), gradient(26, 101)),
    ("onebit", "onebit", gradient(27, 101), gradient(28, 101)),
    ("onebit-half", "onebit:bucket=16,residual=bf16", gradient(29, 101), gradient(40, 101)),
    ("terngrad", "terngrad:ef=on", gradient(41, 101), gradient(42, 101)),
    ("stoch3", "stoch3:ef=on,residual=bf16", gradient(43, 101), gradient(44, 101)),
    ("stc", "stc:density=0.2", gradient(50, 101), gradient(51, 101)),
    ("topk", "topk:ratio=0.2", gradient(15, 101), gradient(16, 101)),
    ("topk-overflow", "topk:values=bf16", [MAX, 1.0], [0.0, 0.125]),
    ("topk-half", "topk:ratio=0.2,values=bf16,residual=bf16", gradient(17, 101), gradient(18, 101)),
    ("inceptionn", "inceptionn:ef=on", classes(), gradient(19, 308)),
    (
        "inceptionn-half",
        "inceptionn:bound=8,mode=strict,ef=on,residual=bf16",
        gradient(20, 308),
        classes(),
    ),
    ("inceptionn-nan", "inceptionn:ef=on", [1.0, NAN], [0.5, -0.25]),
]


def take(values: bytes, n: int) -> bytes:
    """The first n values of a file that is repeated as often as needed."""
    return (values * (4 * n // len(values) + 1))[: 4 * n]
