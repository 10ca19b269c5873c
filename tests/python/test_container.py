"""The file format of `gradwire compress`: written files can be read, damaged files are refused."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

import gradwire
from golden import common, container
from gradwire.container import (
    MAX_HEADER_BYTES,
    PREFIX,
    ContainerError,
    Tensor,
    TensorFile,
    is_container,
    parse,
    serialize,
)

PLAIN = b"\x01\x00\xff"


def plain_entry(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "counts",
        "dtype": "I8",
        "shape": [3],
        "storage": "plain",
        "offset": 0,
        "size": 3,
        "crc32": zlib.crc32(PLAIN),
    }
    return entry | changes


def header(*tensors: object, **changes: Any) -> dict[str, Any]:
    return {"kind": "safetensors", "metadata": {}, "tensors": list(tensors)} | changes


def build(content: object, body: bytes = PLAIN, version: int = 1, flags: int = 0) -> bytes:
    """A file with this header and a correct length and checksum. `content`: JSON or bytes."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    prefix = PREFIX.pack(b"GC", version, flags, 0, len(text))
    checksum = zlib.crc32(prefix[:4] + prefix[8:] + text)
    return PREFIX.pack(b"GC", version, flags, checksum, len(text)) + text + body


def sample() -> TensorFile:
    frame = gradwire.encode(np.array([1, -2, 0, 0.5, 4, -4], np.float32), "3lc:s=1.00")
    return TensorFile(
        "safetensors",
        (
            Tensor("weight", "F32", (2, 3), frame, "frame"),
            Tensor("counts", "I8", (3,), PLAIN),
            Tensor("empty", "I64", (0, 4), b""),
        ),
        {"made by": "a test \u00e4\ud83d"},
    )


def read_all(data: bytes) -> list[bytes | memoryview | np.ndarray]:
    """Parses and decodes everything, as decompress does."""
    return [
        gradwire.decode(tensor.data) if tensor.storage == "frame" else tensor.data
        for tensor in parse(data).tensors
    ]


def refusal(data: bytes) -> str:
    """The code with which both gradwire and the plain Python reader refuse a file."""
    with pytest.raises(ContainerError) as error:
        parse(data)
    with pytest.raises(common.FormatError) as reference:
        container.parse_container(data)
    assert reference.value.status == error.value.code
    return error.value.code


def test_bytes_are_pinned() -> None:
    container = TensorFile("npy", (Tensor("", "|i1", (3,), PLAIN),))
    text = (
        b'{"kind":"npy","metadata":{},"tensors":[{"name":"","dtype":"|i1","shape":[3],'
        b'"storage":"plain","offset":0,"size":3,"crc32":3548470440}]}'
    )
    prefix = bytes.fromhex("47430100 6dbf7812 8700000000000000")
    assert b"".join(serialize(container)) == prefix + text + PLAIN


def test_parse_gives_back_what_was_serialized() -> None:
    data = b"".join(serialize(sample()))
    assert is_container(data)
    assert parse(data) == sample()
    assert parse(memoryview(data)) == sample()


def test_a_container_may_be_empty() -> None:
    container = TensorFile("safetensors", (), {})
    assert parse(b"".join(serialize(container))) == container


def test_every_truncation_is_refused() -> None:
    data = b"".join(serialize(sample()))
    for size in range(len(data)):
        with pytest.raises(ContainerError) as error:
            parse(data[:size])
        assert error.value.code == "truncated", size


def test_every_flipped_bit_is_refused() -> None:
    data = b"".join(serialize(sample()))
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((ContainerError, gradwire.GradwireError)):
            read_all(bytes(damaged))


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ContainerError, match="1 bytes follow") as error:
        parse(b"".join(serialize(sample())) + b"\0")
    assert error.value.code == "trailing_bytes"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"PK\x03\x04" + bytes(40), "bad_magic"),
        (b"P", "bad_magic"),
        (b"", "truncated"),
        (build(header(), b"", version=2), "unsupported_version"),
        (build(header(), b"", flags=0x80), "reserved_bits"),
        (PREFIX.pack(b"GC", 1, 0, 0, MAX_HEADER_BYTES), "truncated"),
        (PREFIX.pack(b"GC", 1, 0, 0, MAX_HEADER_BYTES + 1), "limit_exceeded"),
        (PREFIX.pack(b"GC", 1, 0, 0, 2**32), "limit_exceeded"),
        (PREFIX.pack(b"GC", 1, 0, 0, 2**64 - 1), "limit_exceeded"),
    ],
)
def test_a_wrong_prefix_is_refused(data: bytes, code: str) -> None:
    assert refusal(data) == code


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'"text"',
        b"3",
        b"[" * 200_000,
        b'{"kind":"\xff"}',
        b'{"kind":"npy","kind":"safetensors","metadata":{},"tensors":[]}',
        {"kind": "safetensors", "tensors": []},
        header(extra=1),
        header(kind="npz"),
        header(kind=["npy"]),
        header(metadata={"a": 1}),
        header(metadata=None),
        header(tensors={}),
        header(plain_entry(), kind="npy"),
        header(plain_entry(name=""), kind="npy", metadata={"a": "b"}),
        header("entry"),
        header({"storage": "plain"}),
        header(plain_entry(more=1)),
        header(plain_entry(name=3)),
        header(plain_entry(dtype=None)),
        header(plain_entry(storage="zip")),
        header(plain_entry(storage=["plain"])),
        header({k: v for k, v in plain_entry(storage="zip").items() if k != "crc32"}),
        header(plain_entry(storage="frame")),
        header({k: v for k, v in plain_entry(storage="frame").items() if k != "crc32"}),
        header(plain_entry(shape=3)),
        header(plain_entry(shape=[3.0])),
        header(plain_entry(shape=[-3])),
        header(plain_entry(shape=[True])),
        header(plain_entry(offset=1)),
        header(plain_entry(offset=-1)),
        header(plain_entry(offset=0.0)),
        header(plain_entry(size=-1)),
        header(plain_entry(size=None)),
        header(plain_entry(crc32="0")),
        header(plain_entry(), plain_entry(size=0, offset=3, crc32=0)),
        header(plain_entry(), plain_entry(size=0, offset=0, crc32=0, name="overlap")),
        header(plain_entry(size=2, crc32=zlib.crc32(PLAIN[:2])), plain_entry(offset=3, name="gap")),
    ],
)
def test_a_wrong_header_is_refused(content: object) -> None:
    assert refusal(build(content)) == "corrupt_payload"


def test_an_npy_container_holds_one_tensor() -> None:
    with pytest.raises(ContainerError, match="one tensor") as error:
        parse(build(header(kind="npy"), b""))
    assert error.value.code == "corrupt_payload"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (plain_entry(crc32=0), "checksum_mismatch"),
        (plain_entry(size=4), "truncated"),
        (plain_entry(size=2**64), "truncated"),
        (plain_entry(shape=[2**40, 2]), "limit_exceeded"),
        (plain_entry(shape=[2**64]), "limit_exceeded"),
        (plain_entry(shape=[0, 2**41]), "limit_exceeded"),
        (plain_entry(shape=[1] * 65), "limit_exceeded"),
        (plain_entry(size=2, crc32=zlib.crc32(PLAIN[:2])), "trailing_bytes"),
    ],
)
def test_a_wrong_entry_has_its_own_code(entry: dict[str, Any], code: str) -> None:
    assert parse(build(header(plain_entry()))).tensors[0].data == PLAIN
    with pytest.raises(ContainerError, match=r"counts|last tensor"):
        parse(build(header(entry)))
    assert refusal(build(header(entry))) == code


def test_a_header_too_long_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.container.MAX_HEADER_BYTES", 100)
    with pytest.raises(ContainerError) as error:
        b"".join(serialize(sample()))
    assert error.value.code == "limit_exceeded"


def test_names_need_not_be_ascii() -> None:
    names = ["", "\u00e4/\u4e2d", 'quote"back\\slash', "line\nbreak", "\ud800"]
    tensors = tuple(Tensor(name, "I8", (3,), PLAIN) for name in names)
    assert parse(b"".join(serialize(TensorFile("safetensors", tensors)))).tensors == tensors
