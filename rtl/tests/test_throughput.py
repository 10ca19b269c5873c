"""Cycles without stalls: the figures of rtl/README.md, which `pytest -rP` prints."""

from __future__ import annotations

import numpy as np
import pytest

import codec
import engine
import frames

NAME = codec.CODECS[0]
BURSTS = 4096
PACKETS = 200


def count_cycles(name: str, packets: list[bytes], n: int) -> tuple[int, int]:
    """From the first beat in to the last beat out, and to the first beat out."""
    beats = engine.beats_of(packets, [n] * len(packets))
    out = engine.run_beats(name, beats, engine.Flow())
    first = int(beats["cycle"][0])
    return int(out["cycle"][-1]) - first + 1, int(out["cycle"][0]) - first


def repeat(values: list[float], first: list[float] | None = None) -> bytes:
    """BURSTS bursts of the same values, but for the first."""
    return np.array((first or values) + values * (BURSTS - 1), "<f4").tobytes()


# Beats of 32 bytes bound both sides, so that bursts of 34 bytes take 17 cycles for 16; the last
# case has a quarter of these. From byte 31 on, bursts of 32 bytes touch three beats.
@pytest.mark.parametrize(
    ("packet", "limit"),
    [
        pytest.param(repeat([0.0] * 8), 1.0, id="2 bytes"),
        pytest.param(repeat([0.01] * 8), 1.0, id="10 bytes"),
        pytest.param(repeat([0.3] * 8), 1.0, id="18 bytes"),
        pytest.param(repeat([1.5] * 7 + [0.01]), 1.0, id="31 bytes"),
        pytest.param(repeat([1.5] * 7 + [0.3]), 1.0, id="32 bytes"),
        pytest.param(repeat([1.5] * 7 + [0.3], [1.5] * 7 + [0.01]), 1.0, id="32 bytes from 31 on"),
        pytest.param(repeat([1.5] * 8), 17 / 16, id="34 bytes"),
        pytest.param(codec.runs_of_one_class(8 * BURSTS, 1), 65 / 64, id="mixed"),
    ],
)
def test_one_burst_in_every_cycle(packet: bytes, limit: float) -> None:
    payload = codec.compress(packet, NAME)
    for name, data in (("gw_compressor", packet), ("gw_decompressor", payload)):
        total, latency = count_cycles(name, [data], 8 * BURSTS)
        print(f"{name}: {total / BURSTS:.4f} cycles a burst, first beat after {latency}")
        assert total / BURSTS <= limit + 0.005, name


@pytest.mark.parametrize(
    ("frame", "limit"),
    [
        pytest.param(frames.tcp(b"", tos=0).ljust(60, b"\0"), 2, id="untagged, 60 bytes"),
        pytest.param(frames.udp(bytes(1472), tos=0), 48, id="untagged, 1514 bytes"),
        pytest.param(frames.udp(codec.runs_of_one_class(368, 1)), 49, id="tagged UDP, 1514 bytes"),
        pytest.param(
            frames.tcp(codec.runs_of_one_class(362, 1), 8), 49, id="tagged TCP, 1514 bytes"
        ),
    ],
)
def test_packets_back_to_back(frame: bytes, limit: int) -> None:
    """2 and 48 beats each; a quarter of the tagged frames' bursts have 34 bytes."""
    on_wire = frames.compressed(frame, NAME)
    for name, data in (("gw_packet_compressor", frame), ("gw_packet_decompressor", on_wire)):
        total, latency = count_cycles(name, [data] * PACKETS, 0)
        print(f"{name}: {total / PACKETS:.2f} cycles a packet, first beat after {latency}")
        assert total / PACKETS <= limit + 0.2, name
