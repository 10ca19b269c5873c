"""topk2bit: the largest of each 4096 values, each as its sign and one of two magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

from common import Draws, Frame, ceil_div, f32, little, require, to_bytes
from payloads import chunks, ternary
from payloads.topk import count_sent

NUMBER, NAME = 21, "topk2bit"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = True
GROUP = 4096
HEAD = 10  # two magnitudes, and the size of the trits
SIZE_WIDTH = 2


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a == 0, "reserved_bits", f"topk2bit param_a {param_a:#06x}")


def check_size(frame: Frame) -> None:
    n, size = frame.n, len(frame.payload)
    if size > 0:
        least = chunks.sizes_bytes(n, SIZE_WIDTH) + HEAD * chunks.count_chunks(n)
        most = least + ceil_div(n, 5) + ceil_div(n, 8)  # a full chunk is a multiple of 40
        require(n > 0 and least <= size <= most, "corrupt_payload", f"{size} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    return b"".join(decode_chunk(*part) for part in chunks.split(payload, n, SIZE_WIDTH))


def decode_chunk(chunk: bytes, count: int) -> bytes:
    require(len(chunk) >= HEAD, "corrupt_payload", "the head is cut off")
    magnitudes = [chunk[0:4], chunk[4:8]]
    for magnitude in magnitudes:
        require(little(magnitude) < 0x7F800000, "corrupt_payload", f"magnitude {magnitude.hex()}")
    end = HEAD + little(chunk[8:10])
    require(end <= len(chunk), "corrupt_payload", "the trits are cut off")
    trits = ternary.decode_chunk(chunk[HEAD:end], ternary.RICE, count)
    sent = sum(map(abs, trits))
    require(len(chunk) == end + ceil_div(sent, 8), "corrupt_payload", "more or fewer bits")
    bits = little(chunk[end:])
    require(bits >> sent == 0, "corrupt_payload", "padding is not zero")
    values = bytearray(4 * count)
    for i, trit in enumerate(trits):
        if trit:
            magnitude = magnitudes[bits & 1]
            bits >>= 1
            sign = 0x80 if trit < 0 else 0
            values[4 * i : 4 * i + 4] = magnitude[:3] + bytes([magnitude[3] | sign])
    return bytes(values)


# --- Encoding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    density: float


def read(keys: dict[str, str]) -> Options:
    return Options(f32(float(keys.get("density", "0.02"))))


def parameters(options: Options) -> tuple[int, int]:
    return 0, little(to_bytes([options.density]))


def encode(values: list[float], options: Options, draws: Draws) -> bytes:
    if not any(values):
        return b""
    coded = [encode_chunk(part, options.density) for part in chunks.cut(values)]
    return chunks.join(coded, SIZE_WIDTH)


def encode_chunk(values: list[float], density: float) -> bytes:
    places: list[int] = []
    for first in range(0, len(values), GROUP):
        group = range(first, min(first + GROUP, len(values)))
        largest = sorted(group, key=lambda i: (-abs(values[i]), i))
        taken = largest[: count_sent(density, len(group))]
        places += sorted(i for i in taken if values[i] != 0)
    magnitudes = [abs(values[i]) for i in places]
    mean = mean_in_order(magnitudes)
    low = mean_in_order([m for m in magnitudes if m <= mean])
    above = [m for m in magnitudes if m > mean]
    high = mean_in_order(above) if above else low
    trits = [0] * len(values)
    for i in places:
        trits[i] = 1 if values[i] > 0 else -1
    codes = ternary.encode_chunk(trits, ternary.RICE)
    bits = sum((m > mean) << i for i, m in enumerate(magnitudes))
    head = to_bytes([f32(low), f32(high)]) + len(codes).to_bytes(2, "little")
    return head + codes + bits.to_bytes(ceil_div(len(places), 8), "little")


def mean_in_order(magnitudes: list[float]) -> float:
    total = 0.0
    for magnitude in magnitudes:
        total += magnitude
    return total / len(magnitudes) if magnitudes else 0.0
