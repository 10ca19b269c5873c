"""Damaged, made-up and oversized frames and packets: always an error, never a guess or a crash."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradwire
from golden import common, encoder, payloads, spec
from payloads import ternary
from payloads.bf16 import NUMBER as BF16
from payloads.raw import NUMBER as RAW
from payloads.three_lc import NUMBER as THREE_LC

VALUES = common.to_bytes([0.5, -1.0, 0.0, 0.25, 3.0, -0.0, 0.0, 0.0, 1e-3, -2.0, 2.5])
CODECS = ["raw", "bf16", "3lc:s=1.75", "3lc:coder=none", "3lc:bucket=5"]
FRAMES = {codec: encoder.encode_frame(VALUES, codec) for codec in CODECS} | {
    "marker": encoder.encode_frame(common.to_bytes([1.0, float("nan")]), "3lc"),
    "zeros": encoder.encode_frame(bytes(40), "3lc"),
    "no values": encoder.encode_frame(b"", "3lc"),
}
PACKETS = {
    "frames": encoder.encode_packet(
        spec.Packet(
            spec.PUSH, 3, 77, 0xABCDEF, tuple(spec.parse_frame(FRAMES[codec]) for codec in CODECS)
        )
    ),
    "marker": encoder.encode_packet(
        spec.Packet(spec.PULL, 0, 77, 0xABCDEF, (), spec.NonFiniteReport(2, 1, 5))
    ),
}
REFUSALS = {
    "truncated",
    "bad_magic",
    "unsupported_version",
    "reserved_bits",
    "unknown_codec",
    "unsupported_dtype",
    "limit_exceeded",
    "trailing_bytes",
    "checksum_mismatch",
    "corrupt_payload",
}


def refusal_of(frame: bytes) -> str:
    """The status with which decode, decode_into and inspect refuse; "ok" if one of them doesn't."""
    total = np.full(11, -0.0, np.float32)
    codes = set()
    for call in (
        lambda: gradwire.decode(frame),
        lambda: gradwire.decode_into(frame, total, accumulate=True),
    ):
        try:
            call()
        except gradwire.GradwireError as error:
            codes.add(error.code if str(error) else "no message")
        else:
            codes.add("ok")
    assert total.tobytes() == np.full(11, -0.0, np.float32).tobytes()
    assert len(codes) == 1, codes
    return str(codes.pop())


def inspect_refusal(data: bytes) -> str:
    try:
        gradwire.inspect(data)
    except gradwire.GradwireError as error:
        return str(error.code) if str(error) else "no message"
    return "ok"


@pytest.mark.parametrize("name", FRAMES)
def test_frame_truncated_at_every_length(name: str) -> None:
    for size in range(len(FRAMES[name])):
        assert refusal_of(FRAMES[name][:size]) == "truncated", size


@pytest.mark.parametrize("name", FRAMES)
def test_every_flipped_bit_of_a_frame(name: str) -> None:
    frame = FRAMES[name]
    seen = set()
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        code = refusal_of(bytes(damaged))
        assert code in REFUSALS, bit
        seen.add(code)
    assert seen >= {"bad_magic", "unsupported_version", "checksum_mismatch", "truncated"}


@pytest.mark.parametrize("name", FRAMES)
def test_bytes_behind_a_frame(name: str) -> None:
    for more in (b"\0", b"\xff" * 7, FRAMES[name]):
        assert refusal_of(FRAMES[name] + more) == "trailing_bytes"


@pytest.mark.parametrize("name", PACKETS)
def test_packet_truncated_at_every_length(name: str) -> None:
    for size in range(len(PACKETS[name])):
        code = "truncated" if size < spec.HEADER_SIZE else "checksum_mismatch"
        if size >= 2:  # with fewer bytes, a packet cannot be told from a frame
            assert inspect_refusal(PACKETS[name][:size]) == code, size


@pytest.mark.parametrize("name", PACKETS)
def test_every_flipped_bit_of_a_packet(name: str) -> None:
    for bit in range(8 * len(PACKETS[name])):
        damaged = bytearray(PACKETS[name])
        damaged[bit // 8] ^= 1 << bit % 8
        assert inspect_refusal(bytes(damaged)) in REFUSALS, bit


@pytest.mark.parametrize("name", PACKETS)
def test_bytes_behind_a_packet(name: str) -> None:
    for more in (b"\0", PACKETS[name]):
        assert inspect_refusal(PACKETS[name] + more) == "checksum_mismatch"


def test_random_bytes() -> None:
    draw = random.Random(2)
    for start in (b"", b"GW\1", b"GP\1", b"GW\1\x10\0\0", b"GP\1\0\0\1"):
        for _ in range(400):
            data = start + draw.randbytes(draw.randrange(200))
            assert inspect_refusal(data) in REFUSALS
            if start[:2] != b"GP":
                assert refusal_of(data) in REFUSALS


def huge_frames() -> dict[str, tuple[str, bytes]]:
    """name -> (status, frame): small frames with correct checksums that claim to be large."""
    one = struct.pack("<f", 1.0)
    frames = {}
    # Up to 2^31 values, no limit of the reader applies before memory is allocated.
    for n in (2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40):
        for title, payload in (
            ("a code", one + b"\xff"),
            ("few codes", one + b"\xff" * 2000),
            ("no scale", b"\x01"),
        ):
            for bucket in (0, 5, 2**32 - 1):
                frame = encoder.seal_frame(THREE_LC, ternary.ZRE, bucket, n, payload)
                frames[f"3lc n={n} bucket={bucket} {title}"] = ("corrupt_payload", frame)
        frames[f"raw n={n}"] = ("corrupt_payload", encoder.seal_frame(RAW, 0, 0, n, one))
        wrapped = bytes(4 * n % 2**32 % 4096)
        frames[f"raw n={n} mod 2^32"] = (
            "corrupt_payload",
            encoder.seal_frame(RAW, 0, 0, n, wrapped),
        )
        frames[f"bf16 n={n}"] = ("corrupt_payload", encoder.seal_frame(BF16, 0, 0, n, one))
    for n in (2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**40):
        # These are valid, so only the reader's own limit prevents the allocation.
        for codec, module in payloads.CODECS.items():
            keys = module.parameters(module.read({}))
            marker = encoder.seal_frame(codec, *keys, n, b"", spec.NON_FINITE_FLAG)
            frames[f"marker of {codec} n={n}"] = ("limit_exceeded", marker)
        zeros = encoder.seal_frame(THREE_LC, 0, 0, n, b"")
        frames[f"zeros n={n}"] = ("limit_exceeded", zeros)
    for n in (2**40 + 1, 2**62, 2**62 + 1, 2**63, 2**64 - 1):
        for codec in payloads.CODECS:
            for payload in (b"", one + b"\xff"):
                frame = encoder.seal_frame(codec, 0, 0, n, payload)
                frames[f"codec {codec} n={n} {len(payload)}"] = ("limit_exceeded", frame)
    for length in (2**32 - 1, 2**32, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 1):
        good = FRAMES["raw"]
        after = struct.pack("<Q", length) + good[32:]
        frame = good[:20] + struct.pack("<I", spec.checksum(good[:20], after)) + after
        frames[f"payload length {length}"] = ("truncated", frame)
    return frames


HUGE = huge_frames()


@pytest.mark.parametrize("name", HUGE)
def test_huge_claims_in_frames(name: str) -> None:
    status, frame = HUGE[name]
    with pytest.raises(gradwire.GradwireError) as refusal:
        gradwire.decode(frame)
    assert refusal.value.code == status


LIMITED = """
import resource, sys
import gradwire

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)
for line in sys.stdin:
    status, data = line.split()
    call = gradwire.inspect if data.startswith("4750") else gradwire.decode
    try:
        call(bytes.fromhex(data))
    except gradwire.GradwireError as error:
        if error.code != status:
            sys.exit(f"{error.code} instead of {status}: {data[:64]}")
    else:
        sys.exit(f"accepted: {data[:64]}")
"""


def huge_packets() -> list[tuple[str, bytes]]:
    """Small packets with correct checksums that claim to be large."""
    entry = struct.pack("<BBHI", THREE_LC, 0, ternary.ZRE, 0)
    header = spec.Packet(spec.PUSH, 0, 0, 0, ())
    packets: list[tuple[str, bytes, int]] = []
    for n, status in ((2**32, "corrupt_payload"), (2**40, "corrupt_payload")):
        body = entry + b"\0" + encoder.leb128(n) + b"\x05" + struct.pack("<f", 1.0) + b"\xff"
        packets.append((status, encoder.seal_packet(header, 0, 1, body), 1))
    for length in (2**32, 2**63, 2**64 - 1):
        body = entry + b"\0\x05" + encoder.leb128(length) + struct.pack("<f", 1.0) + b"\xff"
        packets.append(("truncated", encoder.seal_packet(header, 0, 1, body), 1))
    for count in (2**31, 2**32 - 1):
        packets.append(("truncated", encoder.seal_packet(header, 0, 1, entry), count))
    sealed = []
    for status, packet, count in packets:
        before = packet[:24] + struct.pack("<I", count)
        checksum = struct.pack("<I", spec.checksum(before, packet[32:]))
        sealed.append((status, before + checksum + packet[32:]))
    return sealed


def test_huge_claims_take_no_memory(tmp_path: Path) -> None:
    """Runs in a process that may allocate only 64 MiB more than it has at the start."""
    cases = [*HUGE.values(), *huge_packets()]
    lines = "".join(f"{status} {data.hex()}\n" for status, data in cases)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_limit_is_the_callers() -> None:
    zeros = encoder.seal_frame(THREE_LC, 0, 0, 1000, b"")
    assert gradwire.decode(zeros, max_numel=1000).size == 1000
    with pytest.raises(gradwire.GradwireError) as refusal:
        gradwire.decode(zeros, max_numel=999)
    assert refusal.value.code == "limit_exceeded"


@pytest.mark.parametrize("size", [0, 10, 12])
def test_output_of_another_length(size: int) -> None:
    out = np.full(size, 7.0, np.float32)
    with pytest.raises(gradwire.GradwireError) as refusal:
        gradwire.decode_into(FRAMES["raw"], out)
    assert refusal.value.code == "length_mismatch"
    assert (out == 7.0).all()


@pytest.mark.parametrize("coder", ["zre", "none"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_last_chunk_is_corrupt(coder: str, threads: int, accumulate: bool) -> None:
    x = np.random.default_rng(4).standard_normal(100_000).astype(np.float32)
    frame = bytearray(encoder.encode_frame(x.tobytes(), f"3lc:coder={coder}"))
    frame[-1] = 255
    damaged = encoder.seal_frame(
        THREE_LC, frame[6] & 3, 0, x.size, bytes(frame[spec.HEADER_SIZE :])
    )
    out = np.zeros(x.size, np.float32)
    for target in gradwire.simd_targets():
        with pytest.raises(gradwire.GradwireError, match="chunk 2") as refusal:
            gradwire.decode_into(damaged, out, accumulate, threads=threads, target=target)
        assert refusal.value.code == "corrupt_payload"
