"""Payloads whose values are -m, 0 or +m: scales, then sizes, then coded trits, chunk by chunk."""

from __future__ import annotations

import struct

from common import Frame, ceil_div, little, require, to_bytes
from payloads import rice

NONE, ZRE, RICE, TWO_BIT = 0, 1, 2, 3  # coders
CODERS = {"none": NONE, "zre": ZRE, "rice": RICE}
CHUNK_VALUES = 40960
ZERO_BYTE = 121
LONGEST_RUN = 14


class Shape:
    """Where the parts of a payload lie. bucket: values that share a scale."""

    def __init__(self, frame: Frame, coder: int, bucket: int) -> None:
        self.coder = coder
        self.bucket = bucket or max(frame.n, 1)
        self.n = frame.n
        self.chunk_count = ceil_div(frame.n, CHUNK_VALUES)
        self.has_sizes = coder not in (NONE, TWO_BIT) and self.chunk_count > 1
        self.sizes_at = 4 * ceil_div(frame.n, self.bucket)
        self.codes_at = self.sizes_at + (2 * self.chunk_count if self.has_sizes else 0)

    def chunk_values(self, chunk: int) -> int:
        return min(CHUNK_VALUES, self.n - chunk * CHUNK_VALUES)

    def limits(self) -> tuple[int, int]:
        """Fewest and most bytes of the payload."""
        full = self.chunk_count - 1
        least, most = chunk_limits(self.coder, CHUNK_VALUES)
        last_least, last_most = chunk_limits(self.coder, self.chunk_values(full))
        return self.codes_at + full * least + last_least, self.codes_at + full * most + last_most


def chunk_limits(coder: int, values: int) -> tuple[int, int]:
    """Fewest and most bytes of a chunk."""
    packed = ceil_div(values, trits_a_byte(coder))
    least = {NONE: packed, ZRE: ceil_div(packed, LONGEST_RUN), RICE: 0, TWO_BIT: packed}
    return least[coder], packed


def trits_a_byte(coder: int) -> int:
    return 4 if coder == TWO_BIT else 5


def check_size(frame: Frame, coder: int, bucket: int) -> None:
    size = len(frame.payload)
    if size > 0:
        require(frame.n > 0, "corrupt_payload", "a payload for no values")
        least, most = Shape(frame, coder, bucket).limits()
        require(least <= size <= most, "corrupt_payload", f"{size} bytes, not {least} to {most}")


def decode(frame: Frame, coder: int, bucket: int) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    shape = Shape(frame, coder, bucket)
    scales = [payload[i : i + 4] for i in range(0, shape.sizes_at, 4)]
    for i, scale in enumerate(scales):
        require(little(scale) < 0x7F800000, "corrupt_payload", f"scale {i}: {scale.hex()}")
    require(any(map(any, scales)), "corrupt_payload", "all scales are zero")

    codes = payload[shape.codes_at :]
    if shape.has_sizes:
        sizes = list(struct.unpack_from(f"<{shape.chunk_count}H", payload, shape.sizes_at))
        require(sum(sizes) == len(codes), "corrupt_payload", "sizes don't add up")
    elif coder in (NONE, TWO_BIT):
        per_byte = trits_a_byte(coder)
        sizes = [ceil_div(shape.chunk_values(i), per_byte) for i in range(shape.chunk_count)]
    else:
        sizes = [len(codes)]
    trits: list[int] = []
    for i, size in enumerate(sizes):
        trits += decode_chunk(codes[:size], coder, shape.chunk_values(i))
        codes = codes[size:]

    parts = []
    for i, positive in enumerate(scales):
        negative = positive[:3] + bytes([positive[3] | 0x80])
        value = {0: bytes(4), 1: positive, -1: negative}
        parts += [value[q] for q in trits[i * shape.bucket : (i + 1) * shape.bucket]]
    return b"".join(parts)


def decode_chunk(codes: bytes, coder: int, count: int) -> list[int]:
    if coder == RICE and len(codes) < ceil_div(count, 5):
        return rice.decode(codes, count)
    packed = zero_run_decode(codes, ceil_div(count, 5)) if coder == ZRE else codes
    require(
        len(packed) == ceil_div(count, trits_a_byte(coder)),
        "corrupt_payload",
        "more than packed bytes",
    )
    trits = unpack_two_bits(packed) if coder == TWO_BIT else unpack_trits(packed)
    require(not any(trits[count:]), "corrupt_payload", "padding is not zero")
    return trits[:count]


def zero_run_decode(codes: bytes, packed_size: int) -> bytes:
    packed = bytearray()
    for code in codes:
        packed += bytes([code]) if code <= 242 else bytes([ZERO_BYTE]) * (code - 243 + 2)
        require(len(packed) <= packed_size, "corrupt_payload", "codes for too many bytes")
    require(len(packed) == packed_size, "corrupt_payload", "codes for too few bytes")
    return bytes(packed)


def unpack_trits(packed: bytes) -> list[int]:
    trits = []
    for byte in packed:
        require(byte <= 242, "corrupt_payload", f"packed byte {byte}")
        trits += [byte // weight % 3 - 1 for weight in (81, 27, 9, 3, 1)]
    return trits


def unpack_two_bits(packed: bytes) -> list[int]:
    codes = [byte >> shift & 3 for byte in packed for shift in (0, 2, 4, 6)]
    require(3 not in codes, "corrupt_payload", "code 3")
    return [(0, 1, -1)[code] for code in codes]


# --- Encoding ---------------------------------------------------------------------------------


def encode(scales: list[float], trits: list[int], coder: int) -> bytes:
    if not any(scales):
        return b""
    chunks = [
        encode_chunk(trits[first : first + CHUNK_VALUES], coder)
        for first in range(0, len(trits), CHUNK_VALUES)
    ]
    listed = coder not in (NONE, TWO_BIT) and len(chunks) > 1
    sizes = [len(chunk).to_bytes(2, "little") for chunk in chunks] if listed else []
    return to_bytes(scales) + b"".join(sizes) + b"".join(chunks)


def encode_chunk(trits: list[int], coder: int) -> bytes:
    if coder == TWO_BIT:
        return pack_two_bits(trits)
    packed = pack_trits(trits)
    if coder == RICE:
        coded = rice.encode(trits)
        return coded if len(coded) < len(packed) else packed
    return zero_run_encode(packed) if coder == ZRE else packed


def pack_trits(trits: list[int]) -> bytes:
    digits = [q + 1 for q in trits] + [1] * (-len(trits) % 5)
    groups = zip(*[iter(digits)] * 5, strict=True)
    return bytes(81 * a + 27 * b + 9 * c + 3 * d + e for a, b, c, d, e in groups)


def pack_two_bits(trits: list[int]) -> bytes:
    codes = [q % 3 for q in trits] + [0] * (-len(trits) % 4)
    groups = zip(*[iter(codes)] * 4, strict=True)
    return bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in groups)


def zero_run_encode(packed: bytes) -> bytes:
    codes, at = bytearray(), 0
    while at < len(packed):
        run = 0
        while run < LONGEST_RUN and packed[at + run : at + run + 1] == bytes([ZERO_BYTE]):
            run += 1
        codes.append(243 + run - 2 if run >= 2 else packed[at])
        at += max(run, 1)
    return bytes(codes)
