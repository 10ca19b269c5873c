"""topk: the values of largest magnitude, and their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import Draws, Frame, ceil_div, f32, little, narrow_tensor, require, to_bytes, widen_bf16
from payloads import chunks, ternary

NUMBER, NAME = 6, "topk"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True
BF16, RICE = 1, 2  # bits of param_a
SIZE_WIDTH = 4


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a <= 3, "reserved_bits", f"topk param_a {param_a:#06x}")


def check_size(frame: Frame) -> None:
    n, size = frame.n, len(frame.payload)
    if size > 0:
        sizes = chunks.sizes_bytes(n, SIZE_WIDTH)
        if frame.param_a & RICE:
            least = sizes + 2 * chunks.count_chunks(n)
            most = least + ceil_div(n, 5)
        else:
            least = most = sizes + ceil_div(n, 8)
        fits = n > 0 and least < size <= most + width(frame) * n
        require(fits, "corrupt_payload", f"{size} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    parts = chunks.split(payload, n, SIZE_WIDTH)
    return b"".join(decode_chunk(chunk, count, frame) for chunk, count in parts)


def width(frame: Frame) -> int:
    return 2 if frame.param_a & BF16 else 4


def read_index(chunk: bytes, count: int, frame: Frame) -> tuple[int, int]:
    """The size of the index in bytes, and a number in which bit i is set if value i is sent."""
    if frame.param_a & RICE:
        size = 2 + little(chunk[:2])
        require(len(chunk) >= size >= 2, "corrupt_payload", "the index is cut off")
        trits = ternary.decode_chunk(chunk[2:size], ternary.RICE, count)
        require(-1 not in trits, "corrupt_payload", "an index has no signs")
        return size, sum(trit << i for i, trit in enumerate(trits))
    size, bits = ceil_div(count, 8), little(chunk[: ceil_div(count, 8)])
    require(len(chunk) >= size, "corrupt_payload", "the map is cut off")
    require(bits >> count == 0, "corrupt_payload", "padding is not zero")
    return size, bits


def decode_chunk(chunk: bytes, count: int, frame: Frame) -> bytes:
    index_size, bits = read_index(chunk, count, frame)
    fits = len(chunk) == index_size + width(frame) * bits.bit_count()
    require(fits, "corrupt_payload", "more or fewer values than bits")
    sent = chunk[index_size:]
    if frame.param_a & BF16:
        sent = widen_bf16(sent)
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
    flags: int


def read(keys: dict[str, str]) -> Options:
    flags = BF16 * (keys.get("values") == "bf16") | RICE * (keys.get("index") == "rice")
    return Options(f32(float(keys.get("ratio", "0.05"))), flags)


def parameters(options: Options) -> tuple[int, int]:
    return options.flags, little(to_bytes([options.ratio]))


def threshold(values: list[float], fraction: float) -> float:
    if fraction == 1:
        return 2.0**-149
    n = len(values)
    count = min(n, 4096)
    edges = [n // count * i + n % count * i // count for i in range(count + 1)]
    samples = [
        abs(values[edges[i] + (word * (edges[i + 1] - edges[i]) >> 32)])
        for i, word in enumerate(Draws().words(count))
    ]
    rank = count_sent(fraction, count)
    return max(sorted(samples, reverse=True)[rank - 1], 2.0**-149)


def count_sent(fraction: float, count: int) -> int:
    """The number of values that is nearest to a fraction of `count`, but at least one."""
    return min(max(math.floor(f32(fraction * count) + 0.5), 1), count)


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    if not any(values):
        return b""
    least = threshold(values, options.ratio)
    coded = []
    for part in chunks.cut(values):
        trits = [int(abs(b) >= least) for b in part]
        sent = to_bytes([b for b in part if abs(b) >= least])
        body = narrow_tensor(sent) if options.flags & BF16 else sent
        if options.flags & RICE:
            codes = ternary.encode_chunk(trits, ternary.RICE)
            index = len(codes).to_bytes(2, "little") + codes
        else:
            bits = sum(trit << i for i, trit in enumerate(trits))
            index = bits.to_bytes(ceil_div(len(part), 8), "little")
        coded.append(index + body)
    return chunks.join(coded, SIZE_WIDTH)
