"""Runs the engines of rtl/ under Verilator on packets of bytes."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "build" / "rtl"
BEAT = np.dtype(
    [
        ("data", "u1", 32),
        ("keep", "<u4"),
        ("user", "<u2"),
        ("last", "u1"),
        ("spare", "u1"),
        ("cycle", "<u8"),
    ]
)
Beats = npt.NDArray[np.void]
FULL = 0xFFFFFFFF
FILLER = b"\x4a"  # without tkeep: as a value, it would be sent whole
FAILURES = {
    -1: "no beat moved for 2000 cycles",
    -2: "a beat changed before it was taken",
    -3: "more beats came out than expected",
}
# m_axis_tuser of a packet's last beat.
REASON, COMPRESSED = 7, 8
FINE, KEEP, CUT_OFF, LEFT_OVER, ABSENT_TAG, SETTINGS = range(6)


@dataclass(frozen=True)
class Flow:
    """How a run's beats move: percent of the cycles in which each side stalls."""

    in_stall: int = 0
    out_stall: int = 0
    seed: int = 1


FLOWS = [Flow(), Flow(50, 0, 2), Flow(0, 50, 3), Flow(30, 30, 4), Flow(90, 10, 5), Flow(10, 90, 6)]


@dataclass(frozen=True)
class Packet:
    data: bytes
    user: int

    @property
    def reason(self) -> int:
        return self.user & REASON


def beats_of(packets: list[bytes], users: list[int] | None = None) -> Beats:
    """The beats of packets; a packet without bytes has a beat without bytes."""
    counts = [max(1, -(-len(packet) // 32)) for packet in packets]
    beats = np.zeros(sum(counts), BEAT)
    beats["keep"] = FULL
    last = np.cumsum(counts) - 1
    beats["last"][last] = 1
    data = b"".join(p.ljust(32 * count, FILLER) for p, count in zip(packets, counts, strict=True))
    beats["data"] = np.frombuffer(data, np.uint8).reshape(-1, 32)
    rest = [len(packet) - 32 * (count - 1) for packet, count in zip(packets, counts, strict=True)]
    beats["keep"][last] = [(1 << size) - 1 for size in rest]
    if users is not None:
        beats["user"] = np.repeat(users, counts)
    return beats


def packets_of(beats: Beats) -> list[Packet]:
    """The packets that beats hold; checks the rules of AXI streams of packets."""
    ends = np.flatnonzero(beats["last"])
    assert len(beats) == 0 or ends[-1] == len(beats) - 1, "the last packet has no end"
    sizes = np.bitwise_count(beats["keep"]).astype(np.int64)
    assert (beats["keep"] == (1 << sizes) - 1).all(), "a tkeep with a gap"
    assert (sizes[beats["last"] == 0] == 32).all(), "a beat within a packet is not full"
    assert (beats["user"][beats["last"] == 0] == 0).all(), "a tuser before the last beat"
    absent = np.arange(32) >= sizes[:, np.newaxis]
    assert (beats["data"][absent] == 0).all(), "bytes without tkeep are not 0"
    firsts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    data = beats["data"].tobytes()
    return [
        Packet(data[32 * first : 32 * int(end) + int(sizes[end])], int(beats["user"][end]))
        for first, end in zip(firsts, ends, strict=True)
    ]


def run_beats(name: str, beats: Beats, flow: Flow, settings: int = 0, capacity: int = 0) -> Beats:
    """The beats that leave the engine; sets the field `cycle` of those that it takes."""
    path = LIBRARIES / f"lib{name}.so"
    if not path.exists():
        raise FileNotFoundError(f"{path}; make -C rtl models builds it")
    run = ctypes.CDLL(str(path)).run_engine
    run.restype = ctypes.c_int64
    out = np.zeros(capacity or 17 * len(beats) + 64, BEAT)
    count = run(
        *(beats.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(len(beats))),
        *(out.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(len(out))),
        *(ctypes.c_uint32(n) for n in (settings, flow.seed, flow.in_stall, flow.out_stall)),
    )
    assert count >= 0, FAILURES[count]
    return out[:count]


def run(
    name: str,
    packets: list[bytes],
    flow: Flow | None = None,
    settings: int = 0,
    users: list[int] | None = None,
) -> list[Packet]:
    """The packets that leave the engine, one for each that came."""
    out = packets_of(run_beats(name, beats_of(packets, users), flow or Flow(), settings))
    assert len(out) == len(packets)
    return out


def codec_settings(codec: str) -> int:
    """The engine's input `settings` for a codec string: param_a of its frames."""
    bound = re.search("bound=(10|8|6)", codec)
    return {"10": 0, "8": 1, "6": 2}[bound[1] if bound else "10"] | 4 * ("mode=strict" in codec)
