"""gw_compressor and gw_decompressor against the C++ codec, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import codec
import engine
import golden
import gradwire
from codec import CODECS
from engine import COMPRESSED, FLOWS, Flow

ENCODE = [
    case
    for case in golden.cases("encode")
    if case["name"].startswith("inceptionn") and case["n"] <= codec.CHUNK
]
DECODE = [case for case in golden.cases("decode") if case["name"].startswith("inceptionn")]


def check_both_ways(packets: list[bytes], name: str, flow: Flow) -> None:
    """The compressor makes the codec's payloads, the decompressor the values of these."""
    payloads = [codec.compress(values, name) for values in packets]
    compressed = engine.run("gw_compressor", packets, flow, engine.codec_settings(name))
    assert [p.data for p in compressed] == payloads
    assert {p.user for p in compressed} == {COMPRESSED}
    counts = [len(values) // 4 for values in packets]
    restored = engine.run("gw_decompressor", payloads, flow, users=counts)
    assert {p.user for p in restored} == {COMPRESSED}
    for packet, payload, n in zip(restored, payloads, counts, strict=True):
        assert packet.data == codec.decompress(payload, n)


@pytest.mark.parametrize("case", ENCODE, ids=lambda case: case["name"])
def test_golden_files_compress_to_their_bytes(case: golden.Case) -> None:
    values = golden.read_values(case["input"], case["n"])
    (made,) = engine.run("gw_compressor", [values], settings=engine.codec_settings(case["codec"]))
    assert made.data == golden.read(case["frame"])[codec.HEADER :]
    assert made.user == COMPRESSED


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case["name"])
def test_golden_files_decompress_to_their_values(case: golden.Case) -> None:
    payload = golden.read(case["frame"])[codec.HEADER :]
    (made,) = engine.run("gw_decompressor", [payload], users=[case["n"]])
    assert made.data == golden.read_values(case["values"], case["n"])
    assert made.user == COMPRESSED


@pytest.mark.parametrize("name", CODECS)
def test_random_packets(name: str) -> None:
    packets = [codec.random_values(n, n) for n in (40960, 375, 362, 8)]
    check_both_ways(packets, name, Flow())


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_packets_of_every_length_back_to_back_with_stalls(flow: Flow) -> None:
    """Partial last bursts, packets without values, single beats."""
    lengths = [*range(70), *range(70, 0, -7), 362, 0, 0, 1, 8]
    packets = [codec.random_values(n, n + flow.seed) for n in lengths]
    packets += [codec.runs_of_one_class(n, n) for n in (1000, 2250)]
    check_both_ways(packets, "inceptionn:bound=8,mode=strict", flow)


@pytest.mark.parametrize("name", CODECS)
def test_every_exponent_with_edges_of_mantissas(name: str) -> None:
    mantissas = [0, 1, 0x7FFFFF, *(1 << i for i in range(23)), *(0x7FFFFF >> i for i in range(23))]
    bits = [s << 31 | e << 23 | m for s in (0, 1) for e in range(256) for m in mantissas]
    check_both_ways([np.array(bits, "<u4").tobytes()], name, Flow())


def test_every_code_of_8_and_16_bits() -> None:
    codes = range(1 << 16)
    bytes_8 = b"".join(b"\x55\x55" + bytes(range(i, i + 8)) for i in range(0, 256, 8))
    (made,) = engine.run("gw_decompressor", [bytes_8], users=[256])
    assert made.data == codec.decompress(bytes_8, 256)
    words = np.array(codes, "<u2").reshape(-1, 8)
    bytes_16 = b"".join(b"\xaa\xaa" + row.tobytes() for row in words)
    halves = [bytes_16[: len(bytes_16) // 2], bytes_16[len(bytes_16) // 2 :]]
    made_16 = engine.run("gw_decompressor", halves, users=[1 << 15] * 2)
    assert [p.data for p in made_16] == [codec.decompress(half, 1 << 15) for half in halves]


def burst_size(tags: int) -> int:
    return 2 + sum((0, 1, 2, 4)[tags >> 2 * i & 3] for i in range(8))


def burst_of(tags: int, draw: np.random.Generator) -> bytes:
    return tags.to_bytes(2, "little") + draw.bytes(burst_size(tags) - 2)


@pytest.mark.parametrize("flow", [Flow(), Flow(30, 30, 9)], ids=str)
def test_every_tag_vector_decompresses(flow: Flow) -> None:
    """All 4^8, in packets of a chunk, in random order."""
    draw = np.random.default_rng(5)
    order = draw.permutation(1 << 16)
    packets = [b"".join(burst_of(int(tags), draw) for tags in part) for part in np.split(order, 16)]
    made = engine.run("gw_decompressor", packets, flow, users=[8 * 4096] * 16)
    assert [p.data for p in made] == [codec.decompress(p, 8 * 4096) for p in packets]
    assert {p.user for p in made} == {COMPRESSED}


@pytest.mark.parametrize("flow", [Flow(), Flow(30, 30, 7)], ids=str)
def test_a_last_burst_of_every_size_from_every_byte_of_a_beat(flow: Flow) -> None:
    """It may touch three beats. With more bytes after it, it is refused."""
    draw = np.random.default_rng(8)
    of_size = {burst_size(tags): tags for tags in range(1 << 16)}
    assert sorted(of_size) == [*range(2, 33), 34]
    packets, counts, reasons = [], [], []
    for offset in range(32):
        first = {0: [32], 1: [31, 2]}.get(offset, [offset])
        for size in of_size:
            bursts = b"".join(burst_of(of_size[part], draw) for part in [*first, size])
            for extra in (0, 1, 40):
                packets.append(bursts + bytes(extra))
                counts.append(8 * (len(first) + 1))
                reasons.append(engine.LEFT_OVER if extra else engine.FINE)
    made = engine.run("gw_decompressor", packets, flow, users=counts)
    assert [p.reason for p in made] == reasons
    for packet, payload, n in zip(made[::3], packets[::3], counts[::3], strict=True):
        assert packet.data == codec.decompress(payload, n)


def test_every_tag_vector_is_compressed() -> None:
    """Values whose tags are each of the 4^8 vectors."""
    of_tag = np.array([1e-5, 0.01, 0.3, 1.5], np.float32)
    tags = np.arange(1 << 16)
    values = of_tag[tags[:, np.newaxis] >> 2 * np.arange(8) & 3]
    packets = [part.astype("<f4").tobytes() for part in np.split(values, 16)]
    made = engine.run("gw_compressor", packets)
    assert [p.data for p in made] == [codec.compress(p, CODECS[0]) for p in packets]
    firsts = [int.from_bytes(p.data[:2], "little") for p in made]
    assert firsts == list(range(0, 1 << 16, 1 << 12))


def test_decoders_of_both_kinds_refuse_the_same_last_bursts() -> None:
    """Every tag vector as the only burst of 1 to 8 values: a tag beyond them is refused."""
    draw = np.random.default_rng(6)
    cases = [(tags, n) for n in range(1, 9) for tags in range(0, 1 << 16, 1 if n in (3, 7) else 17)]
    packets = [burst_of(tags, draw) for tags, _ in cases]
    made = engine.run("gw_decompressor", packets, users=[n for _, n in cases])
    for (tags, n), packet in zip(cases, made, strict=True):
        if tags >> 2 * n:
            assert packet.user == COMPRESSED | engine.ABSENT_TAG
            assert packet.data == b""
        else:
            assert packet.user == COMPRESSED
            assert len(packet.data) == 4 * n
    refused = [i for i, (tags, n) in enumerate(cases) if tags >> 2 * n][::997]
    for i in refused:
        with pytest.raises(gradwire.GradwireError):
            codec.decompress(packets[i], cases[i][1])
