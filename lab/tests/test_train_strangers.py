"""Other users of the machine on which `gradwire train` runs: they can't join, stop or read it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_data import write_fashion_mnist

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONNECTIONS = 200  # to each port: fewer than the descriptors that a process may have


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses (as the kernel prints them) and ports on which a process listens."""
    files = (Path(f"/proc/{pid}/fd") / name for name in os.listdir(f"/proc/{pid}/fd"))
    own = {os.readlink(file) for file in files if file.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            place, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in own:
                address, _, port = place.partition(":")
                found.append((address, int(port, 16)))
    return found


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [p for p in map(int, children) if b"worker" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    folder = write_fashion_mnist(tmp_path / "fashion-mnist", 64, 20)
    command = [
        str(Path(sys.executable).with_name("gradwire")),
        "train",
        "--workers",
        "2",
        "--batch",
        "4",
    ]
    command += ["--bandwidth", "none", "--codec", "raw", "--steps", "200", "--eval-every", "200"]
    with subprocess.Popen(
        [*command, "--data-dir", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_strangers_do_not_disturb_a_training(
    training: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The store of the ranks has no port; the other ports are on the loopback interface alone, and
    a stranger's connections to them, garbage and silence change nothing."""
    end = time.monotonic() + 120
    ports: set[tuple[str, int]] = set()
    while len(ports) < 4:  # the world's and the hook's, of two ranks
        assert time.monotonic() < end
        assert training.poll() is None, training.communicate()
        workers = workers_of(training.pid)
        ports |= {place for worker in workers for place in listening(worker)}
        time.sleep(0.02)
    assert {address for address, _ in ports} == {"0100007F"}
    (store,) = tmp_path.glob("gradwire-*")
    assert store.stat().st_mode & 0o777 == 0o700
    for worker in workers:
        assert b"GRADWIRE_JOB_KEY=" in Path(f"/proc/{worker}/environ").read_bytes()
        assert b"KEY" not in Path(f"/proc/{worker}/cmdline").read_bytes()
    strangers = []
    for number in range(CONNECTIONS):
        for _, port in ports:
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.send((b"", b"\1\0\0", b"\0" * 8, b"\xff" * 100)[number % 4])
            strangers.append(stranger)
    output, said = training.communicate(timeout=240)
    assert training.returncode == 0, said
    assert "bit-identical" in output + said
    for stranger in strangers:
        stranger.close()
