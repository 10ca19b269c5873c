#!/usr/bin/env python3
"""Trains on four ranks for hours while faults happen at random, and watches what the ranks hold.

    PYTHONPATH=tests/torch:tests/faults tests/faults/soak.py --results build/soak --minutes 120

Rank 0 is spared. Another rank (of `servers` also the server, rank 3) is stopped, or its link is cut
or slowed down; where ranks come and go it is also killed, and a new process takes its place. A
sample is taken twice a minute: memory, file descriptors and threads of each rank, and what the
machine has of processes, network namespaces and interfaces. The exit status is 1 if a rank ends
before it is told to, if the models differ in the end, or if the machine, or a rank that lives from
the first step to the last, holds more in the last quarter than in the second one. FOLDER/WAY.json
has the samples and the faults. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from cells import RANKS, needs_store
from cluster import free_port
from faults import RATE
from gradwire_lab.train import network
from processes import processes_of, status_of
from running import Cluster, Forks, bridged

WAYS = ("local-steps-go-on", "hook-sharded", "servers")
TIMEOUT = 60.0  # seconds
LOST_AFTER = 12.0  # seconds
MAX_PAUSE = 6.0  # of a rank or link: a disturbance that must change nothing
BETWEEN_FAULTS = (3.0, 12.0)
SAMPLE_SECONDS = 30.0
STEP_PAUSE = 0.02
MEMORY_GROWTH = 1.01  # allowed of a rank's memory, which the allocator does not give back at once


@dataclass
class Sample:
    """What the ranks and the machine hold, `at` so many seconds from the start."""

    at: float
    steps: int
    memory: list[int]  # bytes resident, of each rank
    files: list[int]  # of them those of programs and libraries
    descriptors: list[int]
    threads: list[int]
    processes: int
    namespaces: int
    interfaces: int


@dataclass
class Record:
    way: str
    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    digests: list[str | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def ranks_come_and_go(way: str) -> bool:
    return way.endswith("-go-on")


def take_sample(cluster: Cluster, began: float) -> Sample:
    pids = [rank.pid for rank in cluster.ranks]
    processes = processes_of(os.getpid())
    return Sample(
        at=round(time.monotonic() - began, 1),
        steps=cluster.step(0),
        memory=[status_of(pid, "VmRSS") * 1024 for pid in pids],
        files=[status_of(pid, "RssFile") * 1024 for pid in pids],
        descriptors=[len(os.listdir(f"/proc/{pid}/fd")) for pid in pids],
        threads=[status_of(pid, "Threads") for pid in pids],
        processes=len(processes),
        namespaces=len(set(processes.values())),
        interfaces=len(os.listdir("/sys/class/net")),
    )


class Soak:
    """One training, with its faults."""

    def __init__(self, cluster: Cluster, record: Record, jobs: list[dict[str, Any]]) -> None:
        self._cluster, self._record, self._jobs = cluster, record, jobs
        self._chance = random.Random(record.seed)
        self._faults: dict[str, Callable[[int], None]] = {
            "stopped": self._stop,
            "link cut": self._cut,
            "link at 1 %": self._slow_down,
        }
        if ranks_come_and_go(record.way):
            self._faults["killed and replaced"] = self._replace

    def run(self, seconds: float) -> None:
        """Lets faults happen until the training has lasted so long, and ends it."""
        cluster, record = self._cluster, self._record
        cluster.start(self._jobs)
        if not cluster.wait_for_step(0, 10, 120.0):
            raise RuntimeError(f"the training did not begin: see {cluster.folder}")
        began = time.monotonic()
        sampled = -SAMPLE_SECONDS
        while (passed := time.monotonic() - began) < seconds and self._all_live():
            if passed - sampled >= SAMPLE_SECONDS:
                record.samples.append(take_sample(cluster, began))
                sampled = passed
            cluster.sleep(self._chance.uniform(*BETWEEN_FAULTS))
            name = self._chance.choice(list(self._faults))
            victim = self._chance.randrange(1, RANKS)
            self._faults[name](victim)
            record.faults[name] = record.faults.get(name, 0) + 1
        record.seconds = round(time.monotonic() - began, 1)
        self._end()

    def _all_live(self) -> bool:
        return all(rank.status is None for rank in self._cluster.ranks)

    def _end(self) -> None:
        """At a step that no rank has reached yet."""
        cluster = self._cluster
        last = max(map(cluster.step, range(RANKS))) + 500
        (cluster.folder / "last-step.new").write_text(str(last))
        (cluster.folder / "last-step.new").rename(cluster.folder / "last-step")
        cluster.wait(list(range(RANKS)), 300.0)
        self._record.statuses = [rank.status for rank in cluster.ranks]
        for rank in range(RANKS):
            path = cluster.folder / f"result-{rank}.json"
            found = json.loads(path.read_text())["digest"] if path.exists() else None
            self._record.digests.append(found)

    def _stop(self, victim: int) -> None:
        self._cluster.stop(victim)
        self._cluster.sleep(self._chance.uniform(0.1, MAX_PAUSE))
        self._cluster.go_on(victim)

    def _cut(self, victim: int) -> None:
        self._cluster.bridge.cut(victim)
        self._cluster.sleep(self._chance.uniform(0.1, MAX_PAUSE / 2))
        self._cluster.bridge.restore(victim)

    def _slow_down(self, victim: int) -> None:
        holder = self._cluster.holders[victim]
        self._cluster.bridge.change_rate(victim, holder, RATE // 100)
        self._cluster.sleep(self._chance.uniform(0.1, MAX_PAUSE))
        self._cluster.bridge.change_rate(victim, holder, RATE)

    def _replace(self, victim: int) -> None:
        before = self._cluster.step(0)
        self._cluster.replace(victim, self._jobs[victim])
        # The others wait until they take it for lost. A second death before that is another test.
        self._cluster.wait_for_step(0, before + 200, 2 * TIMEOUT)


def find_problems(record: Record) -> list[str]:
    """What is not as it must be."""
    problems = []
    if record.statuses != [0] * RANKS:
        problems.append(f"exit statuses {record.statuses}")
    if len(set(record.digests)) != 1:
        problems.append(f"the ranks' models differ: {record.digests}")
    count = len(record.samples)
    early = record.samples[count // 4 : count // 2]
    late = record.samples[count - count // 4 :]
    if not early or not late:
        return [*problems, f"{count} samples are too few to see what grows"]
    watched: dict[str, tuple[Callable[[Sample], int], float]] = {
        name: (attrgetter(name), 1.0) for name in ("processes", "namespaces", "interfaces")
    }
    for rank in range(1 if ranks_come_and_go(record.way) else RANKS):
        for name, allowed in (("memory", MEMORY_GROWTH), ("descriptors", 1.0), ("threads", 1.0)):
            watched[f"{name} of rank {rank}"] = (partial(_of_rank, rank, name), allowed)
    for name, (value, allowed) in watched.items():
        before, after = (statistics.median(map(value, part)) for part in (early, late))
        if after > allowed * before:
            problems.append(
                f"{name}: {before:,.0f} in the second quarter, {after:,.0f} in the last"
            )
    return problems


def _of_rank(rank: int, name: str, sample: Sample) -> int:
    held: list[int] = getattr(sample, name)
    return held[rank]


def describe(record: Record) -> str:
    """One line for each thing that is watched, from the first sample to the last."""
    first, last = record.samples[len(record.samples) // 4], record.samples[-1]
    faults = ", ".join(f"{name} {count}" for name, count in sorted(record.faults.items()))
    lines = [f"{record.way}: {record.seconds / 60:.0f} minutes, {last.steps} steps; {faults}"]
    for name in (
        "memory",
        "files",
        "descriptors",
        "threads",
        "processes",
        "namespaces",
        "interfaces",
    ):
        lines.append(f"  {name:12} {getattr(first, name)} -> {getattr(last, name)}")
    return "\n".join([*lines, f"  {'; '.join(record.problems) or 'as it must be'}"])


def soak(way: str, seed: int, seconds: float, folder: Path) -> Record:
    """folder: gets what the ranks print."""
    folder.mkdir(parents=True)
    record = Record(way, seed)
    job = {
        "way": way, "port": free_port(), "world_size": RANKS, "steps": 10**9, "timeout": TIMEOUT,
        "lost_after": LOST_AFTER, "save_every": 10**9, "pause": STEP_PAUSE,
    }  # fmt: skip
    with contextlib.closing(Forks()) as forks, contextlib.ExitStack() as cleanup:
        cluster = Cluster(forks, folder)
        cleanup.enter_context(bridged(cluster, RANKS, RATE))
        cleanup.callback(cluster.end)
        if needs_store(way):
            cluster.start_store(job)
        Soak(cluster, record, [dict(job) for _ in range(RANKS)]).run(seconds)
    record.problems = find_problems(record)
    return record


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--way", default=WAYS[0], choices=WAYS)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if reason := network.why_not_shaped():
        parser.error(reason)
    results: Path = given.results.resolve()
    record = soak(given.way, given.seed, 60.0 * given.minutes, results / given.way)
    (results / f"{given.way}.json").write_text(json.dumps(asdict(record), indent=1) + "\n")
    print(describe(record))
    return 1 if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
