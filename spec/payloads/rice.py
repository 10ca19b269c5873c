"""Coder rice: gaps between non-zero trits in Golomb-Rice code, with one k for 32 of them."""

from __future__ import annotations

from dataclasses import dataclass

from common import require

BLOCK = 32
HEAD_BITS = 4
ESCAPE = 11
GAP_BITS = 16
PADDING = 8  # fewer zero bits than this may follow the last code


@dataclass
class Bits:
    """Reads bits, the lowest bit of each byte first."""

    data: bytes
    at: int = 0

    def left(self) -> int:
        return 8 * len(self.data) - self.at

    def take(self, count: int) -> int:
        require(count <= self.left(), "corrupt_payload", "a code is cut")
        value = int.from_bytes(self.data, "little") >> self.at & ((1 << count) - 1)
        self.at += count
        return value

    def ended(self) -> bool:
        return self.left() < PADDING and not int.from_bytes(self.data, "little") >> self.at


def decode(data: bytes, count: int) -> list[int]:
    """The `count` trits of a chunk."""
    bits, trits = Bits(data), [0] * count
    at = 0
    while not bits.ended():
        k = bits.take(HEAD_BITS)
        for i in range(BLOCK):
            if i > 0 and bits.ended():
                break
            gap, sign = take_code(bits, k)
            at += gap
            require(at < count, "corrupt_payload", "a non-zero beyond the end")
            trits[at] = -1 if sign else 1
            at += 1
    return trits


def take_code(bits: Bits, k: int) -> tuple[int, int]:
    zeros = 0
    while zeros < ESCAPE and bits.take(1) == 0:
        zeros += 1
    sign = bits.take(1)
    if zeros == ESCAPE:
        return bits.take(GAP_BITS), sign
    return (zeros << k) + bits.take(k), sign


# --- Encoding ---------------------------------------------------------------------------------


def encode(trits: list[int]) -> bytes:
    places = [i for i, q in enumerate(trits) if q]
    gaps = [i - before - 1 for before, i in zip([-1, *places], places, strict=False)]
    value, length = 0, 0
    for first in range(0, len(gaps), BLOCK):
        block = gaps[first : first + BLOCK]
        k = min(range(1 << HEAD_BITS), key=lambda k: sum(code(gap, 0, k)[1] for gap in block))
        pieces = [(k, HEAD_BITS)]
        for gap, place in zip(block, places[first : first + BLOCK], strict=True):
            pieces.append(code(gap, int(trits[place] < 0), k))
        for bits, count in pieces:
            value |= bits << length
            length += count
    return value.to_bytes((length + 7) // 8, "little")


def code(gap: int, sign: int, k: int) -> tuple[int, int]:
    """The bits of a code, and their number."""
    quotient, remainder = gap >> k, gap & ((1 << k) - 1)
    if quotient >= ESCAPE:
        return (gap << 1 | sign) << ESCAPE, ESCAPE + 1 + GAP_BITS
    return ((remainder << 1 | sign) << 1 | 1) << quotient, quotient + 2 + k
