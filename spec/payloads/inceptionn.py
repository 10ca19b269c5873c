"""inceptionn: of each float as many bits as its size calls for, in bursts of eight."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from common import Draws, Frame, ceil_div, little, require, to_bytes

NUMBER, NAME = 7, "inceptionn"
CARRIES_NON_FINITE = True
CHUNK_VALUES, BURST = 40960, 8
BOUNDS = (10, 8, 6)
CODE_SIZE = (0, 1, 2, 4)  # bytes, by tag


def check_parameters(param_a: int, param_b: int) -> None:
    known = param_a & 3 < len(BOUNDS) and param_a >> 3 == 0 and param_b == 0
    require(known, "reserved_bits", f"inceptionn parameters {param_a:#06x}, {param_b:#010x}")


def check_size(frame: Frame) -> None:
    n, size = frame.n, len(frame.payload)
    chunks = ceil_div(n, CHUNK_VALUES)
    least = (4 * chunks if chunks > 1 else 0) + 2 * ceil_div(n, BURST)
    fits = least <= size <= least + 4 * n
    require(fits, "corrupt_payload", f"{size} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    chunks, sizes = ceil_div(n, CHUNK_VALUES), [len(payload)]
    if chunks > 1:
        sizes = list(struct.unpack_from(f"<{chunks}I", payload))
        payload = payload[4 * chunks :]
    require(sum(sizes) == len(payload), "corrupt_payload", "sizes don't add up")
    values = b""
    for i, size in enumerate(sizes):
        values += decode_chunk(payload[:size], min(CHUNK_VALUES, n - i * CHUNK_VALUES))
        payload = payload[size:]
    return values


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
    require(at == len(chunk), "corrupt_payload", "bytes behind the last burst")
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
    chunks = []
    for begin in range(0, len(codes), CHUNK_VALUES):
        chunk = b""
        for first in range(begin, min(begin + CHUNK_VALUES, len(codes)), BURST):
            burst = codes[first : first + BURST]
            tags = sum(tag << 2 * i for i, (tag, _) in enumerate(burst))
            chunk += tags.to_bytes(2, "little") + b"".join(code for _, code in burst)
        chunks.append(chunk)
    sizes = [len(chunk).to_bytes(4, "little") for chunk in chunks] if len(chunks) > 1 else []
    return b"".join(sizes) + b"".join(chunks)
