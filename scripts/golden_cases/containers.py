"""Valid containers, and containers with a fault, each with the status that refuses it."""

from __future__ import annotations

import json
import zlib
from typing import Any

import reference as spec
import reference_encoder as encoder
from container import MAX_HEADER, Container, Tensor, seal_container
from golden_cases.inputs import GRADIENTS, builder, put, u64
from payloads import raw

PLAIN = b"\x01\x00\xff"
ENTRY = {"name": "a", "dtype": "I8", "shape": [3], "storage": "plain", "offset": 0, "size": 3}
ENTRY |= {"crc32": zlib.crc32(PLAIN)}


def containers() -> dict[str, Container]:
    frame = encoder.encode_frame(GRADIENTS, "3lc:s=1.75")
    half = encoder.seal_frame(raw.NUMBER, 0, 0, 2, bytes.fromhex("017c0080"), dtype=2)
    several = (
        Tensor("weight", "F32", (3, 13), "frame", frame),
        Tensor("half", "F16", (2,), "frame", half),
        Tensor("counts", "I8", (3,), "plain", PLAIN),
        Tensor("empty", "I64", (0, 4), "plain", b""),
    )
    sub_bytes = (
        Tensor("\ud800", "F4", (2, 1), "plain", b"\x5a"),
        Tensor("six", "F6_E2M3", (4,), "plain", b"\x01\x02\x03"),
    )
    return {
        "sub-bytes": Container("safetensors", {}, sub_bytes),
        "npy-unicode": Container("npy", {}, (Tensor("", ">U1", (1,), "plain", b"\0\0\0a"),)),
        "empty": Container("safetensors", {}, ()),
        "several": Container("safetensors", {"made by": "a test \u00e4\ud83d"}, several),
        "npy": Container("npy", {}, (Tensor("", "<f4", (39,), "frame", frame),)),
        "npy-scalar": Container("npy", {}, (Tensor("", "|i1", (), "plain", b"\x07"),)),
    }


def build(*entries: Any, body: bytes = PLAIN, **changes: Any) -> bytes:
    content = {"kind": "safetensors", "metadata": {}, "tensors": list(entries)} | changes
    return seal_container(json.dumps(content).encode(), body)


def entry(**changes: Any) -> bytes:
    return build(ENTRY | changes)


def without(key: str) -> bytes:
    return build({name: value for name, value in ENTRY.items() if name != key})


def spelled(**texts: str) -> bytes:
    """The entry with values that json.dumps cannot write."""
    fields = [f'"{key}":{texts.get(key) or json.dumps(value)}' for key, value in ENTRY.items()]
    text = '{"kind":"safetensors","metadata":{},"tensors":[{' + ",".join(fields) + "}]}"
    return seal_container(text.encode(), PLAIN)


def npy_entry(dtype: str) -> bytes:
    return build(ENTRY | {"name": "", "dtype": dtype}, kind="npy")


def frame_entry(frame: bytes, **changes: Any) -> bytes:
    fields = ENTRY | {"dtype": "F32", "storage": "frame", "size": len(frame)} | changes
    return build({key: fields[key] for key in fields if key != "crc32"}, body=frame)


def errors() -> dict[str, tuple[str, bytes]]:
    """The status and the bytes by name. The checksums are correct unless they are the fault."""
    good = build(ENTRY)
    long = "1" * 4301  # more digits than Python's int() takes
    packet = encoder.encode_packet(spec.Packet(spec.PUSH, 1, 7, 99, ()))
    frame = builder(raw.NUMBER)(3, bytes(12))
    text = b'{"kind":"safetensors","metadata":{},"tensors":[]}'
    cases = {
        "bad_magic": {
            "bad-magic": put(good, 0, b"CG"),
            "short-and-bad-magic": b"X",
            "packet-in-place-of-a-frame": frame_entry(packet),
        },
        "truncated": {
            "empty": b"",
            "prefix-cut": good[:15],
            "header-cut": good[:40],
            "header-2-27": put(good, 8, u64(MAX_HEADER)),
            "data-cut": good[:-1],
            "size-beyond-data": entry(size=4),
            "size-of-4301-digits": spelled(size=long),
            "frame-cut": frame_entry(frame[:31]),
        },
        "unsupported_version": {"version-2": seal_container(text, b"", version=2)},
        "reserved_bits": {"flag-7": seal_container(text, b"", flags=128)},
        "limit_exceeded": {
            "header-beyond-2-27": put(good, 8, u64(MAX_HEADER + 1)),
            "65-dimensions": entry(shape=[1] * 65),
            "shape-beyond-2-40": entry(shape=[2**20, 2**20, 2]),
            "shape-beyond-2-40-with-a-zero": entry(shape=[0, 2**41]),
            "shape-of-4301-digits": spelled(shape=f"[{long}]"),
        },
        "checksum_mismatch": {
            "checksum": put(good, 4, bytes([good[4] ^ 1])),
            "checksum-of-header": put(good, 30, bytes([good[30] ^ 32])),
            "checksum-of-plain-data": put(good, len(good) - 1, b"\xfe"),
            "crc32-with-bit-32": entry(crc32=zlib.crc32(PLAIN) + 2**32),
        },
        "corrupt_payload": {
            "header-not-json": seal_container(b"{", b""),
            "header-not-utf-8": seal_container(text.replace(b"safe", b"s\xff"), b""),
            "header-with-byte-order-mark": seal_container(b"\xef\xbb\xbf" + text, b""),
            "header-an-array": seal_container(b"[]", b""),
            "header-with-nan": spelled(shape=f"[{'1,' * 64}NaN]"),
            "header-with-infinity": spelled(size="4", crc32="Infinity"),
            "header-with-a-surrogate": seal_container(text.replace(b"safe", b"\xed\xa0\x80"), b""),
            "header-of-five-levels": spelled(shape=f"[{'1,' * 64}[1]]"),
            "key-twice-by-an-escape": seal_container(
                text.replace(b"{", b'{"k\\u0069nd":"npy",', 1), b""
            ),
            "key-twice": seal_container(text.replace(b"}", b'},"metadata":{}', 1), b""),
            "key-unknown": build(more=1, body=b""),
            "kind-unknown": build(kind="zip", body=b""),
            "metadata-of-numbers": build(metadata={"a": 1}, body=b""),
            "tensors-an-object": build(tensors={}, body=b""),
            "tensor-a-number": build(1),
            "tensor-key-missing": without("shape"),
            "tensor-key-unknown": entry(more=1),
            "plain-without-crc32": without("crc32"),
            "frame-with-crc32": build(ENTRY | {"storage": "frame", "dtype": "F32"}),
            "name-a-number": entry(name=1),
            "name-of-the-metadata": entry(name="__metadata__"),
            "dtype-a-number": entry(dtype=4),
            **{f"dtype-{dtype or 'empty'}": entry(dtype=dtype) for dtype in ("", "F33", "i1")},
            **{f"npy-dtype-{dtype}": npy_entry(dtype) for dtype in ("int", "a3", "I8")},
            "storage-unknown": entry(storage="zip"),
            "frame-of-integers": frame_entry(frame, dtype="I32"),
            "frame-of-another-dtype": frame_entry(frame, dtype="F16"),
            "shape-a-number": entry(shape=3),
            "shape-negative": entry(shape=[-3]),
            "shape-a-fraction": entry(shape=[3.0]),
            "shape-with-an-exponent": spelled(shape="[3e0]"),
            "size-of-another-shape": entry(shape=[4]),
            "size-of-another-dtype": entry(dtype="I16"),
            "size-of-half-a-byte": entry(dtype="F4", shape=[5]),
            "shape-true": entry(shape=[True]),
            "offset-a-gap": entry(offset=1),
            "names-equal": build(ENTRY, ENTRY | {"offset": 3}, body=PLAIN * 2),
            "npy-with-a-name": build(ENTRY, kind="npy"),
            "npy-without-a-tensor": build(kind="npy", body=b""),
            "npy-with-metadata": build(ENTRY | {"name": ""}, kind="npy", metadata={"a": "b"}),
        },
        "trailing_bytes": {"byte-after-the-end": good + b"\0"},
        "length_mismatch": {"frame-of-other-length": frame_entry(frame, shape=[4])},
    }
    return {name: (status, data) for status, group in cases.items() for name, data in group.items()}
