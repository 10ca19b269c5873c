"""The encoders of format.md in plain Python: the golden files and the differential tests use them.

Encoding is normative where it says so: equal input and codec string give equal bytes. The same
conventions as in reference.py: a tensor is `bytes`, its values as little-endian float32.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from reference import (
    BF16,
    CHUNK_BYTES,
    CODEC_NAMES,
    FLOAT32,
    FLT_MAX,
    LONGEST_RUN,
    NONE,
    RAW,
    THREE_LC,
    VERSION,
    ZERO_BYTE,
    ZRE,
    Packet,
    checksum,
    f32,
    little,
    to_bytes,
    to_floats,
    widen_bf16,
)


@dataclass(frozen=True)
class Codec:
    """A codec string, read: 3lc:s=1.75,coder=none,bucket=320. Takes valid strings only."""

    id: int
    s: float = 1.0
    coder: int = ZRE
    bucket: int = 0
    bf16_residual: bool = False

    @property
    def parameters(self) -> tuple[int, int]:
        """param_a and param_b."""
        if self.id != THREE_LC:
            return 0, 0
        informative = min(math.floor((self.s - 1) * 16384 + 0.5), 16383)
        return self.coder | informative << 2, self.bucket


def read_codec(text: str) -> Codec:
    name, _, rest = text.partition(":")
    keys = dict(item.split("=") for item in rest.split(",")) if rest else {}
    return Codec(
        id=next(number for number, known in CODEC_NAMES.items() if known == name),
        s=f32(float(keys.get("s", "1"))),
        coder={"none": NONE, "zre": ZRE}[keys.get("coder", "zre")],
        bucket=int(keys.get("bucket", "0")),
        bf16_residual=keys.get("residual") == "bf16",
    )


# --- Frame ------------------------------------------------------------------------------------


def encode_frame(tensor: bytes, text: str) -> bytes:
    """Without error feedback."""
    codec = read_codec(text)
    if codec.id == RAW:
        return seal(codec, tensor, tensor)
    if codec.id == BF16:
        return seal(codec, tensor, narrow_tensor(tensor))
    return encode_with_residual(tensor, text, bytes(len(tensor)))[0]


def encode_with_residual(tensor: bytes, text: str, residual: bytes) -> tuple[bytes, bytes]:
    """With error feedback (bf16, 3lc): the frame and the residual that it leaves.

    Residuals are float32 here; those of residual=bf16 are rounded to bf16 and widened again.
    """
    codec = read_codec(text)
    both = zip(to_floats(tensor), to_floats(residual), strict=True)
    values = [f32(x + r) for x, r in both]
    if not all(map(math.isfinite, values)):
        return seal(codec, tensor, b"", non_finite=True), residual
    if codec.id == BF16:
        payload = narrow_tensor(to_bytes(values))
        sent = to_floats(widen_bf16(payload))
        if not all(map(math.isfinite, sent)):  # a large value was rounded to infinity
            return seal(codec, tensor, b"", non_finite=True), residual
        left = to_bytes([f32(b - y) for b, y in zip(values, sent, strict=True)])
    else:
        payload, rest = encode_three_lc(values, codec)
        left = to_bytes(rest)
    if codec.bf16_residual:
        left = widen_bf16(narrow_tensor(left))
    return seal(codec, tensor, payload), left


def seal(codec: Codec, tensor: bytes, payload: bytes, non_finite: bool = False) -> bytes:
    return seal_frame(codec.id, *codec.parameters, len(tensor) // 4, payload, int(non_finite))


def seal_frame(
    codec: int, param_a: int, param_b: int, n: int, payload: bytes, flags: int = 0
) -> bytes:
    """A frame with a true checksum, whatever the fields are."""
    before = struct.pack("<2sBBBBHQI", b"GW", VERSION, codec, FLOAT32, flags, param_a, n, param_b)
    after = struct.pack("<Q", len(payload)) + payload
    return before + checksum(before, after).to_bytes(4, "little") + after


def narrow_tensor(tensor: bytes) -> bytes:
    return b"".join(narrow_bf16(tensor[i : i + 4]) for i in range(0, len(tensor), 4))


def narrow_bf16(value: bytes) -> bytes:
    """One float32 to bf16, half to even. A NaN becomes the quiet NaN of its sign."""
    bits = little(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return ((bits >> 16 & 0x8000) | 0x7FC0).to_bytes(2, "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def encode_three_lc(values: list[float], codec: Codec) -> tuple[bytes, list[float]]:
    """Payload and new residual of finite values."""
    scales, trits, left = [], [], []
    bucket = codec.bucket or max(len(values), 1)
    for first in range(0, len(values), bucket):
        part = values[first : first + bucket]
        m = min(f32(codec.s * max(map(abs, part))), FLT_MAX)
        half = f32(m * 0.5)
        scales.append(m)
        for b in part:
            q = 1 if b > half else -1 if b < -half else 0
            trits.append(q)
            left.append(f32(b - q * m) if q else b)
    if not any(scales):
        return b"", left
    packed = pack_trits(trits)
    if codec.coder == NONE:
        return to_bytes(scales) + packed, left
    chunks = [
        zero_run_encode(packed[i : i + CHUNK_BYTES]) for i in range(0, len(packed), CHUNK_BYTES)
    ]
    sizes = [len(chunk).to_bytes(2, "little") for chunk in chunks] if len(chunks) > 1 else []
    return to_bytes(scales) + b"".join(sizes) + b"".join(chunks), left


def pack_trits(trits: list[int]) -> bytes:
    digits = [q + 1 for q in trits] + [1] * (-len(trits) % 5)
    groups = zip(*[iter(digits)] * 5, strict=True)
    return bytes(81 * a + 27 * b + 9 * c + 3 * d + e for a, b, c, d, e in groups)


def zero_run_encode(packed: bytes) -> bytes:
    codes, at = bytearray(), 0
    while at < len(packed):
        run = 0
        while run < LONGEST_RUN and packed[at + run : at + run + 1] == bytes([ZERO_BYTE]):
            run += 1
        codes.append(243 + run - 2 if run >= 2 else packed[at])
        at += max(run, 1)
    return bytes(codes)


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
    """A packet with a true checksum, whatever the body is."""
    fields = (VERSION, flags, packet.kind, table_length, packet.source)
    before = struct.pack("<2sBBBBH", b"GP", *fields)
    before += struct.pack("<QQI", packet.step, packet.layout_digest, len(packet.frames))
    return before + checksum(before, body).to_bytes(4, "little") + body


def leb128(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded + bytes([value]))
