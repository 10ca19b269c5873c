"""A rate-limited network between processes of one machine, which vanishes with them.

    worker 0 [eth0 10.77.0.1]--veth--[port0 \\
    worker 1 [eth0 10.77.0.2]--veth--[port1  switch: a bridge]
    ...

Every worker lives in a network namespace of its own, the bridge in another. (Workers that share a
machine in a hierarchical exchange share a namespace and its link.) The namespaces have no names, so
each exists as long as a process is in it: when the processes end, however they end, the kernel
removes namespaces, links, addresses and queues. Nothing is ever configured in the namespace of the
machine itself. A link with a latency is another kind: the kernel's `netem` is rarely there, so a
process of ours carries the frames (relay.py).

Rates: a token bucket (`tbf`) on both ends of every link limits what a worker sends *and* what it
receives. The bucket holds one millisecond of the rate, at least three full Ethernet frames: enough
for the whole rate on a busy machine (measured at 1 Gbit/s with both cores busy: 954 Mbit/s of TCP
payload; with half the bucket 901), and too little to let a compressed gradient pass at once. The
queue holds 10 ms of the rate, at least 256 KiB, so that several workers that send to the same
worker lose no packets.

Fairness: a connection may have 0.25 ms of the rate, at least two frames, in its worker's queue and
in one segment. So the connections of a worker take turns packet by packet, as on a network card
with a fair queue (a queueing discipline that not every kernel has). Otherwise a message of 64 KiB
goes out as a whole, messages to the same receiver collide while other links are idle, and all ranks
wait for the last message. Measured: 4 ranks that all send 61,500 bytes to all, twice, at 10 Mbit/s,
need 0.375 s without shares and 0.320 s with them; the bound is 0.309 s. Without shares, compression
would look better than it is.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from statistics import fmean

from gradwire_lab.train import relay
from gradwire_lab.train.errors import TrainError

INTERFACE = relay.INTERFACE  # a worker's end of its link, in its namespace
TOOLS = ("ip", "tc", "unshare", "nsenter")
_ETHERNET_FRAME = 1514
_QUEUED_BYTES = "/proc/sys/net/ipv4/tcp_limit_output_bytes"  # of one connection, below TCP
_SUBNET_BITS = 16

Attach = Callable[[int, subprocess.Popen[bytes]], None]


@dataclass(frozen=True)
class Bytes:
    """The bytes that an interface has counted, of Ethernet frames without their checksum."""

    sent: int
    received: int

    @staticmethod
    def mean(counts: Sequence[Bytes]) -> Bytes:
        return Bytes(*(round(fmean(way)) for way in zip(*map(astuple, counts), strict=True)))


def address(rank: int) -> str:
    """The IPv4 address of a worker inside the namespaces."""
    return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"


def bucket_bytes(bits_per_second: int) -> int:
    return max(bits_per_second // 8 // 1000, 3 * _ETHERNET_FRAME)


def queue_bytes(bits_per_second: int) -> int:
    """Bytes that may wait for tokens before packets are dropped."""
    return max(bits_per_second // 8 // 100, 256 * 1024)


def share_bytes(bits_per_second: int) -> int:
    """Bytes that a connection may have in the queue, and in one segment, at a time."""
    return min(max(bits_per_second // 8 // 4000, 2 * _ETHERNET_FRAME), 65536)


def why_not_shaped(has_latency: bool = False) -> str | None:
    """None if this process may build a shaped network, else the reason and the remedy. To find out,
    it makes a veth pair with a queue, or a TAP device for a latency, in a namespace that ends with
    the trial."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return (
            f"{', '.join(missing)} not found; on Debian and Ubuntu: "
            "apt-get install iproute2 util-linux"
        )
    trial = (
        "ip link add port0 type veth peer name port1 && ip link add br0 type bridge && "
        "tc qdisc add dev port0 root tbf rate 1mbit burst 5000 limit 10000 && "
        f"ip link set dev port0 gso_max_size 5000 && echo 5000 > {_QUEUED_BYTES}"
    )
    if has_latency:
        trial = "ip tuntap add dev port0 mode tap"
    result = subprocess.run(
        ["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    if result.returncode == 0:
        return None
    said = (result.stderr.strip().splitlines() or ["no message"])[0]
    return (
        f"no right to make network namespaces ({said}); run as root, or put "
        "`unshare --user --map-root-user` before the command"
    )


def in_own_namespace(command: Sequence[str]) -> list[str]:
    """The command that runs `command`, with the same process id, in a new network namespace."""
    return ["unshare", "--net", "--", *command]


def in_namespace(namespace: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command`, with the same process id, in the namespace of a descriptor
    that it inherits."""
    return ["nsenter", f"--net=/proc/self/fd/{namespace}", "--", *command]


def read_interface_bytes(interface: str) -> Bytes:
    """Counters of an interface in the namespace of the calling process."""
    with open("/proc/self/net/dev", encoding="ascii") as table:
        for line in table:
            name, colon, counters = line.partition(":")
            if colon and name.strip() == interface:
                fields = counters.split()
                return Bytes(sent=int(fields[8]), received=int(fields[0]))
    raise TrainError(f"there is no interface {interface} here")


@contextmanager
def shaped_network(bits_per_second: int, latency: float = 0.0) -> Iterator[Attach]:
    """Makes a switch, whose links vanish with it. latency: seconds that a frame travels.

    Gives a function (rank, process) that gives a worker, started with in_own_namespace, its link:
    INTERFACE with address(rank).
    """
    if latency > 0.0:
        with relayed_network(bits_per_second, latency) as attach:
            yield attach
    else:
        with bridged_network(bits_per_second) as bridge:
            yield bridge.attach


@dataclass(frozen=True)
class Bridge:
    """A switch of the kernel, in the namespace of this descriptor, and its links."""

    namespace: int
    rate: int

    def attach(self, rank: int, worker: subprocess.Popen[bytes]) -> None:
        """Gives a worker, started with in_own_namespace, its link: INTERFACE with address(rank)."""
        port, shape = f"port{rank}", f"root {_shape(self.rate)}"
        with namespace_of(worker) as namespace:
            pair = f"type veth peer name {INTERFACE} netns /proc/self/fd/{namespace}"
            up = f"link set dev {port} addrgenmode none master br0 up"
            _run_in(self.namespace, "ip", [f"link add {port} {pair}", up], namespace)
            _run_in(self.namespace, "tc", [f"qdisc add dev {port} {shape}"])
            share = share_bytes(self.rate)
            _set_up(namespace, rank, f"gso_max_size {share}")
            _run_in(namespace, "tc", [f"qdisc add dev {INTERFACE} {shape}"])
            _enter(namespace, ["tee", _QUEUED_BYTES], str(share))

    def cut(self, rank: int) -> None:
        """Frames of the worker and for it are lost, until `restore`."""
        _run_in(self.namespace, "ip", [f"link set dev port{rank} down"])

    def restore(self, rank: int) -> None:
        _run_in(self.namespace, "ip", [f"link set dev port{rank} up"])

    def change_rate(self, rank: int, worker: subprocess.Popen[bytes], bits_per_second: int) -> None:
        """From now on, both ways."""
        shape = f"root {_shape(bits_per_second)}"
        _run_in(self.namespace, "tc", [f"qdisc change dev port{rank} {shape}"])
        with namespace_of(worker) as namespace:
            _run_in(namespace, "tc", [f"qdisc change dev {INTERFACE} {shape}"])


def _shape(rate: int) -> str:
    return f"tbf rate {rate}bit burst {bucket_bytes(rate)} limit {queue_bytes(rate)}"


def _set_up(namespace: int, rank: int, option: str) -> None:
    lines = [
        "link set dev lo up",
        f"address add {address(rank)}/{_SUBNET_BITS} dev {INTERFACE}",
        f"link set dev {INTERFACE} {option} addrgenmode none up",
    ]
    _run_in(namespace, "ip", lines)


@contextmanager
def bridged_network(bits_per_second: int) -> Iterator[Bridge]:
    """Makes a switch of the kernel, whose links vanish with it."""
    # The holder ends whenever this process ends, because no other process has the other end of its
    # input.
    with held_namespace() as switch, namespace_of(switch) as namespace:
        lines = ["link add br0 type bridge", "link set dev br0 addrgenmode none up"]
        _run_in(namespace, "ip", lines)
        yield Bridge(namespace, bits_per_second)


@contextmanager
def held_namespace() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a new network namespace, which does nothing and ends with this process."""
    command, pipe = in_own_namespace(["cat"]), subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=subprocess.DEVNULL, process_group=0
    ) as holder:
        yield holder


@contextmanager
def relayed_network(rate: int, latency: float, program: str = relay.__file__) -> Iterator[Attach]:
    """A switch in user space (relay.py), which ends with this process, and with it the links.

    program: a script that takes the arguments of relay.py.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, program, "switch", str(theirs.fileno())]
        with subprocess.Popen(
            [*command, str(rate), str(latency)], pass_fds=(theirs.fileno(),), process_group=0
        ) as switch:
            theirs.close()
            try:
                yield partial(_attach_to_relay, ours)
            finally:
                ours.close()
                switch.wait()


def _attach_to_relay(switch: socket.socket, rank: int, worker: subprocess.Popen[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with namespace_of(worker) as namespace, ours, theirs:
        make = [sys.executable, relay.__file__, "tap", str(theirs.fileno())]
        _enter(namespace, make, "", theirs.fileno())
        _, taps, _, _ = socket.recv_fds(ours, 1, 1)
        socket.send_fds(switch, [b"t"], taps)
        for tap in taps:
            os.close(tap)
        if switch.recv(1) != b"k":
            raise TrainError("the relay between the workers ended")
        _set_up(namespace, rank, f"mtu {relay.MTU}")


@contextmanager
def namespace_of(process: subprocess.Popen[bytes], timeout: float = 10.0) -> Iterator[int]:
    """A descriptor of the process's network namespace, once the process has left this one.

    That is checked, so that no configuration reaches the machine's own namespace. The descriptor
    stays right if the process ends and its id is given to another.
    """
    ours = os.stat("/proc/self/ns/net").st_ino
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            file = open(f"/proc/{process.pid}/ns/net", "rb")  # noqa: SIM115 - not around the yield
        except OSError:
            continue
        with file:
            if os.fstat(file.fileno()).st_ino != ours:
                yield file.fileno()
                return
        time.sleep(0.005)
    raise TrainError(f"process {process.pid} did not get a network namespace of its own")


def _run_in(namespace: int, tool: str, lines: list[str], *descriptors: int) -> None:
    _enter(namespace, [tool, "-batch", "-"], "\n".join(lines) + "\n", *descriptors)


def _enter(namespace: int, command: list[str], text: str, *descriptors: int) -> None:
    """Runs a command in a namespace, with `text` as its input."""
    result = subprocess.run(
        in_namespace(namespace, command),
        input=text,
        capture_output=True,
        text=True,
        pass_fds=(namespace, *descriptors),
        check=False,
    )
    if result.returncode != 0:
        raise TrainError(f"{' '.join(command)}: {result.stderr.strip()} (for: {text.strip()})")
