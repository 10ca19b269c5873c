"""A decoder of gradwire's wire format in plain Python, in the order of format.md.

It shares no code with the C++ core, and it is slow: it holds everything in memory. The golden files
come from this folder.

    python spec/reference.py FILE       prints the header and the values of a frame or a packet

It needs the package `xxhash` and nothing else outside the standard library. payloads/ has a module
for the payload of each codec.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

import xxhash

from common import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    QUIET_NAN,
    FormatError,
    Frame,
    little,
    require,
    to_floats,
)
from payloads import CODECS

# --- Frame ------------------------------------------------------------------------------------

VERSION = 1
HEADER_SIZE = 32
MAX_VALUES = 2**40
NON_FINITE_FLAG = 1
DTYPES = {FLOAT32: "float32", BFLOAT16: "bfloat16", FLOAT16: "float16"}


def checksum(before: bytes, after: bytes) -> int:
    """The checksum of all bytes but the checksum field, which lies between `before` and `after`."""
    return int(xxhash.xxh3_64_intdigest(before + after)) & 0xFFFFFFFF


def parse_frame(data: bytes) -> Frame:
    """Checks everything but the payload's content."""
    require(len(data) >= HEADER_SIZE, "truncated", f"{len(data)} bytes are no frame header")
    require(data[0:2] == b"GW", "bad_magic", f"starts with {data[0:2].hex(' ')}, not 47 57")
    require(data[2] == VERSION, "unsupported_version", f"version {data[2]}, known is {VERSION}")
    codec, dtype, flags = data[3], data[4], data[5]
    require(flags & ~NON_FINITE_FLAG == 0, "reserved_bits", f"flags {flags:#04x}")
    require(codec in CODECS, "unknown_codec", f"codec {codec}")
    require(dtype in DTYPES, "unsupported_dtype", f"dtype {dtype}")
    param_a, n, param_b = little(data[6:8]), little(data[8:16]), little(data[16:20])
    stored, length = little(data[20:24]), little(data[24:32])
    require(n <= MAX_VALUES, "limit_exceeded", f"{n} values, at most 2^40")
    payload = data[HEADER_SIZE:]
    require(length <= len(payload), "truncated", f"payload {length} bytes, here {len(payload)}")
    require(length >= len(payload), "trailing_bytes", f"{len(payload) - length} after the payload")
    require(stored == checksum(data[0:20], data[24:]), "checksum_mismatch", "of the frame")
    CODECS[codec].check_parameters(param_a, param_b)
    frame = Frame(codec, dtype, param_a, param_b, n, payload, flags & NON_FINITE_FLAG != 0)
    if frame.non_finite:
        require(not payload, "corrupt_payload", "a marker frame with a payload")
    else:
        CODECS[codec].check_size(frame)
    return frame


def decode_frame(data: bytes, max_values: int = 2**31) -> bytes:
    """The values of a frame, 4 bytes each."""
    return decode(parse_frame(data), max_values)


def decode(frame: Frame, max_values: int = 2**31) -> bytes:
    """The values of a parsed frame; max_values limits the memory."""
    require(frame.n <= max_values, "limit_exceeded", f"{frame.n} values, here at most {max_values}")
    if frame.non_finite:
        return QUIET_NAN * frame.n
    return CODECS[frame.codec].decode(frame)


# --- Packet -----------------------------------------------------------------------------------

PUSH, PULL = 0, 1


@dataclass(frozen=True)
class NonFiniteReport:
    """The body of a marker: the place of the NaN or infinity."""

    rank: int
    segment: int
    element: int


@dataclass(frozen=True)
class Packet:
    direction: int
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
    flags, direction, table_length = data[3], data[4], data[5]
    require(flags & ~NON_FINITE_FLAG == 0, "reserved_bits", f"flags {flags:#04x}")
    require(direction in (PUSH, PULL), "reserved_bits", f"direction {direction}")
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
    return Packet(direction, source, step, digest, frames, report)


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
        require(codec in CODECS, "unknown_codec", f"codec {codec}")
        CODECS[codec].check_parameters(param_a, param_b)
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
        CODECS[frame.codec].check_size(frame)
        frames.append(frame)
    return tuple(frames)


# --- Script -----------------------------------------------------------------------------------


def describe(frame: Frame) -> str:
    marker = ", non-finite marker" if frame.non_finite else ""
    return (
        f"{CODECS[frame.codec].NAME}, {DTYPES[frame.dtype]}, n {frame.n}, "
        f"param_a {frame.param_a:#06x}, param_b {frame.param_b}, "
        f"payload {len(frame.payload)} bytes{marker}"
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
                f"packet, direction {packet.direction}, source {packet.source}, "
                f"step {packet.step}, layout {packet.layout_digest:016x}, "
                f"{len(packet.frames)} frames"
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
