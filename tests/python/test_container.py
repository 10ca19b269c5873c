"""The file format of `gradwire compress`: written files can be read, damaged files are refused."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

import gradwire
from golden import common, container, encoder
from gradwire.container import (
    MAX_HEADER_BYTES,
    PREFIX,
    ContainerError,
    Tensor,
    TensorFile,
    check_content,
    check_frames,
    is_container,
    parse,
    serialize,
)
from payloads.inceptionn import NUMBER as INCEPTIONN

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
        header(
            plain_entry(shape=[2], size=2, crc32=zlib.crc32(PLAIN[:2])),
            plain_entry(offset=3, name="gap"),
        ),
        header(plain_entry(size=2, crc32=zlib.crc32(PLAIN[:2]))),
        header(plain_entry(dtype="I16")),
        header(plain_entry(dtype="F4", shape=[5])),
        header(plain_entry(dtype="F33")),
        header(plain_entry(dtype="")),
        header(plain_entry(dtype="|i1")),
        header(plain_entry(name="", dtype="I8"), kind="npy"),
        header(plain_entry(name="", dtype="int"), kind="npy"),
        header(plain_entry(name="", dtype="|S2147483648", shape=[0]), kind="npy"),
        header(plain_entry(name="__metadata__")),
    ],
)
def test_a_wrong_header_is_refused(content: object) -> None:
    assert refusal(build(content)) == "corrupt_payload"


LONG = "1" * 4301  # more digits than Python's int() takes


# The status of a text in the place of the shape, whose value is 3. Two readers would have to guess
# each of them, if format.md did not say it.
@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ("[3]", "ok"),
        (" [\t3 ]\r\n", "ok"),
        ("[3, -0]", "corrupt_payload"),  # no values, but three bytes
        ("[3.0]", "corrupt_payload"),
        ("[3e0]", "corrupt_payload"),
        ("[0.3E+1]", "corrupt_payload"),
        ("[03]", "corrupt_payload"),
        ("[+3]", "corrupt_payload"),
        ("[3,]", "corrupt_payload"),
        ("[NaN]", "corrupt_payload"),
        (f"[{'NaN,' * 64}NaN]", "corrupt_payload"),
        (f"[{'1,' * 64}-Infinity]", "corrupt_payload"),
        (f"[{'1,' * 64}1]", "limit_exceeded"),
        (f"[{'[],' * 64}[]]", "corrupt_payload"),
        (f"[{'[[],' * 64}1]", "corrupt_payload"),
        (f"[{LONG}]", "limit_exceeded"),
        (f"[-{LONG}]", "corrupt_payload"),
        (f"[{LONG}.0]", "corrupt_payload"),
        ("[3] // three", "corrupt_payload"),
        ("[" * 100_000 + "]" * 100_000, "corrupt_payload"),
    ],
    ids=lambda text: text if len(text) < 30 else text[:9],
)
def test_the_json_of_a_header_is_that_of_rfc_8259(shape: str, code: str) -> None:
    text = json.dumps(header(plain_entry(shape="@"))).replace('"@"', shape)
    if code == "ok":
        assert parse(build(text.encode())).tensors[0].shape == (3,)
        container.parse_container(build(text.encode()))
    else:
        assert refusal(build(text.encode())) == code


@pytest.mark.parametrize(
    ("key", "text", "code"),
    [
        ("offset", "-0", "ok"),
        ("size", LONG, "truncated"),
        ("offset", LONG, "corrupt_payload"),
        ("crc32", LONG, "checksum_mismatch"),
        ("crc32", f"-{LONG}", "corrupt_payload"),
        ("name", '"\\ud800"', "ok"),
        ("name", '"\\uD83D\\uDE00"', "ok"),
        ("name", '"\\x41"', "corrupt_payload"),
        ("name", '"a\tb"', "corrupt_payload"),
        ("name", '"a\x7f"', "ok"),
        ("name", '"a","n\\u0061me":"b"', "corrupt_payload"),
        ("name", '"\\u005f_metadata__"', "corrupt_payload"),
    ],
)
def test_numbers_and_strings_of_a_header(key: str, text: str, code: str) -> None:
    data = build(json.dumps(header(plain_entry(**{key: "@"}))).replace('"@"', text).encode())
    if code == "ok":
        assert parse(data).tensors[0].name == container.parse_container(data).tensors[0].name
    else:
        assert refusal(data) == code


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc0\xae", b"\xf4\x90\x80\x80"])
def test_a_header_that_is_no_utf_8_is_refused(bad: bytes) -> None:
    assert refusal(build(json.dumps(header(plain_entry())).encode().replace(b"counts", bad))) == (
        "corrupt_payload"
    )


def test_a_long_header_of_a_small_file_is_refused_before_it_is_parsed() -> None:
    """A parsed header takes up to 26 times its bytes."""
    many = b"{}," * 2_000_000
    text = b'{"kind":"safetensors","metadata":{},"tensors":[' + many + b"{}]}"
    with pytest.raises(ContainerError, match="4569308 are allowed") as error:
        parse(build(text, b""))
    assert error.value.code == "limit_exceeded"


def test_a_frame_of_inceptionn_is_checked_by_its_header_first() -> None:
    """Its tags are the content of its payload, which counts after all other checks."""
    bad_tags = encoder.seal_frame(INCEPTIONN, 0, 0, 3, bytes.fromhex("00ff"))
    with pytest.raises(gradwire.GradwireError):
        gradwire.inspect(bad_tags)
    for shape, code in (((4,), "length_mismatch"), ((3,), "ok")):
        content = TensorFile("safetensors", (Tensor("t", "F32", shape, bad_tags, "frame"),))
        if code == "ok":
            check_frames(content)
        else:
            with pytest.raises(ContainerError, match="'t'") as error:
                check_frames(content)
            assert error.value.code == code


def test_what_a_file_holds_is_checked_before_it_is_written() -> None:
    for tensor, code in (
        (Tensor("t", "I8", (0, 2**41), b""), "limit_exceeded"),
        (Tensor("t", "I8", (1,) * 65, b"1"), "limit_exceeded"),
        (Tensor("__metadata__", "I8", (1,), b"1"), "corrupt_payload"),
        (Tensor("t", "F33", (1,), b"1"), "corrupt_payload"),
    ):
        content = TensorFile("safetensors", (tensor,))
        with pytest.raises(ContainerError, match=r"tensor 0|__metadata__") as error:
            check_content(content)
        assert error.value.code == code
        assert refusal(b"".join(serialize(content))) == code


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
        (plain_entry(shape=[2], size=2, crc32=zlib.crc32(PLAIN[:2])), "trailing_bytes"),
        (plain_entry(crc32=zlib.crc32(PLAIN) + 2**32), "checksum_mismatch"),
        (plain_entry(crc32=10**18), "checksum_mismatch"),
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
