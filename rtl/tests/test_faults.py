"""Malformed input ends its packet with a reason in tuser; the next packet is not touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import codec
import engine
import golden
import gradwire
from engine import ABSENT_TAG, CUT_OFF, FLOWS, KEEP, LEFT_OVER, SETTINGS, Flow

NAME = codec.CODECS[0]


def golden_errors() -> list[Any]:
    """Payload and n of the golden frames that have no more values than a chunk."""
    found = []
    for case in golden.cases("errors"):
        if case["name"].startswith("frame-inceptionn") and case["status"] == "corrupt_payload":
            frame = golden.read(case["frame"])
            n = int.from_bytes(frame[8:16], "little")
            if n <= codec.CHUNK:
                found.append(pytest.param(frame[codec.HEADER :], n, id=case["name"]))
    return found


@pytest.mark.parametrize(("payload", "n"), golden_errors())
def test_golden_errors_are_refused(payload: bytes, n: int) -> None:
    assert engine.run("gw_decompressor", [payload], users=[n])[0].reason != engine.FINE


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_random_bytes_get_the_codec_s_verdict(flow: Flow) -> None:
    """Payloads with a random fault, and any bytes at all: the same are refused, the rest decode."""
    draw = np.random.default_rng(flow.seed)
    payloads, counts = [], []
    for i in range(3000):
        n = int(draw.integers(0, 60))
        payload = codec.compress(codec.random_values(n, i), NAME)
        kind = draw.integers(0, 5)
        if kind == 0:
            payload = payload[: draw.integers(0, len(payload) + 1)]
        elif kind == 1:
            payload += draw.bytes(int(draw.integers(1, 70)))
        elif kind == 2 and payload:
            at = draw.integers(0, len(payload))
            flipped = payload[at] ^ 1 << draw.integers(0, 8)
            payload = payload[:at] + bytes([flipped]) + payload[at + 1 :]
        elif kind == 3:
            n = max(0, n + int(draw.integers(-9, 10)))
        else:
            payload = draw.bytes(int(draw.integers(0, 70)))
        payloads.append(payload)
        counts.append(n)
    refused = 0
    made = engine.run("gw_decompressor", payloads, flow, users=counts)
    for packet, payload, n in zip(made, payloads, counts, strict=True):
        try:
            values = codec.decompress(payload, n)
        except gradwire.GradwireError:
            assert packet.reason != engine.FINE
            refused += 1
        else:
            assert (packet.reason, packet.data) == (engine.FINE, values)
    assert 1000 < refused < 2900


@pytest.mark.parametrize("flow", [Flow(), Flow(30, 40, 3)], ids=str)
def test_payloads_cut_or_longer_by_any_number_of_bytes(flow: Flow) -> None:
    values = codec.random_values(75, 3)
    whole = codec.compress(values, NAME)
    cut = [whole[:size] for size in range(len(whole))]
    longer = [whole + bytes(size) for size in range(1, 80)]
    packets = [packet for bad in cut + longer for packet in (bad, whole)]
    made = engine.run("gw_decompressor", packets, flow, users=[75] * len(packets))
    restored = codec.decompress(whole, 75)
    assert [p.reason for p in made[::2]] == [CUT_OFF] * len(cut) + [LEFT_OVER] * len(longer)
    assert all(p.data == restored and p.reason == engine.FINE for p in made[1::2])
    assert all(restored.startswith(p.data) for p in made[::2])


@pytest.mark.parametrize("flow", [Flow(), Flow(30, 40, 5)], ids=str)
def test_a_tag_of_an_absent_value_is_the_reason(flow: Flow) -> None:
    """Whatever follows the tags of the last burst: the bytes that all tags ask for, those of the
    present values alone, fewer or more. Without both bytes of the tags it is cut off."""
    packets, counts, reasons = [], [], []
    for n in (1, 7, 9, 15, 79):
        values = codec.random_values(n, n)
        whole = codec.compress(values, NAME)
        place = len(codec.compress(values[: 4 * (n // 8 * 8)], NAME))  # of the last tags
        for lane in range(n % 8, 8):
            for tag in (1, 2, 3):
                bad = bytearray(whole)
                bad[place + lane // 4] |= tag << 2 * (lane % 4)
                for size in (place, place + 1, place + 2, len(whole), len(whole) + tag + tag // 3):
                    packets += [bytes(bad).ljust(size, b"\x11")[:size], whole]
                    reasons.append(CUT_OFF if size < place + 2 else ABSENT_TAG)
                    counts += [n, n]
    made = engine.run("gw_decompressor", packets, flow, users=counts)
    assert [p.reason for p in made[::2]] == reasons
    assert {p.reason for p in made[1::2]} == {engine.FINE}


def test_bytes_that_are_no_whole_value_are_not_compressed() -> None:
    packets = [codec.random_values(30, 1)[:size] for size in range(120)]
    made = engine.run("gw_compressor", packets, Flow(20, 20, 4))
    assert [p.reason for p in made] == [LEFT_OVER if len(p) % 4 else engine.FINE for p in packets]
    for packet, values in zip(made[::4], packets[::4], strict=True):
        assert packet.data == codec.compress(values, NAME)


@pytest.mark.parametrize("name", ["gw_compressor", "gw_packet_compressor", "gw_decompressor"])
def test_a_tkeep_with_a_gap_is_refused(name: str) -> None:
    """Also a partial beat and an empty one within a packet; each between two good packets."""
    good = bytes(range(64)) if "packet" in name else codec.random_values(40, 1)
    if name == "gw_decompressor":
        good = codec.compress(good, NAME)
    faults = {
        "a gap": (0, 0xFFFF0FFF),
        "not from the first byte on": (0, 0xFFFFFFFE),
        "a partial beat before the last": (0, 0x0000FFFF),
        "an empty beat before the last": (0, 0),
        "a gap in the last beat": (-1, 5),
        "an empty last beat": (-1, 0),
    }
    beats, one = [], engine.beats_of([good], [40])
    for place, keep in faults.values():
        bad = one.copy()
        bad["keep"][place] = keep
        beats += [one, bad]
    for flow in FLOWS:
        out = engine.run_beats(name, np.concatenate([*beats, one]), flow)
        made = engine.packets_of(out)
        assert [p.reason for p in made] == [engine.FINE, KEEP] * len(faults) + [engine.FINE]
        assert len({p.data for p in made[::2]}) == 1


@pytest.mark.parametrize("settings", [3, 7])
def test_the_reserved_bound_is_refused(settings: int) -> None:
    packets = [codec.random_values(n, n) for n in (0, 1, 40)]
    made = engine.run("gw_compressor", packets, settings=settings)
    assert [(p.data, p.reason) for p in made] == [(b"", SETTINGS)] * 3
