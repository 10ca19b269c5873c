"""gw_packet_compressor and gw_packet_decompressor on Ethernet frames."""

from __future__ import annotations

import random

import numpy as np
import pytest

import codec
import engine
import frames
from codec import CODECS
from engine import COMPRESSED, FLOWS, Flow
from frames import TCP, UDP, ipv4, tcp, udp

NAME = CODECS[0]

# Frames that pass unchanged, though some bear the tag.
VALUES = codec.random_values(40, 1)
OTHERS = {
    "ARP": frames.MAC + b"\x08\x06" + bytes(range(28)),
    "IPv6 with the tag's traffic class": frames.MAC + b"\x86\xdd\x62\x80" + VALUES,
    "VLAN": ipv4(VALUES, ethertype=b"\x81\x00\x00\x05\x08\x00"),
    **{f"EtherType {e.hex()}": udp(VALUES, ethertype=e) for e in (b"\x08\x01", b"\x88\x00")},
    "version 6 in IPv4's frame": udp(VALUES)[:14] + b"\x65" + udp(VALUES)[15:],
    "IP options": ipv4(b"\x13\x88\x13\x89\0\xa8\0\0" + VALUES, options=bytes(4)),
    "first fragment": udp(VALUES, fragment=0x2000),
    "later fragment": udp(VALUES, fragment=0x0001),
    "late fragment": udp(VALUES, fragment=0x0100),
    **{f"IPv4 length {length}": udp(VALUES, length=length) for length in (0, 19, 20, 27, 28)},
    "ICMP": ipv4(VALUES, protocol=1),
    "TCP without payload": tcp(b""),
    "TCP without payload, padded": frames.pad(tcp(b"")),
    "TCP with options, without payload": tcp(b"", words=15),
    "TCP with too short a header": tcp(VALUES, words=4),
    "TCP whose header is longer than the packet": tcp(b"", words=15, length=44),
    "UDP without payload": udp(b""),
    "UDP shorter than its header": ipv4(bytes(4)),
    "TCP shorter than its header": ipv4(bytes(12), protocol=TCP),
    "UDP with half a value": udp(VALUES[:6]),
    "TCP with a byte too many": tcp(VALUES + b"x"),
    **{f"type of service {tos:#x}": udp(VALUES, tos=tos) for tos in (0, 0x08, 0x20, 0x2C, 0xA8)},
    **{f"untagged TCP, {n} values": tcp(VALUES[: 4 * n], tos=0) for n in (0, 1, 2, 3, 40)},
}


def check(sent: list[bytes], name: str, flow: Flow) -> None:
    """Frames through both engines; each frame's tuser says whether it was compressed."""
    users = [COMPRESSED if frames.parts(frame) else 0 for frame in sent]
    on_wire = engine.run("gw_packet_compressor", sent, flow, engine.codec_settings(name))
    assert [p.data for p in on_wire] == [frames.compressed(frame, name) for frame in sent]
    assert [p.user for p in on_wire] == users
    arrived = engine.run("gw_packet_decompressor", [p.data for p in on_wire], flow)
    assert [p.data for p in arrived] == [frames.restored(frame, name) for frame in sent]
    assert [p.user for p in arrived] == users


@pytest.mark.parametrize("frame", OTHERS.values(), ids=OTHERS)
def test_other_frames_pass_unchanged(frame: bytes) -> None:
    assert frames.parts(frame) is None
    for name in ("gw_packet_compressor", "gw_packet_decompressor"):
        (made,) = engine.run(name, [frame])
        assert (made.data, made.user) == (frame, 0)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_untagged_bytes_of_any_length_pass_unchanged(flow: Flow) -> None:
    sent = [random.Random(n).randbytes(n) for n in [*range(140), 1514, 0, 9014]]
    for name in ("gw_packet_compressor", "gw_packet_decompressor"):
        made = engine.run(name, sent, flow)
        assert [(p.data, p.user) for p in made] == [(frame, 0) for frame in sent]


@pytest.mark.parametrize("name", CODECS)
def test_tagged_udp_of_every_size(name: str) -> None:
    sent = [udp(codec.random_values(n, n)) for n in [*range(1, 80), 368, 2243, 16376]]
    check(sent, name, Flow())


@pytest.mark.parametrize("words", range(5, 16))
def test_tagged_tcp_with_every_header(words: int) -> None:
    sizes = [*range(1, 20), 340]
    check([tcp(codec.random_values(n, n), words) for n in sizes], NAME, Flow(20, 20, words))


def test_ecn_bits_and_a_marked_reserved_bit_do_not_matter() -> None:
    """A switch may set ECN on the way, between the two engines."""
    tagged = [udp(VALUES, tos=frames.TAG | ecn) for ecn in range(4)]
    check([*tagged, udp(VALUES, fragment=0), udp(VALUES, fragment=0xC000)], NAME, Flow())
    on_wire = engine.run("gw_packet_compressor", tagged)
    marked = [p.data[:15] + b"\x2b" + p.data[16:] for p in on_wire]
    arrived = engine.run("gw_packet_decompressor", marked)
    values = codec.decompress(codec.compress(VALUES, NAME), 40)
    assert [p.data[42:] for p in arrived] == [values] * 4


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_frames_of_all_kinds_mixed_back_to_back(flow: Flow) -> None:
    draw = random.Random(flow.seed)

    def any_frame() -> bytes:
        values = codec.random_values(draw.choice([1, 2, 7, 8, 9, 40, 362]), draw.randrange(1 << 30))
        tos = draw.choice([0, frames.TAG, frames.TAG, 0x10])
        if draw.random() < 0.2:
            return draw.choice(list(OTHERS.values()))
        if draw.random() < 0.1:
            return draw.randbytes(draw.randrange(70))
        return (
            udp(values, tos=tos)
            if draw.random() < 0.5
            else tcp(values, draw.choice([5, 8, 15]), tos=tos)
        )

    check([any_frame() for _ in range(300)], "inceptionn:bound=6", flow)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_small_frames_are_padded_on_the_way(flow: Flow) -> None:
    """The senders' MAC fills them up to 60 bytes, before and after compression."""
    zeros = bytes(4 * 64)
    small = [udp(zeros[: 4 * n]) for n in (1, 4, 8, 9, 64)] + [tcp(VALUES[:4]), udp(VALUES[:12])]
    on_wire = engine.run("gw_packet_compressor", [frames.pad(frame) for frame in small], flow)
    assert [p.data for p in on_wire] == [frames.compressed(frame, NAME) for frame in small]
    assert {p.user for p in on_wire} == {COMPRESSED}
    assert any(len(p.data) < frames.SMALLEST for p in on_wire)
    arrived = engine.run("gw_packet_decompressor", [frames.pad(p.data) for p in on_wire], flow)
    assert [p.data for p in arrived] == [frames.restored(frame, NAME) for frame in small]
    assert {p.user for p in arrived} == {COMPRESSED}


def test_other_bytes_after_the_last_value_are_refused() -> None:
    """Padding of other bytes than zeros or to another size; on both sides."""
    small, large = udp(bytes(4)), udp(VALUES)
    longer = [udp(VALUES[: 4 * n]) for n in range(12, 40)]
    longer = [frame for frame in longer if 60 < len(frames.compressed(frame, NAME)) < 124]
    bad = [
        *(frames.pad(small)[:i] + b"\1" + frames.pad(small)[i + 1 :] for i in range(46, 60)),
        small + bytes(13),
        small + bytes(15),
        *(large + bytes(size) for size in (1, 4, 32, 100)),
        *(udp(VALUES[: 4 * n]).ljust(size, b"\0") for n in (12, 20) for size in (124, 188)),
    ]
    wire = frames.compressed(small, NAME)
    bad_wire = [
        *(frames.pad(wire)[:i] + b"\1" + frames.pad(wire)[i + 1 :] for i in range(44, 60)),
        wire + bytes(15),
        wire + bytes(17),
        *(frames.compressed(large, NAME) + bytes(size) for size in (1, 4, 32, 100)),
        *(frames.compressed(frame, NAME).ljust(124, b"\0") for frame in longer),
    ]
    for name, packets, good in (
        ("gw_packet_compressor", bad, small),
        ("gw_packet_decompressor", bad_wire, wire),
    ):
        made = engine.run(name, [packet for each in packets for packet in (each, good)])
        assert [p.reason for p in made] == [engine.LEFT_OVER, engine.FINE] * len(packets)


@pytest.mark.parametrize("make", [udp, tcp], ids=["UDP", "TCP"])
@pytest.mark.parametrize("name", ["gw_packet_compressor", "gw_packet_decompressor"])
def test_frames_that_end_early_are_refused(name: str, make: type[bytes]) -> None:
    """From byte 24 on, where the tag and the protocol are known."""
    whole = make(VALUES)
    if name == "gw_packet_decompressor":
        whole = frames.compressed(whole, NAME)
    cut = [whole[:size] for size in range(len(whole))]
    made = engine.run(name, [frame for each in cut for frame in (each, whole)], Flow(10, 20, 3))
    assert len({p.data for p in made[1::2]}) == 1
    assert {p.user for p in made[1::2]} == {COMPRESSED}
    assert [(p.data, p.user) for p in made[:48:2]] == [(frame, 0) for frame in cut[:24]]
    assert {p.reason for p in made[48::2]} == {engine.CUT_OFF}


def test_bytes_without_tkeep_do_not_make_a_header() -> None:
    """Frames of up to 23 bytes, though a tagged header goes on in their beat."""
    beat = engine.beats_of([udp(VALUES)])[:1]
    beats = np.repeat(beat, 24)
    beats["last"] = 1
    beats["keep"] = [(1 << size) - 1 for size in range(24)]
    for name in ("gw_packet_compressor", "gw_packet_decompressor"):
        made = engine.packets_of(engine.run_beats(name, beats, Flow()))
        assert [(p.data, p.user) for p in made] == [(udp(VALUES)[:size], 0) for size in range(24)]


@pytest.mark.parametrize("settings", [3, 7])
def test_the_reserved_bound_concerns_tagged_frames_alone(settings: int) -> None:
    sent = [udp(VALUES), udp(VALUES, tos=0), tcp(VALUES), OTHERS["ARP"]]
    made = engine.run("gw_packet_compressor", sent, settings=settings)
    assert [p.reason for p in made] == [engine.SETTINGS, 0, engine.SETTINGS, 0]
    assert [p.data for p in made[1::2]] == sent[1::2]


def test_protocols_are_told_apart() -> None:
    """The same bytes, once as UDP and once as TCP, have headers of different size."""
    body = tcp(VALUES)[34:]
    check([ipv4(body, protocol=UDP), ipv4(body, protocol=TCP)], NAME, Flow())
