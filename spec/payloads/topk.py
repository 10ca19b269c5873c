"""topk: the values of largest magnitude, and where they stand."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from common import Draws, Frame, ceil_div, f32, little, narrow_tensor, require, to_bytes, widen_bf16

NUMBER, NAME = 6, "topk"
CARRIES_NON_FINITE = False
CHUNK_VALUES = 40960


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a in (0, 1), "reserved_bits", f"topk param_a {param_a:#06x}")


def check_size(frame: Frame) -> None:
    n, size = frame.n, len(frame.payload)
    if size > 0:
        chunks, width = ceil_div(n, CHUNK_VALUES), 2 if frame.param_a else 4
        least = (4 * chunks if chunks > 1 else 0) + ceil_div(n, 8)
        fits = n > 0 and least < size <= least + width * n
        require(fits, "corrupt_payload", f"{size} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    chunks, sizes = ceil_div(n, CHUNK_VALUES), [len(payload)]
    if chunks > 1:
        sizes = list(struct.unpack_from(f"<{chunks}I", payload))
        payload = payload[4 * chunks :]
    require(sum(sizes) == len(payload), "corrupt_payload", "sizes don't add up")
    values = b""
    for i, size in enumerate(sizes):
        count = min(CHUNK_VALUES, n - i * CHUNK_VALUES)
        values += decode_chunk(payload[:size], count, 2 if frame.param_a else 4)
        payload = payload[size:]
    return values


def decode_chunk(chunk: bytes, count: int, width: int) -> bytes:
    map_size = ceil_div(count, 8)
    bits = little(chunk[:map_size])
    require(len(chunk) >= map_size, "corrupt_payload", "the map is cut off")
    require(bits >> count == 0, "corrupt_payload", "padding is not zero")
    fits = len(chunk) == map_size + width * bits.bit_count()
    require(fits, "corrupt_payload", "more or fewer values than bits")
    sent = chunk[map_size:] if width == 4 else widen_bf16(chunk[map_size:])
    values, at = bytearray(4 * count), 0
    for i in range(count):
        if bits >> i & 1:
            values[4 * i : 4 * i + 4] = sent[at : at + 4]
            at += 4
    return bytes(values)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    ratio: float
    bf16: bool


def read(keys: dict[str, str]) -> Options:
    return Options(f32(float(keys.get("ratio", "0.05"))), keys.get("values") == "bf16")


def parameters(options: Options) -> tuple[int, int]:
    return int(options.bf16), little(to_bytes([options.ratio]))


def threshold(values: list[float], fraction: float) -> float:
    n = len(values)
    count = min(n, 4096)
    edges = [n // count * i + n % count * i // count for i in range(count + 1)]
    samples = [
        abs(values[edges[i] + (word * (edges[i + 1] - edges[i]) >> 32)])
        for i, word in enumerate(Draws().words(count))
    ]
    rank = min(max(math.floor(f32(fraction * count) + 0.5), 1), count)
    return max(sorted(samples, reverse=True)[rank - 1], 2.0**-149)


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    if not any(values):
        return b""
    least = threshold(values, options.ratio)
    chunks = []
    for first in range(0, len(values), CHUNK_VALUES):
        part = values[first : first + CHUNK_VALUES]
        bits = sum(1 << i for i, b in enumerate(part) if abs(b) >= least)
        sent = to_bytes([b for b in part if abs(b) >= least])
        body = narrow_tensor(sent) if options.bf16 else sent
        chunks.append(bits.to_bytes(ceil_div(len(part), 8), "little") + body)
    sizes = [len(chunk).to_bytes(4, "little") for chunk in chunks] if len(chunks) > 1 else []
    return b"".join(sizes) + b"".join(chunks)
