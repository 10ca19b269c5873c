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


def steady_cycles(name: str, packet: bytes, n: int) -> float:
    """How many cycles a packet takes among others like it, back to back."""
    few, many = (count_cycles(name, [packet] * count, n)[0] for count in (20, 40))
    return (many - few) / 20


def expected_cycles(sizes: list[int], beats: int) -> int:
    """The cycles of a packet that came in so many beats, and whose steps leave so many bytes each.

    A step takes a cycle, in which a beat can leave, and one more for a further beat: one that is
    full, or the packet's last.
    """
    cycles, held = len(sizes), 0
    for place, size in enumerate(sizes):
        left = held + size - 32  # behind the beat that leaves in this cycle
        full, last = left >= 32, place == len(sizes) - 1
        cycles += full + (last and left - 32 * full > 0)
        held = (held + size) % 32
    return max(cycles, beats)


@pytest.mark.parametrize("value", [0.0, 0.01, 0.3, 1.5])
def test_cycles_of_every_length_of_packets(value: float) -> None:
    """One more where the last burst crosses from one beat of the output into the next."""
    crossings = 0
    for n in range(1, 49):
        values = np.full(n, value, "<f4").tobytes()
        payload = codec.compress(values, NAME)
        present = [min(8, n - first) for first in range(0, n, 8)]
        code = (len(payload) - 2 * len(present)) // n
        bursts = [2 + code * count for count in present]
        whole = [4 * count for count in present]
        frame = frames.udp(values)
        headers = [34, len(frame) - len(values) - 34]
        for name, data, sizes in (
            ("gw_compressor", values, bursts),
            ("gw_decompressor", payload, whole),
            ("gw_packet_compressor", frame, headers + bursts),
            ("gw_packet_decompressor", frames.compressed(frame, NAME), headers + whole),
        ):
            expected = expected_cycles(sizes, -(-len(data) // 32))
            assert steady_cycles(name, data, n) == expected, (name, n)
            before = sum(sizes[:-1]) % 32
            crossings += expected == len(sizes) + (before + sizes[-1] > 32) > len(sizes)
    assert crossings > 10


@pytest.mark.parametrize(
    ("name", "packet", "n", "cycles"),
    [
        pytest.param("gw_compressor", repeat([0.3] * 8)[:4], 1, 5, id="compressor, 4 bytes"),
        pytest.param("gw_compressor", repeat([0.3] * 8)[:32], 8, 5, id="compressor, 32 bytes"),
        pytest.param("gw_compressor", repeat([1.5] * 8)[:36], 9, 6, id="compressor, 36 bytes"),
        pytest.param("gw_compressor", repeat([1.5] * 8), 8, 6, id="compressor, long"),
        pytest.param("gw_compressor", repeat([0.3] * 8), 8, 7, id="compressor, two bursts to 32"),
        pytest.param("gw_decompressor", bytes(32), 128, 5, id="decompressor, 32 bytes"),
        pytest.param("gw_decompressor", bytes(34), 136, 6, id="decompressor, 34 bytes"),
        pytest.param("gw_packet_compressor", frames.udp(bytes(1472)), 0, 6, id="tagged frame"),
        pytest.param("gw_packet_decompressor", bytes(60), 0, 6, id="untagged frame"),
    ],
)
def test_cycles_to_the_first_beat(name: str, packet: bytes, n: int, cycles: int) -> None:
    assert count_cycles(name, [packet], n)[1] == cycles
