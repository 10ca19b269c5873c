"""qsgd: levels, drawn at random, times the unit of their group; in equal bits or Elias codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import (
    FLT_MAX,
    Draws,
    Frame,
    add_in_order,
    add_lanes,
    ceil_div,
    f32,
    little,
    require,
    to_bytes,
    to_floats,
)
from payloads import chunks

NUMBER, NAME = 24, "qsgd"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = False
FIXED, SPARSE, DENSE = 0, 1, 2  # coders
CODERS = {"fixed": FIXED, "elias": SPARSE, "elias-dense": DENSE}
NORMS = ("max", "l2")


def largest_level(param_a: int) -> int:
    return param_a & 127 | param_a >> 10 << 7


def check_parameters(param_a: int, param_b: int) -> None:
    known = largest_level(param_a) > 0 and param_a >> 7 & 3 <= DENSE
    require(known, "reserved_bits", f"qsgd param_a {param_a:#06x}")
    require(param_b > 0 and param_b % 8 == 0, "reserved_bits", f"qsgd group {param_b}")


class Shape:
    """The places of a payload's parts. `s` is the largest level."""

    def __init__(self, n: int, param_a: int, group: int) -> None:
        self.n, self.group = n, group
        self.s, self.coder = largest_level(param_a), param_a >> 7 & 3
        self.width = (2 * self.s).bit_length()
        self.sizes_at = 4 * ceil_div(n, group)
        # Bytes of a listed chunk size; 0 if the number of values gives the size.
        self.size_width = 2 if self.most_bytes(chunks.CHUNK_VALUES) < 65536 else 4
        if self.coder == FIXED:
            self.size_width = 0

    def most_bytes(self, count: int) -> int:
        """The most bytes of a chunk of `count` values."""
        bits = {
            FIXED: count * self.width,
            SPARSE: count * (2 + len(elias(self.s))) + 1,
            DENSE: count * (1 + len(elias(self.s + 1))),
        }
        return ceil_div(bits[self.coder], 8)

    def least_bytes(self, count: int) -> int:
        bits = {FIXED: count * self.width, SPARSE: len(elias(count + 1)), DENSE: count}
        return ceil_div(bits[self.coder], 8)

    def limits(self) -> tuple[int, int]:
        """Fewest and most bytes of the payload."""
        before = self.sizes_at + chunks.sizes_bytes(self.n, self.size_width)
        least, most = (chunks.total(self.n, size) for size in (self.least_bytes, self.most_bytes))
        return before + least, before + most


def check_size(frame: Frame) -> None:
    size = len(frame.payload)
    if size > 0:
        require(frame.n > 0, "corrupt_payload", "a payload for no values")
        least, most = Shape(frame.n, frame.param_a, frame.param_b).limits()
        require(least <= size <= most, "corrupt_payload", f"{size} bytes, not {least} to {most}")


def decode(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    shape = Shape(n, frame.param_a, frame.param_b)
    for i in range(0, shape.sizes_at, 4):
        fits = little(payload[i : i + 4]) < 0x7F800000
        require(fits, "corrupt_payload", f"unit {i // 4}: {payload[i : i + 4].hex()}")
    units = to_floats(payload[: shape.sizes_at])
    require(all(f32(u * shape.s) <= FLT_MAX for u in units), "corrupt_payload", "a unit too large")
    require(any(units), "corrupt_payload", "all units are zero")

    fixed = shape.most_bytes if shape.coder == FIXED else None
    levels: list[int] = []
    for chunk, count in chunks.split(payload[shape.sizes_at :], n, shape.size_width, fixed):
        levels += decode_chunk(shape, chunk, count)
    require(all(abs(q) <= shape.s for q in levels), "corrupt_payload", "a level above s")
    values = [f32(q * units[i // shape.group]) for i, q in enumerate(levels)]
    return to_bytes(values)


def decode_chunk(shape: Shape, chunk: bytes, count: int) -> list[int]:
    if shape.coder == FIXED:
        bits = little(chunk)
        require(bits >> count * shape.width == 0, "corrupt_payload", "padding is not zero")
        mask = (1 << shape.width) - 1
        return [(bits >> i * shape.width & mask) - shape.s for i in range(count)]
    reader = BitReader(chunk)
    levels = [0] * count
    if shape.coder == SPARSE:
        at = reader.elias() - 1
        while at < count:
            sign = reader.take(1)
            levels[at] = (1 - 2 * sign) * reader.elias()
            at += reader.elias()
        require(at == count, "corrupt_payload", "a distance beyond the end")
    else:
        for i in range(count):
            magnitude = reader.elias() - 1
            levels[i] = -magnitude if magnitude and reader.take(1) else magnitude
    rest = reader.rest()
    require(len(rest) < 8 and "1" not in rest, "corrupt_payload", "bytes left over")
    return levels


class BitReader:
    """Reads bits, the highest bit of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.bits = "".join(f"{byte:08b}" for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        require(self.at + count <= len(self.bits), "corrupt_payload", "codes are cut off")
        self.at += count
        return int(self.bits[self.at - count : self.at], 2)

    def elias(self) -> int:
        value = 1
        while self.take(1):
            require(value < 16, "corrupt_payload", "a number of 65536 or more")
            value = 1 << value | self.take(value)
        return value

    def rest(self) -> str:
        return self.bits[self.at :]


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    s: int
    group: int
    norm: str
    coder: int


def read(keys: dict[str, str]) -> Options:
    return Options(
        s=int(keys.get("levels", 2 ** (int(keys.get("bits", "4")) - 1) - 1)),
        group=int(keys.get("bucket", "512")),
        norm=keys.get("norm", "max"),
        coder=CODERS[keys.get("coder", "fixed")],
    )


def parameters(options: Options) -> tuple[int, int]:
    norm = NORMS.index(options.norm)
    return options.s & 127 | options.coder << 7 | norm << 9 | options.s >> 7 << 10, options.group


def elias(k: int) -> str:
    code = "0"
    while k > 1:
        code = f"{k:b}" + code
        k = k.bit_length() - 1
    return code


def step(value: float, count: int) -> float:
    """The float32 that is `count` steps above a positive value, or below it if count < 0."""
    return to_floats((little(to_bytes([value])) + count).to_bytes(4, "little"))[0]


def norm_of(part: list[float], norm: str) -> float:
    if norm == "max":
        return max(map(abs, part))
    squares = [b * b for b in part]
    total = add_in_order([add_lanes(squares[i : i + 4096]) for i in range(0, len(part), 4096)])
    return min(f32(math.sqrt(total)), FLT_MAX)


def unit_of(norm: float, s: int) -> float:
    unit = f32(norm / s)
    if unit * s < norm:
        unit = step(unit, 1)
    if f32(unit * s) > FLT_MAX:
        unit = step(unit, -1)
    return unit


def fraction_of(s: int) -> int:
    """Bits after the point of a level in fixed point: with those of s they fill 31 bits."""
    return min(24, 31 - s.bit_length())


def inverse_of(unit: float, s: int) -> tuple[float, float]:
    one = 2.0 ** fraction_of(s)
    prescale = 2.0**64 if unit < 2.0**-64 else 1.0
    bound = FLT_MAX if f32(step(unit, 1) * s) > FLT_MAX else f32(unit * s)
    inverse = f32(one / f32(unit * prescale))
    while f32(f32(bound * prescale) * inverse) > s * one:
        inverse = step(inverse, -1)
    return prescale, inverse


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    words = draws.words(len(values))
    bits = fraction_of(options.s)
    units: list[float] = []
    levels: list[int] = []
    for first in range(0, len(values), options.group):
        part = values[first : first + options.group]
        unit = unit_of(norm_of(part, options.norm), options.s)
        units.append(unit)
        if unit == 0:
            levels += [0] * len(part)
            continue
        prescale, inverse = inverse_of(unit, options.s)
        for b, word in zip(part, words[first:], strict=False):
            fixed = math.trunc(f32(f32(b * prescale) * inverse))
            levels.append(fixed + (word >> 32 - bits) >> bits)
    if not any(units):
        return b""
    shape = Shape(len(values), *parameters(options))
    coded = [encode_chunk(part, shape) for part in chunks.cut(levels)]
    return to_bytes(units) + chunks.join(coded, shape.size_width)


def encode_chunk(levels: list[int], shape: Shape) -> bytes:
    if shape.coder == FIXED:
        bits = sum(q + shape.s << i * shape.width for i, q in enumerate(levels))
        return bits.to_bytes(shape.most_bytes(len(levels)), "little")
    text: list[str] = []
    if shape.coder == SPARSE:
        before = -1
        for at, q in enumerate(levels):
            if q != 0:
                text += [elias(at - before), "01"[q < 0], elias(abs(q))]
                before = at
        text.append(elias(len(levels) - before))
    else:
        for q in levels:
            text += [elias(abs(q) + 1), "01"[q < 0] if q else ""]
    code = "".join(text)
    return b"".join(
        int(code[i : i + 8].ljust(8, "0"), 2).to_bytes(1, "little") for i in range(0, len(code), 8)
    )
