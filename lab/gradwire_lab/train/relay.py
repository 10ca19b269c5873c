"""A switch with slow and long links, in user space, for kernels without `netem`.

    python relay.py switch SOCKET RATE LATENCY    forwards frames, until the socket is closed
    python relay.py tap SOCKET                    makes a worker's interface in its own namespace

Each worker's end is a TAP device, whose other end is a descriptor here. Each end sends and receives
at most RATE bits a second; a frame arrives LATENCY seconds after it was sent. So a frame waits for
its sender's link, in the sender's own queue; it travels; and it waits for its receiver's link, as a
router would queue it. That queue holds QUEUED_SECONDS of the rate, but at least QUEUED_FRAMES
frames; what comes then is lost, as on a real link, and TCP slows down.

This file runs as a script, and imports nothing of gradwire: it must start fast.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sched
import select
import socket
import struct
import sys
import time

INTERFACE = "eth0"
MTU = 9000  # fewer frames
QUEUED_SECONDS = 0.05
QUEUED_FRAMES = 64
_AHEAD_SECONDS = 0.003  # of a link, given out at once: a poll can be a millisecond late
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = MTU + 14 + 4
_BROADCAST = 0x01  # in the first byte of a destination: more than one receiver


class Link:
    """One direction of a worker's link, and when it is free."""

    def __init__(self, rate: float) -> None:
        self.seconds_a_byte = 8.0 / rate
        self.most = max(QUEUED_SECONDS, QUEUED_FRAMES * _FRAME * self.seconds_a_byte)
        self.free = 0.0

    def is_full(self, at: float) -> bool:
        return self.free - at > self.most

    def pass_on(self, at: float, size: int) -> float:
        """When a frame that comes at this time has passed."""
        self.free = max(at, self.free) + size * self.seconds_a_byte
        return self.free


class Switch:
    def __init__(self, rate: float, latency: float) -> None:
        self._rate, self._latency = rate, latency
        self._links: dict[int, tuple[Link, Link]] = {}  # of each tap: from and to the worker
        self._taps: dict[bytes, int] = {}  # of each hardware address
        # Frames under way reach the far end, and then the worker; taps with a busy link rest.
        self._later = sched.scheduler(time.monotonic, _go_on)
        self._poll = select.poll()

    def run(self, control: socket.socket) -> None:
        self._poll.register(control, select.POLLIN)
        while True:
            due = self._later.run(blocking=False)
            for descriptor, _ in self._poll.poll(None if due is None else 1e3 * due):
                if descriptor == control.fileno():
                    _, taps, _, _ = socket.recv_fds(control, 1, 1)
                    if not taps:
                        return
                    self._links[taps[0]] = Link(self._rate), Link(self._rate)
                    self._poll.register(taps[0], select.POLLIN)
                    control.send(b"k")
                else:
                    self._take(descriptor)

    def _take(self, tap: int) -> None:
        """Reads a frame that a worker has sent."""
        frame = os.read(tap, _FRAME)
        self._taps[frame[6:12]] = tap
        known = self._taps.get(frame[:6])
        now = time.monotonic()
        left = self._links[tap][0].pass_on(now, len(frame))
        if left > now + _AHEAD_SECONDS:
            self._poll.unregister(tap)
            again = tap, select.POLLIN
            self._later.enterabs(left - _AHEAD_SECONDS, 0, self._poll.register, again)
        to_all = frame[0] & _BROADCAST or known is None
        for target in [each for each in self._links if each != tap] if to_all else [known]:
            at = left + self._latency
            self._later.enterabs(at, 0, self._arrive, (at, target, frame))

    def _arrive(self, at: float, tap: int, frame: bytes) -> None:
        """The frame waits at the far end until its receiver's link is free, or is lost."""
        link = self._links[tap][1]
        if not link.is_full(at):
            self._later.enterabs(link.pass_on(at, len(frame)), 0, _write, (tap, frame))


def _go_on(seconds: float) -> None:
    """What the scheduler does between two events: it need not let other threads run."""


def _write(tap: int, frame: bytes) -> None:
    """The frame is lost if the worker's interface is not up, as it is while the links are made."""
    try:
        os.write(tap, frame)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def make_tap(control: socket.socket) -> None:
    """Makes INTERFACE in this process's namespace, and sends its other end's descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(tap, _TUNSETIFF, request)
    socket.send_fds(control, [b"t"], [tap])


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[2]))
    if sys.argv[1] == "tap":
        make_tap(control)
    else:
        Switch(float(sys.argv[3]), float(sys.argv[4])).run(control)


if __name__ == "__main__":
    main()
