"""inceptionn: each float takes 0, 8, 16 or 32 bits by its magnitude, in bursts of eight."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import Draws, Frame, ceil_div, little, require, to_bytes
from payloads import chunks

NUMBER, NAME = 7, "inceptionn"
CARRIES_NON_FINITE = True
LEAVES_OUT_ZEROS = False
BURST, SIZE_WIDTH = 8, 4
BOUNDS = (10, 8, 6)
CODE_SIZE = (0, 1, 2, 4)  # bytes, by tag


def check_parameters(param_a: int, param_b: int) -> None:
    known = param_a & 3 < len(BOUNDS) and param_a >> 3 == 0 and param_b == 0
    require(known, "reserved_bits", f"inceptionn parameters {param_a:#06x}, {param_b:#010x}")


def check_size(frame: Frame) -> None:
    n, size = frame.n, len(frame.payload)
    least = chunks.sizes_bytes(n, SIZE_WIDTH) + 2 * ceil_div(n, BURST)
    fits = least <= size <= least + 4 * n
    require(fits, "corrupt_payload", f"{size} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    parts = chunks.split(frame.payload, frame.n, SIZE_WIDTH)
    return b"".join(decode_chunk(chunk, count) for chunk, count in parts)


def decode_chunk(chunk: bytes, count: int) -> bytes:
    values, at = [], 0
    for first in range(0, count, BURST):
        require(at + 2 <= len(chunk), "corrupt_payload", "the tags are cut off")
        tags, at = little(chunk[at : at + 2]), at + 2
        present = min(BURST, count - first)
        require(tags >> 2 * present == 0, "corrupt_payload", "an absent value has a tag")
        for i in range(present):
            tag = tags >> 2 * i & 3
            code, at = chunk[at : at + CODE_SIZE[tag]], at + CODE_SIZE[tag]
            require(len(code) == CODE_SIZE[tag], "corrupt_payload", "a code is cut off")
            values.append(decode_value(tag, code))
    require(at == len(chunk), "corrupt_payload", "bytes after the last burst")
    return b"".join(values)


def decode_value(tag: int, code: bytes) -> bytes:
    if tag == 3:
        return code
    if tag == 0:
        return bytes(4)
    bits = 8 * len(code)
    sign, magnitude = little(code) >> (bits - 1), little(code) & ((1 << (bits - 1)) - 1)
    return to_bytes([math.copysign(math.ldexp(magnitude, 1 - bits), -1.0 if sign else 1.0)])


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    bound: int
    strict: bool


def read(keys: dict[str, str]) -> Options:
    return Options(int(keys.get("bound", "10")), keys.get("mode") == "strict")


def parameters(options: Options) -> tuple[int, int]:
    return BOUNDS.index(options.bound) | options.strict << 2, 0


def encode_value(value: bytes, options: Options) -> tuple[int, bytes]:
    """The tag and the code of a float32."""
    bits = little(value)
    sign, e, m = bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF
    least = 127 - options.bound
    if e >= 127:
        return 3, value
    if e < least:
        return 0, b""
    shifted = (1 << 23 | m) >> (127 - e)
    too_much = options.strict and shifted & 0xFFFF >= 1 << (23 - options.bound)
    if e >= least + ceil_div(options.bound, 2) or too_much:
        return 2, (sign << 15 | shifted >> 8).to_bytes(2, "little")
    return 1, (sign << 7 | shifted >> 16).to_bytes(1, "little")


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    tensor = to_bytes(values)
    codes = [encode_value(tensor[i : i + 4], options) for i in range(0, len(tensor), 4)]
    coded = []
    for part in chunks.cut(codes):
        chunk = b""
        for first in range(0, len(part), BURST):
            burst = part[first : first + BURST]
            tags = sum(tag << 2 * i for i, (tag, _) in enumerate(burst))
            chunk += tags.to_bytes(2, "little") + b"".join(code for _, code in burst)
        coded.append(chunk)
    return chunks.join(coded, SIZE_WIDTH)
