"""truncate: the upper bits of each float, in two planes."""

from __future__ import annotations

from common import Draws, Frame, ceil_div, little, require, to_bytes
from payloads import chunks

NUMBER, NAME = 8, "truncate"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = False
CUT = (16, 22, 24)


def low_bits(param_a: int) -> int:
    """Bits that are sent beside the upper 8 of a value."""
    return 24 - CUT[param_a]


def chunk_size(count: int, low: int) -> int:
    return count + ceil_div(count * low, 8)


def check_parameters(param_a: int, param_b: int) -> None:
    known = param_a < len(CUT) and param_b == 0
    require(known, "reserved_bits", f"truncate parameters {param_a:#06x}, {param_b:#010x}")


def check_size(frame: Frame) -> None:
    n, low = frame.n, low_bits(frame.param_a)
    expected = chunks.total(n, lambda count: chunk_size(count, low)) if n else 0
    fits = len(frame.payload) == expected
    require(fits, "corrupt_payload", f"{len(frame.payload)} bytes for {n} values")


def decode(frame: Frame) -> bytes:
    low = low_bits(frame.param_a)
    parts = chunks.split(frame.payload, frame.n, 0, lambda count: chunk_size(count, low))
    return b"".join(decode_chunk(chunk, count, low) for chunk, count in parts)


def decode_chunk(chunk: bytes, count: int, low: int) -> bytes:
    plane = little(chunk[count:])
    require(plane >> low * count == 0, "corrupt_payload", "padding bits are set")
    fields = (plane >> low * i & ((1 << low) - 1) for i in range(count))
    words = (high << 24 | field << (24 - low) for high, field in zip(chunk, fields, strict=False))
    return b"".join(word.to_bytes(4, "little") for word in words)


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> int:
    """The place of the number of bits in CUT."""
    return CUT.index(int(keys.get("bits", "16")))


def parameters(options: int) -> tuple[int, int]:
    return options, 0


def encode(values: list[float], options: int, draws: Draws) -> bytes:
    low = low_bits(options)
    tensor = to_bytes(values)
    words = [little(tensor[i : i + 4]) for i in range(0, len(tensor), 4)]
    payload = b""
    for part in chunks.cut(words):
        plane = sum(
            (word >> (24 - low) & ((1 << low) - 1)) << low * i for i, word in enumerate(part)
        )
        payload += bytes(word >> 24 for word in part)
        payload += plane.to_bytes(ceil_div(low * len(part), 8), "little")
    return payload
