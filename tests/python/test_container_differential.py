"""gradwire against the plain Python reader: containers with up to three faults at once, so that the
order of the checks of spec/format.md counts."""

from __future__ import annotations

import json
import zlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from golden import common, container, encoder, spec
from gradwire.container import ContainerError, check_frames, parse
from payloads.inceptionn import NUMBER as INCEPTIONN
from payloads.raw import NUMBER as RAW

VALUES = common.to_bytes([1.0, -2.0, 0.5])
FRAME = encoder.encode_frame(VALUES, "raw")
HALF = encoder.seal_frame(RAW, 0, 0, 3, bytes(6), dtype=2)
PLAIN = b"\x01\x00\xff\x07"
BAD_TAGS = encoder.seal_frame(INCEPTIONN, 0, 0, 3, bytes.fromhex("00ff"))
PACKET = encoder.encode_packet(spec.Packet(spec.PUSH, 1, 2, 3, (spec.parse_frame(FRAME),)))
# What may stand in the place of a frame.
FRAMES = {
    "cut": FRAME[:-1],
    "short": FRAME[:31],
    "empty": b"",
    "magic": b"XW" + FRAME[2:],
    "magic of a short packet": b"GP",
    "packet": PACKET,
    "other length": encoder.encode_frame(VALUES[:8], "raw"),
    "other dtype": HALF,
    "bad tags": BAD_TAGS,
    "checksum": FRAME[:-1] + b"\x01",
    "version": FRAME[:2] + b"\x02" + FRAME[3:],
}
# Texts of JSON, and of what Python takes for JSON.
TEXTS = [
    *("NaN", "Infinity", "-Infinity", "1.0", "3e0", "1e999", "-0", "0", "3", "4", "-3", "01", "+3"),
    *("1" * 5000, "-" + "1" * 5000, "18446744073709551616", "4294967296", "true", "null", "'a'"),
    *('""', '"F32"', '"F33"', '"<f4"', '"int"', '"a3"', '"U8"', '"F4"', '"frame"', '"plain"'),
    *('"__metadata__"', '"\\ud800"', '"\\u0061"', '"\\x61"', '"a\tb"', '"\\u00e9é"', '"a'),
    *("[]", "[3]", "[3.0]", "[-0]", "[NaN]", "[3,]", "[[3]]", "[true]", "[1099511627777]"),
    *("[0,2199023255552]", f"[{'1' * 5000}]", f"[{'1,' * 64}1]", f"[{'[],' * 64}[]]", "[2,2]"),
    *("{}", '{"a":1}', '{"a":"b"}', '{"a":"b","\\u0061":"c"}', "[" * 5 + "]" * 5, "[" * 2000),
]  # fmt: skip
# The first letters of texts that fit a key.
FITTING = {"shape": "["} | dict.fromkeys(("name", "dtype", "storage"), '"')
FITTING |= dict.fromkeys(("offset", "size", "crc32"), "-01234")
KEYS = ["name", "dtype", "shape", "storage", "offset", "size", "crc32", "more"]


def entry(name: str, dtype: str, data: bytes, storage: str, offset: int) -> dict[str, Any]:
    shape = [len(data)] if storage == "plain" else [3]
    fields = {"name": name, "dtype": dtype, "shape": shape, "storage": storage, "offset": offset}
    fields["size"] = len(data)
    return fields | ({"crc32": zlib.crc32(data)} if storage == "plain" else {})


class Draft:
    """A container before its header is text."""

    def __init__(self, kind: str) -> None:
        self.parts = [(FRAME, "F32", "frame"), (PLAIN, "U8", "plain"), (HALF, "F16", "frame")]
        names = ["a", "b", "c"]
        if kind == "npy":
            self.parts, names = [(FRAME, "<f4", "frame")], [""]
        self.tensors: list[dict[str, Any]] = []
        self.place(names)
        self.top: dict[str, Any] = {"kind": kind, "metadata": {}, "tensors": self.tensors}
        self.texts: list[str] = []  # in the places of which "@0@", "@1@", ... stand

    def place(self, names: list[str]) -> None:
        offset = 0
        self.tensors.clear()
        for (data, dtype, storage), name in zip(self.parts, names, strict=True):
            self.tensors.append(entry(name, dtype, data, storage, offset))
            offset += len(data)

    def text(self, text: str) -> str:
        self.texts.append(text)
        return f"@{len(self.texts) - 1}@"

    def header(self) -> bytes:
        header = json.dumps(self.top)
        for index, text in enumerate(self.texts):
            header = header.replace(f'"@{index}@"', text)
        return header.encode()

    def body(self) -> bytes:
        return b"".join(data for data, _, _ in self.parts)


def damage_draft(draw: st.DrawFn, draft: Draft) -> None:
    tensor = draw(st.sampled_from(draft.tensors))
    match draw(st.sampled_from(["field", "field", "frame", "frame", "top", "remove", "twice"])):
        case "field":
            key = draw(st.sampled_from(KEYS))
            fitting = [text for text in TEXTS if text[0] in FITTING.get(key, "")]
            pool = draw(st.sampled_from([TEXTS, fitting or TEXTS]))
            tensor[key] = draft.text(draw(st.sampled_from(pool)))
        case "top":
            key = draw(st.sampled_from(["kind", "metadata", "tensors", "more"]))
            draft.top[key] = draft.text(draw(st.sampled_from(TEXTS)))
        case "remove":
            tensor.pop(draw(st.sampled_from(KEYS)), None)
        case "frame":
            index = draw(st.integers(0, len(draft.parts) - 1))
            data, dtype, storage = draft.parts[index]
            if storage == "frame":
                data = FRAMES[draw(st.sampled_from(sorted(FRAMES)))]
            draft.parts[index] = data, dtype, storage
            offset = 0
            for (part, _, _), fields in zip(draft.parts, draft.tensors, strict=True):
                if isinstance(fields.get("offset"), int):
                    fields["offset"], fields["size"] = offset, len(part)
                offset += len(part)
        case "twice":
            text = draft.text(f'{draw(st.sampled_from(TEXTS))},"name":"z"')
            tensor[draw(st.sampled_from(KEYS))] = text


def damage_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, 15))
    match draw(st.sampled_from(["prefix", "length", "cut", "more", "last"])):
        case "prefix":
            return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
        case "length":
            length = draw(st.sampled_from([0, len(data), 2**27, 2**27 + 1, 2**64 - 1]))
            return data[:8] + length.to_bytes(8, "little") + data[16:]
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "more":
            return data + b"\0"
    return data[:-1] + bytes([data[-1] ^ 1])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    draft = Draft(draw(st.sampled_from(["safetensors", "safetensors", "npy"])))
    for _ in range(draw(st.integers(0, 3))):
        damage_draft(draw, draft)
    header = draft.header()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(header)))
        splice = draw(
            st.sampled_from([b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b","])
        )
        header = header[:at] + splice + header[at:]
    data = container.seal_container(header, draft.body())
    return damage_bytes(draw, data) if draw(st.integers(0, 3)) == 0 else data


def outcome(data: bytes) -> object:
    """What the container holds, or the status with which it is refused."""
    try:
        content = parse(data)
        check_frames(content)
    except ContainerError as error:
        return error.code if 0 < len(str(error)) < 1000 else "no fit message"
    tensors = [(t.name, t.dtype, t.shape, t.storage, bytes(t.data)) for t in content.tensors]
    return content.kind, content.metadata, tensors


def outcome_of_the_reference(data: bytes) -> object:
    try:
        content = container.parse_container(data)
    except common.FormatError as error:
        return error.status
    tensors = [(t.name, t.dtype, t.shape, t.storage, t.data) for t in content.tensors]
    return content.kind, content.metadata, tensors


def test_both_readers_give_the_same_status() -> None:
    seen: set[object] = set()

    @settings(deadline=None, max_examples=800, derandomize=True)
    @given(data=damaged())
    def compare(data: bytes) -> None:
        expected = outcome_of_the_reference(data)
        assert outcome(data) == expected
        seen.add(expected if isinstance(expected, str) else "ok")

    compare()
    # All of them, else the comparison proves little.
    assert seen == {
        *("ok", "truncated", "bad_magic", "unsupported_version", "reserved_bits"),
        *("checksum_mismatch", "corrupt_payload", "trailing_bytes", "limit_exceeded"),
        "length_mismatch",
    }
