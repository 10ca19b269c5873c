"""int8: 255 levels up to the largest magnitude of a group."""

from __future__ import annotations

from common import Draws, Frame, ceil_div, f32, group_size, little, require, to_bytes, to_floats

NUMBER, NAME = 4, "int8"
CARRIES_NON_FINITE = False
LEAVES_OUT_ZEROS = False
LARGEST_UNIT_BITS = 0x7C010203


def check_parameters(param_a: int, param_b: int) -> None:
    require(param_a == 0, "reserved_bits", "param_a of int8 is reserved")


def check_size(frame: Frame) -> None:
    size = len(frame.payload)
    whole = 4 * ceil_div(frame.n, group_size(frame.n, frame.param_b)) + frame.n
    fits = size == 0 or (frame.n > 0 and size == whole)
    require(fits, "corrupt_payload", f"int8 takes 0 or {whole} bytes")


def decode(frame: Frame) -> bytes:
    if not frame.payload:
        return bytes(4 * frame.n)
    group = group_size(frame.n, frame.param_b)
    head = 4 * ceil_div(frame.n, group)
    for i in range(0, head, 4):
        fits = little(frame.payload[i : i + 4]) <= LARGEST_UNIT_BITS
        require(fits, "corrupt_payload", f"unit {i // 4}")
    require(any(frame.payload[:head]), "corrupt_payload", "all units are zero")
    units = to_floats(frame.payload[:head])
    levels = [byte - 256 if byte > 127 else byte for byte in frame.payload[head:]]
    require(-128 not in levels, "corrupt_payload", "level -128")
    return to_bytes([f32(q * units[i // group]) for i, q in enumerate(levels)])


# --- Encoding ---------------------------------------------------------------------------------


def read(keys: dict[str, str]) -> int:
    """The group size."""
    return int(keys.get("bucket", "0"))


def parameters(options: int) -> tuple[int, int]:
    return 0, options


def encode(values: list[float], options: int, draws: Draws) -> bytes:
    (largest_unit,) = to_floats(LARGEST_UNIT_BITS.to_bytes(4, "little"))
    group = group_size(len(values), options)
    units, levels = [], b""
    for first in range(0, len(values), group):
        part = values[first : first + group]
        unit = min(f32(max(map(abs, part)) / 127), largest_unit)
        units.append(unit)
        for b in part:
            q = round(min(max(f32(b / unit), -127), 127)) if unit else 0  # half to even
            levels += bytes([q & 0xFF])
    return to_bytes(units) + levels if any(units) else b""
