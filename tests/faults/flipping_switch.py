"""relay.py's switch, which flips one bit of one message and corrects its checksum of TCP.

    python flipping_switch.py switch SOCKET RATE LATENCY

The environment names a folder (FAULTS_FLIP). When it holds the file `source`, with an IPv4 address,
the next long segment of TCP from there is changed, and the file `flipped` says how. (A bit that
flips on a cable is found by Ethernet's checksum. In a network card, a switch or memory it is not,
and TCP's checksum of 16 bits, which such a device may compute anew, does not find all of them.)
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from gradwire_lab.train import relay

LEAST_PAYLOAD = 400  # bytes, more than PyTorch's and gradwire's own words
_ETHERNET, _IPV4, _TCP = 14, b"\x08\x00", 6


class FlippingSwitch(relay.Switch):
    def __init__(self, rate: float, latency: float, folder: Path) -> None:
        super().__init__(rate, latency)
        self._folder = folder
        self._source: bytes | None = None
        self._done = False

    def _arrive(self, at: float, tap: int, frame: bytes) -> None:
        super()._arrive(at, tap, self._change(frame))

    def _change(self, frame: bytes) -> bytes:
        if self._done:
            return frame
        if self._source is None:
            request = self._folder / "source"
            if not request.exists():
                return frame
            self._source = socket.inet_aton(request.read_text())
        flipped = flip_in_segment(frame, self._source)
        if flipped is None:
            return frame
        changed, place, size = flipped
        self._done = True
        (self._folder / "flipped").write_text(f"byte {place} of a segment of {size} bytes")
        return changed


def flip_in_segment(frame: bytes, source: bytes) -> tuple[bytes, int, int] | None:
    """A copy of the frame with one bit flipped, and the place in its payload; None: not in this
    frame."""
    head = _ETHERNET + 4 * (frame[_ETHERNET] & 15) if len(frame) > _ETHERNET else 0
    is_tcp = len(frame) > head + 20 and frame[12:14] == _IPV4 and frame[_ETHERNET + 9] == _TCP
    if not is_tcp or frame[_ETHERNET + 12 : _ETHERNET + 16] != source:
        return None
    end = _ETHERNET + int.from_bytes(frame[_ETHERNET + 2 : _ETHERNET + 4])
    payload = head + 4 * (frame[head + 12] >> 4)
    if end - payload < LEAST_PAYLOAD:
        return None
    place = payload + (end - payload) * 3 // 4
    place -= (place - head) % 2  # the high byte of a word of TCP's checksum
    changed = bytearray(frame)
    before = int.from_bytes(changed[place : place + 2])
    changed[place] ^= 4
    after = int.from_bytes(changed[place : place + 2])
    # RFC 1624, equation 3.
    (old,) = struct.unpack_from(">H", changed, head + 16)
    total = (~old & 0xFFFF) + (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", changed, head + 16, ~total & 0xFFFF)
    return bytes(changed), place - payload, end - payload


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[2]))
    folder = Path(os.environ["FAULTS_FLIP"])
    FlippingSwitch(float(sys.argv[3]), float(sys.argv[4]), folder).run(control)


if __name__ == "__main__":
    main()
