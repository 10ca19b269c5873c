"""The shaped network has the right speed, and is gone when its processes are gone.

All traffic stays within the namespaces that a test makes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire_lab.train import network
from gradwire_lab.train.errors import TrainError

why_not = network.why_not_shaped() if sys.platform == "linux" else "Linux only"
needs_namespaces = pytest.mark.skipif(why_not is not None, reason=f"LINKS NOT TESTED: {why_not}")

# The share of the rate that full frames leave for TCP's payload.
PAYLOAD = (1500 - 20 - 32) / 1514

RECEIVER = """
import socket, sys, threading, time
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[1]))]
start, total = time.perf_counter(), 0
def receive(connection):
    global total
    while data := connection.recv(1 << 16):
        total += len(data)
threads = [threading.Thread(target=receive, args=(c,)) for c in connections]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(total * 8 / (time.perf_counter() - start), flush=True)
"""
SENDER = """
import socket, sys
sys.stdin.readline()
connection = socket.create_connection((sys.argv[1], 5000))
connection.sendall(bytes(int(sys.argv[2])))
"""

# Prints the rate of every message between its first and its last byte.
MESSAGE_RECEIVER = """
import socket, sys, time
size = int(sys.argv[1])
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection = server.accept()[0]
while data := connection.recv(1 << 16):
    start, received, first = time.perf_counter(), len(data), len(data)
    while received < size:
        received += len(connection.recv(1 << 16))
    print((size - first) * 8 / (time.perf_counter() - start), flush=True)
"""
MESSAGE_SENDER = """
import socket, sys, threading, time
sys.stdin.readline()
size, rounds, addresses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
connections = [socket.create_connection((address, 5000)) for address in addresses]
for _ in range(rounds):
    threads = [threading.Thread(target=c.sendall, args=(bytes(size),)) for c in connections]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    time.sleep(0.25)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        network.in_own_namespace(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def namespaces() -> set[int]:
    """The network namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add((process / "ns/net").stat().st_ino)
        except OSError:
            continue
    return found


def namespaces_of_children(process: int) -> set[int]:
    """The network namespaces of a process's children, except this test's own."""
    ids = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {Path(f"/proc/{i}/ns/net").stat().st_ino for i in ids} - {
        Path("/proc/self/ns/net").stat().st_ino
    }


def interfaces() -> list[str]:
    """The interfaces of this process's namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sorted(line.partition(":")[0].strip() for line in lines if ":" in line)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_addresses_differ_and_are_private() -> None:
    addresses = [network.address(rank) for rank in range(600)]
    assert addresses[0] == "10.77.0.1"
    assert addresses[254:257] == ["10.77.0.255", "10.77.1.0", "10.77.1.1"]
    assert len(set(addresses)) == 600


@pytest.mark.parametrize("rate", [64_000, 10_000_000, 100_000_000, 10_000_000_000])
def test_the_bucket_holds_frames_and_the_queue_holds_segments(rate: int) -> None:
    assert network.bucket_bytes(rate) >= 3 * 1514
    assert network.queue_bytes(rate) >= 256 * 1024
    assert network.bucket_bytes(rate) * 8 <= max(rate / 1000, 3 * 1514 * 8)
    assert 2 * 1514 <= network.share_bytes(rate) <= 65536


def test_counters_of_an_interface_that_is_not_there() -> None:
    with pytest.raises(TrainError, match="no interface nosuch"):
        network.read_interface_bytes("nosuch")
    assert network.read_interface_bytes("lo").sent >= 0


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    reason = network.why_not_shaped()
    assert reason is not None
    assert "ip, tc, unshare, nsenter not found" in reason
    assert "iproute2" in reason


def test_without_the_right_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in network.TOOLS:
        path = tmp_path / tool
        path.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = network.why_not_shaped()
    assert reason is not None
    assert "Operation not permitted" in reason
    assert "run as root" in reason


def measure_rate(rate: int, senders: int, latency: float = 0.0) -> float:
    """Bits per second of payload that reach one process from others, over about a second."""
    receiver = start(RECEIVER, senders)
    sending = [start(SENDER, network.address(0), rate // 8 // senders) for _ in range(senders)]
    assert receiver.stdout is not None
    try:
        with network.shaped_network(rate, latency) as attach:
            for rank, process in enumerate([receiver, *sending]):
                attach(rank, process)
            assert receiver.stdout.readline() == b"listening\n"
            for process in sending:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.flush()
            return float(receiver.stdout.readline())
    finally:
        for process in [receiver, *sending]:
            process.kill()
            process.communicate()


@needs_namespaces
@pytest.mark.parametrize(("rate", "senders"), [(100_000_000, 1), (100_000_000, 2), (10_000_000, 1)])
def test_links_have_the_rate(rate: int, senders: int) -> None:
    """One sender is limited by its own queue and the receiver's, two only by the receiver's.

    The rate is never higher. It is lower only if the machine is busy, hence several tries.
    """
    fastest = 0.0
    for _ in range(4):
        fastest = max(fastest, measure_rate(rate, senders))
        if fastest >= 0.85 * PAYLOAD * rate:
            break
    assert 0.85 * PAYLOAD * rate <= fastest <= 1.03 * PAYLOAD * rate


# Answers every byte. PINGER prints the seconds of each of five round trips.
ECHO = """
import socket
connection = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection = connection.accept()[0]
while data := connection.recv(1): connection.sendall(data)
"""
PINGER = """
import socket, sys, time
sys.stdin.readline()
connection = socket.create_connection((sys.argv[1], 5000))
for _ in range(5):
    start = time.perf_counter()
    connection.sendall(b"x"); connection.recv(1)
    print(time.perf_counter() - start, flush=True)
"""
why_no_latency = network.why_not_shaped(True) if sys.platform == "linux" else "Linux only"
needs_taps = pytest.mark.skipif(
    why_no_latency is not None, reason=f"LATENCY NOT TESTED: {why_no_latency}"
)


@needs_taps
def test_links_have_the_latency() -> None:
    """The least of several round trips: a busy machine makes them longer, never shorter."""
    echo, pinger = start(ECHO), start(PINGER, network.address(0))
    assert echo.stdout is not None
    assert pinger.stdout is not None
    assert pinger.stdin is not None
    try:
        with network.shaped_network(10_000_000, 0.05) as attach:
            attach(0, echo)
            attach(1, pinger)
            assert echo.stdout.readline() == b"listening\n"
            pinger.stdin.write(b"go\n")
            pinger.stdin.flush()
            trips = [float(pinger.stdout.readline()) for _ in range(5)]
    finally:
        for process in (echo, pinger):
            process.kill()
            process.communicate()
    assert 0.1 <= min(trips) < 0.2


@needs_taps
@pytest.mark.parametrize("senders", [1, 2])
def test_long_links_have_the_rate(senders: int) -> None:
    """Frames of 9000 bytes leave 99 % for TCP's payload. TCP needs some round trips to find the
    rate, and so does each try; more than the rate never arrives."""
    rate, fastest = 50_000_000, 0.0
    for _ in range(4):
        fastest = max(fastest, measure_rate(rate, senders, 0.005))
        if fastest >= 0.7 * rate:
            break
    assert 0.7 * rate <= fastest <= 1.03 * rate


@needs_taps
def test_the_relay_ends_with_its_maker() -> None:
    program = """
import sys, time
from gradwire_lab.train import network
with network.shaped_network(10**7, 0.01):
    print("made", flush=True)
    time.sleep(60)
"""
    maker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"made\n"
    relays = Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_text().split()
    assert relays
    maker.kill()
    maker.communicate()
    assert wait_until(lambda: not any(Path(f"/proc/{relay}").exists() for relay in relays))


DELIVER_TO_AN_INTERFACE_THAT_IS_DOWN = """
import os, socket
from gradwire_lab.train import relay
ours, theirs = socket.socketpair()
relay.make_tap(theirs)
_, (tap,), _, _ = socket.recv_fds(ours, 1, 1)
switch = relay.Switch(1e9, 0.0)
switch._links[tap] = relay.Link(1e9), relay.Link(1e9)
switch._arrive(0.0, tap, bytes(100))
assert not switch._later.empty()
switch._later.run()
"""


@needs_taps
def test_a_frame_for_an_interface_that_is_down_is_lost() -> None:
    """As while links are made: the switch ended with an OSError, and with it all links."""
    command = [sys.executable, "-c", DELIVER_TO_AN_INTERFACE_THAT_IS_DOWN]
    subprocess.run(network.in_own_namespace(command), check=True)


@needs_namespaces
def test_messages_to_several_share_a_link_at_any_moment() -> None:
    """61,500 bytes (LeNet's gradient in 4 shards) go to each of two peers at half the rate."""
    rate, rounds = 10_000_000, 6
    receivers = [start(MESSAGE_RECEIVER, 61_500) for _ in range(2)]
    addresses = [network.address(rank) for rank in range(2)]
    sender = start(MESSAGE_SENDER, 61_500, rounds, *addresses)
    processes = [*receivers, sender]
    with network.shaped_network(rate) as attach:
        for rank, process in enumerate(processes):
            attach(rank, process)
        for process in receivers:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
        sender.communicate(b"go\n")
        rates = [[float(x) for x in p.communicate()[0].split()] for p in receivers]
    assert [len(measured) for measured in rates] == [rounds, rounds]
    for measured in rates:
        assert sorted(measured)[rounds // 2] == pytest.approx(rate * PAYLOAD / 2, rel=0.2)


@needs_namespaces
def test_the_machine_is_left_as_it_was() -> None:
    before = interfaces()
    worker = subprocess.Popen(network.in_own_namespace(["cat"]), stdin=subprocess.PIPE)
    with network.shaped_network(10_000_000) as attach:
        attach(0, worker)
        made = namespaces_of_children(os.getpid())
        assert len(made) == 2
        assert interfaces() == before
    worker.communicate()
    assert wait_until(lambda: not made & namespaces())
    assert interfaces() == before


@needs_namespaces
def test_a_process_in_the_machines_namespace_is_refused() -> None:
    before = interfaces()
    outside = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        with (
            pytest.raises(TrainError, match="namespace of its own"),
            network.namespace_of(outside, timeout=0.2),
        ):
            pass
    finally:
        outside.communicate()
    assert interfaces() == before


@needs_namespaces
def test_the_switch_ends_when_its_owner_is_killed() -> None:
    program = (
        "import sys, time; from gradwire_lab.train import network\n"
        "with network.shaped_network(10**7):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    made = namespaces_of_children(owner.pid)
    assert len(made) == 1
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert wait_until(lambda: not made & namespaces())
