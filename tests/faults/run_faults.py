#!/usr/bin/env python3
"""Trains in each way with each fault, and writes what came of it.

    tests/faults/run_faults.py --results build/faults
    tests/faults/run_faults.py --results build/faults --ways hook-ring --faults killed stopped
    tests/faults/run_faults.py --results build/faults --table docs/results/reliability.md

Each cell, a way with a fault, gets a file WAY/FAULT.json; a cell that has one is not run again. The
files of the last run of a cell, among them what each rank printed, are in WAY/FAULT/. --table only
writes the tables from the files, between the marks of the page; ways without files keep the rows
that the page has.

run_store_faults.py does so with stores of weights.

Times are judged, too (judge.py): a machine with ten times as much to do as it has cores can be too
slow. Faults of links need root. The exit status is 1 if a cell that was run shows a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from cells import run_cell
from faults import BY_NAME, FAULTS, KILLED_EARLY, NONE, Fault, Network
from gradwire_lab.train import network
from judge import Outcome
from reliability_page import NOT_NOTICED, WAYS, model_without_fault, write_tables
from running import Forks, Launcher, write_offset
from running_mpi import MpiRanks


def why_not(way: str, fault: Fault, mpi_rank: Path) -> str | None:
    """Why the cell cannot be run here; None if it can."""
    if way == "mpi" and fault.network is Network.RELAY:
        return "MPI does not tell the other ranks which rank's message was damaged"
    if way == "mpi" and fault.name == KILLED_EARLY:
        return "MPI connects the ranks before the program begins"
    if way == "mpi" and not mpi_rank.exists():
        return f"{mpi_rank} is not there (--mpi-rank)"
    if fault.network is Network.LOOPBACK and "disk_kib" not in fault.job:
        return None
    return network.why_not_shaped(fault.network is Network.RELAY)


class Launchers:
    """Those of all ways, each started when it is needed first."""

    def __init__(self, mpi_rank: Path, folder: Path) -> None:
        """folder: for the file with the offset of shifted clocks."""
        self._mpi_rank, self._clock = mpi_rank, folder / "clock"
        self._started: dict[tuple[bool, bool], Launcher] = {}

    def clock(self, fault: Fault) -> Path | None:
        return self._clock if fault.shifts_clock else None

    def launcher(self, way: str, fault: Fault) -> Launcher:
        kind = way == "mpi", fault.shifts_clock
        if kind not in self._started:
            clock = self.clock(fault)
            if clock is not None:
                write_offset(clock, 0)
            self._started[kind] = MpiRanks(self._mpi_rank, clock) if way == "mpi" else Forks(clock)
        return self._started[kind]

    def close(self) -> None:
        for launcher in self._started.values():
            launcher.close()


def run_missing(results: Path, ways: list[str], faults: list[Fault], mpi_rank: Path) -> bool:
    """Returns whether every cell that was run is as it must be."""
    fine = True
    with (
        tempfile.TemporaryDirectory(prefix="gradwire-faults-") as scratch,
        contextlib.closing(Launchers(mpi_rank, Path(scratch))) as launchers,
    ):
        for fault in [NONE, *faults]:
            for way in ways:
                if (results / way / f"{fault.name}.json").exists():
                    continue
                if reason := why_not(way, fault, mpi_rank):
                    print(f"{way}, {fault.name}: not run: {reason}", flush=True)
                else:
                    fine &= _run(results, way, fault, launchers)
    return fine


def _run(results: Path, way: str, fault: Fault, launchers: Launchers) -> bool:
    path = results / way / f"{fault.name}.json"
    begin = time.monotonic()
    expected = model_without_fault(results, way) if fault is not NONE else None
    launcher, clock = launchers.launcher(way, fault), launchers.clock(fault)
    outcome = run_cell(way, fault, launcher, path.with_suffix(""), expected, clock)
    _report(outcome, time.monotonic() - begin)
    if fault is NONE and outcome.problems:
        raise SystemExit(f"{way} fails without a fault: see {path.with_suffix('')}")
    path.with_suffix(".new").write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    path.with_suffix(".new").rename(path)
    return not outcome.problems or (way, fault.name) in NOT_NOTICED


def _report(outcome: Outcome, seconds: float) -> None:
    state = "; ".join(outcome.problems) or "as it must be"
    print(f"{outcome.way}, {outcome.fault}: {state} ({seconds:.0f} s)", flush=True)
    for rank, seen in enumerate(outcome.ranks):
        words = seen.said or (seen.digest or "")[:8]
        print(f"  {rank}: {seen.status} after {seen.seconds} s: {words[:300]}", flush=True)


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", nargs="+", default=names, choices=names)
    parser.add_argument("--table", type=Path, help="the page whose tables are written")
    built = Path("build/gcc/tests/mpi/mpi_rank")
    parser.add_argument("--mpi-rank", type=Path, default=built, help="built from mpi_rank.cc")
    given = parser.parse_args()
    results = given.results.resolve()
    if given.table is not None:
        write_tables(results, given.table)
        return 0
    faults = [BY_NAME[name] for name in given.faults]
    return 0 if run_missing(results, given.ways, faults, given.mpi_rank.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
