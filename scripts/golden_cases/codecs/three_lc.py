from golden_cases.inputs import (
    GRADIENTS,
    INF,
    MAX,
    NAN,
    TENSORS,
    TINY,
    builder,
    gradient,
    scales,
    sizes,
    take,
)
from payloads.ternary import NONE, RICE, ZRE
from payloads.three_lc import NUMBER
from reference_encoder import encode_frame

seal = builder(NUMBER)
FULL_CHUNK = b"\xff" * 585 + b"\xf3"  # 585 * 14 + 2 = 8192 packed bytes


def frame(n: int, payload: bytes, coder: int = ZRE, bucket: int = 0, informative: int = 0) -> bytes:
    """`informative` holds the encoder's sparsity multiplier."""
    return seal(n, payload, coder | informative << 2, bucket)


def two_chunks(first: bytes, second: bytes) -> bytes:
    """Scale 1 and the codes of two chunks with their sizes."""
    return scales(1.0) + sizes(len(first), len(second)) + first + second


ENCODE = [
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
    ("3lc:bucket=5", "zero", 39),
    ("3lc:bucket=5", "blocks", 16),
    ("3lc", "ties", 8),
    ("3lc:s=1.75", "ties-175", 10),
    *((f"3lc:s={s}", "denormals", 7) for s in ("1", "1.25", "1.75")),
    *((f"3lc:s={s}", "tiny", 3) for s in ("1", "1.25", "1.5", "1.75")),
    *((f"3lc:s={s}", "huge", 6) for s in ("1", "1.9")),
    ("3lc:s=1.75,bucket=5,coder=none", "infinity", 39),
]
FEEDBACK = [
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
    ("cancelled", "3lc", [1.0, -2.0, -0.0, 0.0], [-1.0, 2.0, 0.0, -0.0]),
    ("cancelled-bucket", "3lc:bucket=5", [1.0] * 5 + [3.0], [-1.0] * 5 + [0.5]),
    ("signed-zero", "3lc", [-0.0, -0.0, 0.0, 1.0], [-0.0, 0.0, -0.0, 0.0]),
    ("denormals", "3lc:s=1.25", [TINY, -TINY, 4 * TINY], [TINY, 3 * TINY, -TINY]),
    ("huge", "3lc:s=1.9", [0.75 * MAX, -MAX, 0.4 * MAX], [0.0, 0.0, 0.05 * MAX]),
    ("overflow", "3lc", [0.75 * MAX, 1.0], [0.5 * MAX, 0.25]),
    ("nan", "3lc:s=1.75", [1.0, NAN], [0.5, -0.25]),
    ("empty", "3lc", [], []),
]
DECODE = {
    "bucket": encode_frame(GRADIENTS, "3lc:s=1.5,bucket=10"),
    "none": encode_frame(GRADIENTS, "3lc:s=1.5,coder=none"),
    "two-chunks": encode_frame(take(TENSORS["spike"], 40961), "3lc"),
    "no-values": frame(0, b""),
    "nothing-sent-groups": frame(7, b"", bucket=5),
    "every-code": frame(5 * (243 + sum(range(2, 15))), scales(0.25) + bytes(range(256))),
    "lone-zero-bytes": frame(20, scales(2.0) + bytes([121, 121, 121, 0])),
    "short-runs-first": frame(5 * 18, scales(2.0) + bytes([243, 255, 121, 242])),
    "run-split": frame(5 * 16, scales(2.0) + bytes([244, 121, 252, 121])),
    "two-chunks-not-greedy": frame(40966, two_chunks(FULL_CHUNK[::-1], bytes([121, 121]))),
    "only-zeros-but-scale": frame(5, scales(3.0) + bytes([121])),
    "rice": encode_frame(GRADIENTS, "3lc:coder=rice"),
    "rice-no-bytes": frame(100, scales(3.0), RICE),
    "rice-two-chunks-no-bytes": frame(40966, two_chunks(b"", b""), RICE),
    "rice-packed": frame(10, scales(3.0) + bytes([242, 121]), RICE),
    "rice-escape-not-needed": frame(100, scales(3.0) + bytes.fromhex("0f801100"), RICE),
    "rice-a-worse-k": frame(100, scales(3.0) + bytes.fromhex("170a"), RICE),
    "rice-trits-times-zero": frame(50, scales(0.0, 4.0) + bytes.fromhex("f281e728"), RICE, 25),
    "a-scale-of-zero": frame(10, scales(0.0, 4.0) + bytes([121, 0]), bucket=5),
    "trits-times-zero": frame(10, scales(0.0, 4.0) + bytes([0, 242]), bucket=5),
    "smallest-scale": frame(5, scales(TINY) + bytes([6])),
    "largest-scale": frame(5, scales(MAX) + bytes([236])),
    "informative-s": frame(5, scales(1.5) + bytes([100]), informative=16383),
    "bucket-beyond-n": frame(6, scales(1.5) + bytes([100, 40]), bucket=0xFFFFFFFF),
}
ERRORS = {
    "corrupt_payload": {
        "no-values-but-payload": frame(0, scales(1.0)),
        "scale-cut": frame(5, scales(1.0)[:3]),
        "scale-alone": frame(5, scales(1.0)),
        "scale-negative": frame(5, scales(-1.0) + b"\x79"),
        "scale-minus-zero": frame(10, scales(1.0, -0.0) + b"\x00\x79", bucket=5),
        "scale-infinite": frame(5, scales(INF) + b"\x79"),
        "scale-nan": frame(5, scales(NAN) + b"\x79"),
        "scales-all-zero": frame(10, scales(0.0, 0.0) + b"\x79\x79", bucket=5),
        "more-groups-than-scales": frame(15, scales(1.0, 1.0) + b"\x79\x79\x79", bucket=5),
        "none-too-long": frame(5, scales(1.0) + b"\x79\x79", NONE),
        "none-too-short": frame(6, scales(1.0) + b"\x79", NONE),
        "none-byte-243": frame(5, scales(1.0) + b"\xf3", NONE),
        "none-byte-255": frame(10, scales(1.0) + b"\x00\xff", NONE),
        "none-padding": frame(4, scales(1.0) + bytes([122]), NONE),
        "padding": frame(4, scales(1.0) + bytes([120])),
        "padding-of-one": frame(1, scales(1.0) + bytes([2 * 81 + 27 + 9 + 3 + 2])),
        "codes-too-few": frame(11, scales(1.0) + b"\x79\x00"),
        "codes-too-many": frame(10, scales(1.0) + b"\x79\x00\x79"),
        "run-overruns": frame(10, scales(1.0) + b"\x79\xf3"),
        "run-overruns-at-once": frame(5, scales(1.0) + b"\xff"),
        "n-2-40": frame(2**40, scales(1.0) + b"\xff"),
        "n-2-40-groups": frame(2**40, scales(1.0) + b"\xff", bucket=5),
        "n-2-32": frame(2**32 + 5, scales(1.0) + b"\x79"),
        "sizes-cut": frame(40961, scales(1.0) + b"\x01\x00\x01"),
        "size-of-zero": frame(40961, two_chunks(FULL_CHUNK + b"\x79", b"")),
        "first-size-of-zero": frame(40961, two_chunks(b"", FULL_CHUNK + b"\x79")),
        "size-beyond-8192": frame(
            2 * 40960, two_chunks(b"\x79" * 8193, FULL_CHUNK[1:] + b"\x79" * 13)
        ),
        "sizes-beyond-payload": frame(
            40961, scales(1.0) + b"\xff\xff\x01\x00" + FULL_CHUNK + b"\x79"
        ),
        "bytes-after-last-chunk": frame(40961, two_chunks(FULL_CHUNK, b"\x79") + b"\x79"),
        "run-across-chunks": frame(40965, two_chunks(b"\xff" * 586, b"\x00")),
        "chunk-too-short": frame(40970, two_chunks(FULL_CHUNK[:-1], b"\x00\x00\x79\x79")),
        "padding-second-chunk": frame(40961, two_chunks(FULL_CHUNK, b"\x7a")),
        "rice-padding": frame(100, scales(1.0) + b"\x10\x83", RICE),
        "rice-byte-of-padding": frame(100, scales(1.0) + b"\x10\x03\x00", RICE),
        "rice-k-alone": frame(100, scales(1.0) + b"\x0c", RICE),
        "rice-code-cut": frame(100, scales(1.0) + b"\xe6", RICE),
        "rice-escape-cut": frame(100, scales(1.0) + b"\x0f\x00\x00", RICE),
        "rice-beyond-the-end": frame(99, scales(1.0) + b"\xe6\x11", RICE),
        "rice-too-long": frame(10, scales(1.0) + b"\x79\x79\x79", RICE),
        "rice-chunk-too-long": frame(40970, two_chunks(b"", b"\x79\x79\x79"), RICE),
        "rice-packed-byte-243": frame(5, scales(1.0) + b"\xf3", RICE),
        "rice-packed-padding": frame(4, scales(1.0) + b"\x7a", RICE),
    },
    "reserved_bits": {
        "coder-3": frame(12, scales(1.5) + bytes([121, 0, 130]), 3),
        "bucket-4": frame(12, scales(1.5) + bytes([121, 0, 130]), bucket=4),
        "bucket-2-32-minus-2": frame(12, scales(1.5) + bytes([121, 0, 130]), bucket=2**32 - 2),
    },
}
