"""The ranks of one training, as the driver sees and disturbs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradwire_lab.train import network

_HERE = Path(__file__).parent
_LOOK_SECONDS = 0.02


class Launcher(Protocol):
    """Starts ranks."""

    def ask(self, job: dict[str, Any]) -> None:
        """Starts a rank, which does the job (training_ways.Job, and "output", a file)."""

    def said(self) -> list[dict[str, Any]]:
        """Which processes were started and have ended since the last call, as forking.py says."""

    def close(self) -> None: ...


class Forks:
    """The process that forks the ranks (forking.py). With `clock`, a file, their clock is shifted
    by the offset in it."""

    def __init__(self, clock: Path | None = None) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_HERE}:{_HERE.parent / 'torch'}",
            "PYTHONUNBUFFERED": "1",
        }
        if clock is not None:
            environment |= {"LD_PRELOAD": str(clock_library()), "FAULTS_CLOCK": str(clock)}
        self._process = subprocess.Popen(
            [sys.executable, _HERE / "forking.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._pending = b""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def said(self) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        self._pending += self._process.stdout.read() or b""
        if self._process.poll() is not None:
            raise RuntimeError(f"forking.py ended with status {self._process.returncode}")
        *lines, self._pending = self._pending.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def clock_library() -> Path:
    """clock_offset.c, compiled."""
    source = _HERE / "clock_offset.c"
    library = Path(tempfile.gettempdir()) / f"gradwire-clock-offset-{os.getuid()}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        made = library.with_suffix(f".{os.getpid()}")
        command = [
            "cc",
            "-O2",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(made),
        ]
        subprocess.run(command, check=True)
        made.rename(library)
    return library


@dataclass
class Rank:
    """A process.

    ended        time.monotonic() of its end
    step         that it had taken when it was last looked at
    stepped      time.monotonic() of that step, or of the last call of watch_steps
    longest_gap  seconds between two steps since then
    """

    pid: int = 0
    status: int | None = None
    ended: float = 0.0
    step: int = 0
    stepped: float = 0.0
    longest_gap: float = 0.0


@dataclass
class Cluster:
    """holders: of each rank's network namespace; empty on the loopback interface."""

    launcher: Launcher
    folder: Path
    ranks: list[Rank] = field(default_factory=list)
    holders: list[subprocess.Popen[bytes]] = field(default_factory=list)
    clock: Path | None = None
    _bridge: network.Bridge | None = None
    _flips: Path | None = None
    _store: Rank | None = None

    @property
    def bridge(self) -> network.Bridge:
        assert self._bridge is not None
        return self._bridge

    def start(self, jobs: list[dict[str, Any]]) -> None:
        """Each job goes to the rank of its place."""
        self.ranks = [Rank() for _ in jobs]
        for rank, job in enumerate(jobs):
            self._start(job | {"rank": rank}, f"output-{rank}")
        while not all(rank.pid for rank in self.ranks):
            self.look()

    def replace(self, rank: int, job: dict[str, Any]) -> None:
        """Kills the rank's process; another one takes its place."""
        self.kill(rank)
        self.wait([rank], 60.0)
        self.ranks[rank] = Rank()
        self._start(job | {"rank": rank}, f"output-{rank}")
        while not self.ranks[rank].pid:
            self.look()

    def start_store(self, job: dict[str, Any]) -> None:
        """It is there when this returns."""
        self._store = Rank()
        self._start(job | {"rank": -1, "way": "store"}, "output-store")
        while not (self.folder / "store-is-there").exists():
            self.look()
            assert self._store.status is None, "the store's process ended"

    def _start(self, job: dict[str, Any], output: str) -> None:
        if self.holders:
            job = job | {"namespace": self.holders[max(0, job["rank"])].pid}
        place = {"folder": str(self.folder), "output": str(self.folder / output)}
        self.launcher.ask(job | place)

    def look(self) -> None:
        """Takes note of processes that were started or have ended, after a little while."""
        time.sleep(_LOOK_SECONDS)
        for event in self.launcher.said():
            if "started" in event:
                self._rank(event["started"]).pid = event["pid"]
                continue
            for rank in [*self.ranks, *([self._store] if self._store else [])]:
                if rank.pid == event["ended"]:
                    rank.status, rank.ended = event["status"], event["at"]
        self._note_steps()

    def watch_steps(self) -> None:
        """From now on, each rank's longest time without a step is noted."""
        for rank in self.ranks:
            rank.stepped, rank.longest_gap = time.monotonic(), 0.0

    def _note_steps(self) -> None:
        now = time.monotonic()
        for number, rank in enumerate(self.ranks):
            if rank.status is None and (step := self.step(number)) != rank.step:
                rank.longest_gap = max(rank.longest_gap, now - rank.stepped)
                rank.step, rank.stepped = step, now

    def _rank(self, number: int) -> Rank:
        if number >= 0:
            return self.ranks[number]
        assert self._store is not None
        return self._store

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()

    def step(self, rank: int) -> int:
        """Steps that the rank has taken."""
        path = self.folder / f"progress-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, rank: int, step: int, seconds: float) -> bool:
        """False if the rank does not get there."""
        end = time.monotonic() + seconds
        while self.step(rank) < step:
            self.look()
            if time.monotonic() > end or self.ranks[rank].status is not None:
                return False
        return True

    def wait(self, ranks: list[int], seconds: float) -> bool:
        """Waits until these ranks have ended; False if that takes longer."""
        end = time.monotonic() + seconds
        while any(self.ranks[rank].status is None for rank in ranks):
            self.look()
            if time.monotonic() > end:
                return False
        return True

    def kill(self, rank: int) -> None:
        self._signal(self.ranks[rank], signal.SIGKILL)

    def stop(self, rank: int) -> None:
        self._signal(self.ranks[rank], signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        self._signal(self.ranks[rank], signal.SIGCONT)

    def show_stacks(self) -> None:
        """Ranks that have not ended print where their threads are."""
        for rank in self.ranks:
            self._signal(rank, signal.SIGUSR1)
        self.sleep(1.0)

    def flip_bit_from(self, rank: int) -> None:
        assert self._flips is not None
        (self._flips / "source.new").write_text(network.address(rank))
        (self._flips / "source.new").rename(self._flips / "source")

    def set_clock(self, offset: int) -> None:
        """offset: seconds."""
        assert self.clock is not None
        write_offset(self.clock, offset)

    def end(self) -> None:
        """Kills the processes that are left."""
        left = [rank for rank in (*self.ranks, self._store) if rank and rank.pid]
        for rank in left:
            self._signal(rank, signal.SIGKILL)
        while any(rank.status is None for rank in left):
            self.look()

    @staticmethod
    def _signal(rank: Rank, number: signal.Signals) -> None:
        if rank.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def write_offset(clock: Path, offset: int) -> None:
    with open(clock, "r+b" if clock.exists() else "w+b") as file:
        file.write(struct.pack("<q", offset))


@contextlib.contextmanager
def bridged(cluster: Cluster, ranks: int, rate: int) -> Iterator[None]:
    """Gives each rank a network namespace and a link, of which the driver has the other end."""
    with contextlib.ExitStack() as cleanup:
        bridge = cleanup.enter_context(network.bridged_network(rate))
        for rank in range(ranks):
            cluster.holders.append(cleanup.enter_context(network.held_namespace()))
            bridge.attach(rank, cluster.holders[rank])
        cluster._bridge = bridge
        yield


@contextlib.contextmanager
def relayed(cluster: Cluster, ranks: int, rate: int) -> Iterator[None]:
    """The same, with a switch that can flip a bit."""
    with contextlib.ExitStack() as cleanup:
        cluster._flips = cluster.folder / "flips"
        cluster._flips.mkdir()
        os.environ["FAULTS_FLIP"] = str(cluster._flips)
        program = str(_HERE / "flipping_switch.py")
        attach = cleanup.enter_context(network.relayed_network(rate, 1e-4, program))
        for rank in range(ranks):
            cluster.holders.append(cleanup.enter_context(network.held_namespace()))
            attach(rank, cluster.holders[rank])
        yield
