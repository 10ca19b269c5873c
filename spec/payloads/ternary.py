"""Payloads of values -m, 0 or +m: scales, then the chunks' sizes, then their coded trits."""

from __future__ import annotations

from common import Frame, ceil_div, group_size, little, require, to_bytes
from payloads import chunks, rice

NONE, ZRE, RICE, TWO_BIT = 0, 1, 2, 3  # coders
CODERS = {"none": NONE, "zre": ZRE, "rice": RICE}
ZERO_BYTE = 121
LONGEST_RUN = 14


class Shape:
    """The places of a payload's parts. `group` is the number of values that share a scale."""

    def __init__(self, frame: Frame, coder: int, group: int) -> None:
        self.coder = coder
        self.group = group_size(frame.n, group)
        self.n = frame.n
        self.sizes_at = 4 * ceil_div(frame.n, self.group)

    def limits(self) -> tuple[int, int]:
        """Fewest and most bytes of the payload."""
        before = self.sizes_at + chunks.sizes_bytes(self.n, size_width(self.coder))
        least, most = (chunks.total(self.n, size) for size in (self.least_bytes, self.most_bytes))
        return before + least, before + most

    def most_bytes(self, values: int) -> int:
        """The most bytes of a chunk of `values` values."""
        return ceil_div(values, trits_a_byte(self.coder))

    def least_bytes(self, values: int) -> int:
        packed = self.most_bytes(values)
        least = {NONE: packed, ZRE: ceil_div(packed, LONGEST_RUN), RICE: 0, TWO_BIT: packed}
        return least[self.coder]


def size_width(coder: int) -> int:
    """Bytes of a listed chunk size; 0 if the number of values gives the size."""
    return 0 if coder in (NONE, TWO_BIT) else 2


def trits_a_byte(coder: int) -> int:
    return 4 if coder == TWO_BIT else 5


def check_size(frame: Frame, coder: int, group: int) -> None:
    size = len(frame.payload)
    if size > 0:
        require(frame.n > 0, "corrupt_payload", "a payload for no values")
        least, most = Shape(frame, coder, group).limits()
        require(least <= size <= most, "corrupt_payload", f"{size} bytes, not {least} to {most}")


def decode(frame: Frame, coder: int, group: int) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    shape = Shape(frame, coder, group)
    scales = [payload[i : i + 4] for i in range(0, shape.sizes_at, 4)]
    for i, scale in enumerate(scales):
        require(little(scale) < 0x7F800000, "corrupt_payload", f"scale {i}: {scale.hex()}")
    require(any(map(any, scales)), "corrupt_payload", "all scales are zero")

    width = size_width(coder)
    fixed = None if width else shape.most_bytes
    trits: list[int] = []
    for codes, count in chunks.split(payload[shape.sizes_at :], n, width, fixed):
        trits += decode_chunk(codes, coder, count)

    parts = []
    for i, positive in enumerate(scales):
        negative = positive[:3] + bytes([positive[3] | 0x80])
        value = {0: bytes(4), 1: positive, -1: negative}
        parts += [value[q] for q in trits[i * shape.group : (i + 1) * shape.group]]
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
    coded = [encode_chunk(part, coder) for part in chunks.cut(trits)]
    return to_bytes(scales) + chunks.join(coded, size_width(coder))


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
    fives = zip(*[iter(digits)] * 5, strict=True)
    return bytes(81 * a + 27 * b + 9 * c + 3 * d + e for a, b, c, d, e in fives)


def pack_two_bits(trits: list[int]) -> bytes:
    codes = [q % 3 for q in trits] + [0] * (-len(trits) % 4)
    fours = zip(*[iter(codes)] * 4, strict=True)
    return bytes(a | b << 2 | c << 4 | d << 6 for a, b, c, d in fours)


def zero_run_encode(packed: bytes) -> bytes:
    codes, at = bytearray(), 0
    while at < len(packed):
        run = 0
        while run < LONGEST_RUN and packed[at + run : at + run + 1] == bytes([ZERO_BYTE]):
            run += 1
        codes.append(243 + run - 2 if run >= 2 else packed[at])
        at += max(run, 1)
    return bytes(codes)
