"""The exact encoders of format.md in plain Python.

The golden files and the differential tests use them. Equal input, codec string and draws give equal
bytes.
"""

from __future__ import annotations

import math
import struct

from common import FLOAT32, Draws, Frame, f32, narrow_residual, to_bytes, to_floats, widen_bf16
from payloads import CODECS_BY_NAME, Payload
from reference import VERSION, Packet, checksum

NO_DRAWS = Draws()

# --- Frame ------------------------------------------------------------------------------------


def read_codec(text: str) -> tuple[Payload, dict[str, str]]:
    """The codec and the keys of a valid codec string, such as 3lc:s=1.75,coder=none."""
    name, _, rest = text.partition(":")
    return CODECS_BY_NAME[name], dict(item.split("=") for item in rest.split(",")) if rest else {}


def encode_frame(tensor: bytes, text: str, draws: Draws = NO_DRAWS) -> bytes:
    """Encodes without error feedback."""
    codec, keys = read_codec(text)
    if codec.CARRIES_NON_FINITE:
        options = codec.read(keys)
        # A Python float does not keep all bits of a NaN, so raw takes the bytes themselves.
        payload = tensor if codec.NAME == "raw" else codec.encode(to_floats(tensor), options, draws)
        return seal_frame(codec.NUMBER, *codec.parameters(options), len(tensor) // 4, payload)
    no_residual = to_bytes([-0.0]) * (len(tensor) // 4)  # x + -0.0 is x, for x = -0.0 too
    return encode_with_residual(tensor, text, no_residual, draws)[0]


def encode_with_residual(
    tensor: bytes, text: str, residual: bytes, draws: Draws = NO_DRAWS
) -> tuple[bytes, bytes]:
    """Encodes with error feedback: the frame and the new residual.

    Residuals are float32 here; with residual=bf16 they are rounded to bf16 and widened again.
    """
    codec, keys = read_codec(text)
    options = codec.read(keys)
    both = zip(to_floats(tensor), to_floats(residual), strict=True)
    values = [f32(x + r) for x, r in both]
    param_a, param_b = codec.parameters(options)
    marker = seal_frame(codec.NUMBER, param_a, param_b, len(values), b"", 1)
    if not all(map(math.isfinite, values)):
        return marker, residual
    payload = codec.encode(values, options, draws)
    frame = Frame(codec.NUMBER, FLOAT32, param_a, param_b, len(values), payload)
    sent = to_floats(codec.decode(frame))
    if not all(map(math.isfinite, sent)):  # a large value was rounded to infinity
        return marker, residual
    left = to_bytes([f32(b - y) for b, y in zip(values, sent, strict=True)])
    if keys.get("residual") == "bf16":
        left = widen_bf16(narrow_residual(left))
    return seal_frame(codec.NUMBER, param_a, param_b, len(values), payload), left


def seal_frame(
    codec: int,
    param_a: int,
    param_b: int,
    n: int,
    payload: bytes,
    flags: int = 0,
    dtype: int = FLOAT32,
) -> bytes:
    """A frame with a correct checksum, whatever the fields hold."""
    before = struct.pack("<2sBBBBHQI", b"GW", VERSION, codec, dtype, flags, param_a, n, param_b)
    after = struct.pack("<Q", len(payload)) + payload
    return before + checksum(before, after).to_bytes(4, "little") + after


# --- Packet -----------------------------------------------------------------------------------


def encode_packet(packet: Packet) -> bytes:
    if packet.report is not None:
        report = struct.pack("<IIQ", *vars(packet.report).values())
        return seal_packet(packet, 1, 0, report)
    keys = [(f.codec, f.dtype, f.param_a, f.param_b) for f in packet.frames]
    table = list(dict.fromkeys(keys))
    body = b"".join(struct.pack("<BBHI", *key) for key in table)
    for key, frame in zip(keys, packet.frames, strict=True):
        body += bytes([table.index(key)]) + leb128(frame.n) + leb128(len(frame.payload))
    body += b"".join(frame.payload for frame in packet.frames)
    return seal_packet(packet, 0, len(table), body)


def seal_packet(packet: Packet, flags: int, table_length: int, body: bytes) -> bytes:
    """A packet with a correct checksum, whatever the body holds."""
    fields = (VERSION, flags, packet.direction, table_length, packet.source)
    before = struct.pack("<2sBBBBH", b"GP", *fields)
    before += struct.pack("<QQI", packet.step, packet.layout_digest, len(packet.frames))
    return before + checksum(before, body).to_bytes(4, "little") + body


def leb128(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded + bytes([value]))
