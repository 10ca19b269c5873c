"""The wire format of gradwire in plain Python: written to be read beside format.md, in its order.

The third opinion: it shares no code with the C++ core, and the golden files come from it. It is
slow and holds everything in memory.

    python spec/reference.py FILE       prints the header and the values of a frame or a packet

Needs the package `xxhash` and nothing else outside the standard library. A tensor is `bytes`, its
values as little-endian float32, so that every bit of it is kept.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass

import xxhash

# --- Conventions ------------------------------------------------------------------------------

FLT_MAX = 3.4028234663852886e38
QUIET_NAN = bytes.fromhex("0000c07f")  # 0x7fc00000


class FormatError(ValueError):
    """Bytes that are refused. `status` is the name of a status code of format.md."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def require(condition: bool, status: str, message: str) -> None:
    if not condition:
        raise FormatError(status, message)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def f32(value: float) -> float:
    """Rounds to float32, half to even, too large to infinity.

    Python's arithmetic on doubles followed by this is float32 arithmetic: for +, -, * and / of two
    float32, rounding first to double and then to float32 gives what rounding once gives.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def to_floats(tensor: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(tensor) // 4}f", tensor))


def to_bytes(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# --- Frame ------------------------------------------------------------------------------------

VERSION = 1
HEADER_SIZE = 32
MAX_VALUES = 2**40
NON_FINITE_FLAG = 1
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
RAW, BF16, THREE_LC = 1, 2, 16
CODEC_NAMES = {RAW: "raw", BF16: "bf16", THREE_LC: "3lc"}


@dataclass(frozen=True)
class Frame:
    """One encoded tensor; also one of a packet, whose table gives codec, dtype and parameters."""

    codec: int
    dtype: int
    param_a: int
    param_b: int
    n: int
    payload: bytes
    non_finite: bool = False


def checksum(before: bytes, after: bytes) -> int:
    """Of all bytes but the checksum field itself, which lies between the two."""
    return int(xxhash.xxh3_64_intdigest(before + after)) & 0xFFFFFFFF


def parse_frame(data: bytes) -> Frame:
    """Checks everything but the payload's content."""
    require(len(data) >= HEADER_SIZE, "truncated", f"{len(data)} bytes are no frame header")
    require(data[0:2] == b"GW", "bad_magic", f"starts with {data[0:2].hex(' ')}, not 47 57")
    require(data[2] == VERSION, "unsupported_version", f"version {data[2]}, known is {VERSION}")
    codec, dtype, flags = data[3], data[4], data[5]
    require(flags & ~NON_FINITE_FLAG == 0, "reserved_bits", f"flags {flags:#04x}")
    check_codec(codec)
    check_dtype(dtype)
    param_a, n, param_b = little(data[6:8]), little(data[8:16]), little(data[16:20])
    stored, length = little(data[20:24]), little(data[24:32])
    require(n <= MAX_VALUES, "limit_exceeded", f"{n} values, at most 2^40")
    payload = data[HEADER_SIZE:]
    require(length <= len(payload), "truncated", f"payload {length} bytes, here {len(payload)}")
    require(length >= len(payload), "trailing_bytes", f"{len(payload) - length} after the payload")
    require(stored == checksum(data[0:20], data[24:]), "checksum_mismatch", "of the frame")
    check_parameters(codec, param_a, param_b)
    frame = Frame(codec, dtype, param_a, param_b, n, payload, flags & NON_FINITE_FLAG != 0)
    if frame.non_finite:
        require(not payload, "corrupt_payload", "a marker frame with a payload")
    else:
        check_size(frame)
    return frame


def check_codec(codec: int) -> None:
    require(codec in CODEC_NAMES, "unknown_codec", f"codec {codec}")


def check_dtype(dtype: int) -> None:
    require(dtype in (FLOAT32, BFLOAT16, FLOAT16), "unsupported_dtype", f"dtype {dtype}")


def check_parameters(codec: int, param_a: int, param_b: int) -> None:
    if codec == THREE_LC:
        require(param_a & 3 in (NONE, ZRE), "reserved_bits", f"3lc coder {param_a & 3}")
        require(param_b % 5 == 0, "reserved_bits", f"3lc bucket {param_b}")
    else:
        require(param_a == 0 and param_b == 0, "reserved_bits", "parameters of raw and bf16 are 0")


def check_size(frame: Frame) -> None:
    """Refuses an n that the payload cannot hold, before any memory is taken for n values."""
    n, size = frame.n, len(frame.payload)
    if frame.codec == RAW:
        width = 4 if frame.dtype == FLOAT32 else 2
        require(size == width * n, "corrupt_payload", f"raw takes {width} bytes a value")
    elif frame.codec == BF16:
        require(size == 2 * n, "corrupt_payload", "bf16 takes 2 bytes a value")
    elif size > 0:
        require(n > 0, "corrupt_payload", "3lc: a payload for no values")
        shape = Shape(frame)
        least = shape.packed_size if shape.coder == NONE else least_code_size(shape.packed_size)
        require(shape.codes_at + least <= size, "corrupt_payload", "3lc: payload is too short")
        require(size <= shape.codes_at + shape.packed_size, "corrupt_payload", "3lc: too long")


def decode_frame(data: bytes, max_values: int = 2**31) -> bytes:
    """The values of a frame, 4 bytes each."""
    return decode(parse_frame(data), max_values)


def decode(frame: Frame, max_values: int = 2**31) -> bytes:
    """The values of a frame that was parsed; max_values guards memory."""
    require(frame.n <= max_values, "limit_exceeded", f"{frame.n} values, here at most {max_values}")
    if frame.non_finite:
        return QUIET_NAN * frame.n
    if frame.codec == RAW and frame.dtype == FLOAT16:
        return widen_f16(frame.payload)
    if frame.codec == RAW and frame.dtype == BFLOAT16:
        return widen_bf16(frame.payload)
    if frame.codec == RAW:
        return frame.payload
    if frame.codec == BF16:
        return widen_bf16(frame.payload)
    return decode_three_lc(frame)


# --- Payload: raw -----------------------------------------------------------------------------


def widen_f16(halves: bytes) -> bytes:
    widened = b""
    for (half,) in struct.iter_unpack("<H", halves):
        sign, exponent, fraction = half >> 15, half >> 10 & 31, half & 0x3FF
        if exponent == 31:
            widened += (sign << 31 | 0x7F800000 | fraction << 13).to_bytes(4, "little")
        else:
            scale = 2.0 ** (max(exponent, 1) - 25)
            magnitude = (fraction + (1024 if exponent else 0)) * scale
            widened += struct.pack("<f", -magnitude if sign else magnitude)
    return widened


# --- Payload: bf16 ----------------------------------------------------------------------------


def widen_bf16(halves: bytes) -> bytes:
    return b"".join(b"\0\0" + halves[i : i + 2] for i in range(0, len(halves), 2))


# --- Payload: 3lc -----------------------------------------------------------------------------

NONE, ZRE = 0, 1  # coders
CHUNK_VALUES = 40960
CHUNK_BYTES = CHUNK_VALUES // 5
ZERO_BYTE = 121
LONGEST_RUN = 14


class Shape:
    """Where the parts of a 3lc payload lie: scales, then sizes, then codes."""

    def __init__(self, frame: Frame) -> None:
        self.coder = frame.param_a & 3
        self.bucket = frame.param_b or frame.n
        self.packed_size = ceil_div(frame.n, 5)
        self.chunk_count = ceil_div(frame.n, CHUNK_VALUES)
        self.has_sizes = self.coder == ZRE and self.chunk_count > 1
        self.sizes_at = 4 * ceil_div(frame.n, self.bucket)
        self.codes_at = self.sizes_at + (2 * self.chunk_count if self.has_sizes else 0)


def decode_three_lc(frame: Frame) -> bytes:
    n, payload = frame.n, frame.payload
    if not payload:
        return bytes(4 * n)
    shape = Shape(frame)
    scales = [payload[i : i + 4] for i in range(0, shape.sizes_at, 4)]
    for i, scale in enumerate(scales):
        require(little(scale) < 0x7F800000, "corrupt_payload", f"scale {i}: {scale.hex()}")
    require(any(map(any, scales)), "corrupt_payload", "all scales are zero")

    codes = payload[shape.codes_at :]
    if shape.coder == NONE:
        packed = codes
    elif shape.has_sizes:
        packed = b""
        sizes = struct.unpack_from(f"<{shape.chunk_count}H", payload, shape.sizes_at)
        require(sum(sizes) == len(codes), "corrupt_payload", "sizes don't add up")
        for size in sizes:
            left = shape.packed_size - len(packed)
            packed += zero_run_decode(codes[:size], min(CHUNK_BYTES, left))
            codes = codes[size:]
    else:
        packed = zero_run_decode(codes, shape.packed_size)

    trits = unpack_trits(packed)
    require(not any(trits[n:]), "corrupt_payload", "padding is not zero")
    parts = []
    for i, positive in enumerate(scales):
        negative = positive[:3] + bytes([positive[3] | 0x80])
        value = {0: bytes(4), 1: positive, -1: negative}
        parts += [value[q] for q in trits[i * shape.bucket : min((i + 1) * shape.bucket, n)]]
    return b"".join(parts)


def least_code_size(packed_size: int) -> int:
    """Fewest bytes that zero-run codes of that many packed bytes can have, chunk by chunk."""
    full, rest = divmod(packed_size, CHUNK_BYTES)
    return full * ceil_div(CHUNK_BYTES, LONGEST_RUN) + ceil_div(rest, LONGEST_RUN)


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


# --- Packet -----------------------------------------------------------------------------------

PUSH, PULL = 0, 1


@dataclass(frozen=True)
class NonFiniteReport:
    """The body of a packet that says: there was a NaN or an infinity."""

    rank: int
    segment: int
    element: int


@dataclass(frozen=True)
class Packet:
    kind: int
    source: int
    step: int
    layout_digest: int
    frames: tuple[Frame, ...]
    report: NonFiniteReport | None = None


def parse_packet(data: bytes) -> Packet:
    """Checks everything but the payloads' content."""
    require(len(data) >= HEADER_SIZE, "truncated", f"{len(data)} bytes are no packet header")
    require(data[0:2] == b"GP", "bad_magic", f"starts with {data[0:2].hex(' ')}, not 47 50")
    require(data[2] == VERSION, "unsupported_version", f"version {data[2]}, known is {VERSION}")
    flags, kind, table_length = data[3], data[4], data[5]
    require(flags & ~NON_FINITE_FLAG == 0, "reserved_bits", f"flags {flags:#04x}")
    require(kind in (PUSH, PULL), "reserved_bits", f"kind {kind}")
    source, step, digest = little(data[6:8]), little(data[8:16]), little(data[16:24])
    frame_count, stored = little(data[24:28]), little(data[28:32])
    require(stored == checksum(data[0:28], data[32:]), "checksum_mismatch", "of the packet")
    reader = Reader(data, HEADER_SIZE)
    frames: tuple[Frame, ...] = ()
    report = None
    if flags & NON_FINITE_FLAG:
        alone = table_length == frame_count == 0 and len(data) == HEADER_SIZE + 16
        require(alone, "corrupt_payload", "a marker packet holds a report and nothing else")
        report = NonFiniteReport(*struct.unpack("<IIQ", reader.take(16)))
    else:
        frames = read_frames(reader, table_length, frame_count)
    require(reader.left == 0, "trailing_bytes", f"{reader.left} after the last payload")
    return Packet(kind, source, step, digest, frames, report)


class Reader:
    """Takes bytes from the front, never past the end."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        require(size <= self.left, "truncated", f"{size} bytes at {self.at}, {self.left} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def take_leb128(self) -> int:
        value = 0
        for i in range(10):
            require(self.left > 0, "corrupt_payload", "LEB128 is cut off")
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                require(byte != 0 or i == 0, "corrupt_payload", "LEB128 is not in shortest form")
                require(value < 2**64, "corrupt_payload", "LEB128 exceeds 64 bits")
                return value
        raise FormatError("corrupt_payload", "LEB128 exceeds 10 bytes")


def read_frames(reader: Reader, table_length: int, frame_count: int) -> tuple[Frame, ...]:
    require(8 * table_length <= reader.left, "truncated", "the codec table is cut off")
    table: list[tuple[int, int, int, int]] = []
    for i in range(table_length):
        codec, dtype, param_a, param_b = struct.unpack("<BBHI", reader.take(8))
        check_codec(codec)
        check_parameters(codec, param_a, param_b)
        require(dtype == FLOAT32, "unsupported_dtype", f"dtype {dtype} in a packet")
        entry = (codec, dtype, param_a, param_b)
        require(entry not in table, "corrupt_payload", f"codec table entry {i} repeats another")
        table.append(entry)
    require(3 * frame_count <= reader.left, "truncated", f"{frame_count} frames don't fit")
    entries = []
    for i in range(frame_count):
        index = reader.take(1)[0]
        require(index < table_length, "corrupt_payload", f"frame {i}: codec table entry {index}")
        n, length = reader.take_leb128(), reader.take_leb128()
        require(n <= MAX_VALUES, "limit_exceeded", f"frame {i}: {n} values, at most 2^40")
        entries.append((index, n, length))
    frames = []
    for index, n, length in entries:
        frame = Frame(*table[index], n, reader.take(length))
        check_size(frame)
        frames.append(frame)
    return tuple(frames)


# --- Script -----------------------------------------------------------------------------------


def describe(frame: Frame) -> str:
    marker = ", non-finite marker" if frame.non_finite else ""
    return (
        f"{CODEC_NAMES[frame.codec]}, float32, n {frame.n}, param_a {frame.param_a:#06x}, "
        f"param_b {frame.param_b}, payload {len(frame.payload)} bytes{marker}"
    )


def print_frame(frame: Frame) -> None:
    print(describe(frame))
    for value in to_floats(decode(frame)):
        print(f"{value:.9g}")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: reference.py FILE", file=sys.stderr)
        return 2
    with open(arguments[0], "rb") as file:
        data = file.read()
    try:
        if data[:2] == b"GP":
            packet = parse_packet(data)
            print(
                f"packet, kind {packet.kind}, source {packet.source}, step {packet.step}, "
                f"layout {packet.layout_digest:016x}, {len(packet.frames)} frames"
            )
            if packet.report is not None:
                print(packet.report)
            for frame in packet.frames:
                print_frame(frame)
        else:
            print_frame(parse_frame(data))
    except FormatError as error:
        print(f"refused, {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
