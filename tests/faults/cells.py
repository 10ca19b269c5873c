"""One way to train with one fault: runs it, and has judge.py judge what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import free_port
from faults import AT_STEP, RATE, SAVE_EVERY, STEPS, Fault, Must, Network
from judge import (
    BEYOND_TIMEOUT,
    VICTIM,
    WARNING,
    Outcome,
    Seen,
    find_problems,
    goes_on_without_a_rank,
)
from running import Cluster, Launcher, Rank, bridged, relayed, write_offset

RANKS = 4
SERVER = RANKS - 1
MPI_CHECKPOINT_BYTES = 400_000  # of mpi_rank.cc
_START_SECONDS = 150.0
_FINISH_SECONDS = 300.0
_HANGING_SECONDS = 30.0  # beyond what is allowed, before a rank is killed

_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)(?::|$)")


def victim_of(way: str) -> int:
    """The rank to which a fault happens."""
    return {"servers-server": SERVER, "hsdp-rank-1": 1}.get(way, VICTIM)


def needs_store(way: str) -> bool:
    """Whether the ranks meet in a store of its own process."""
    return way == "local-steps-go-on"


def run_cell(
    way: str,
    fault: Fault,
    launcher: Launcher,
    folder: Path,
    expected: str | None,
    clock: Path | None,
) -> Outcome:
    """expected: digest of the model without a fault; None: this is the run without a fault.
    folder: for the files of the cell."""
    victim = victim_of(way)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if fault.needs_checkpoint:
        _run_to_checkpoint(way, fault, launcher, folder, clock)
    with _cluster(fault, launcher, folder, clock) as cluster:
        jobs = _jobs(way, fault, cluster)
        if fault.needs_checkpoint:
            jobs = [job | {"resume_from": AT_STEP} for job in jobs]
        jobs[victim] |= fault.job
        cluster.start(jobs)
        began = time.monotonic()
        if not fault.needs_checkpoint and fault.name != "none":
            cluster.wait_for_step(victim, fault.at_step, _START_SECONDS)
            began = time.monotonic()
        cluster.watch_steps()
        step = cluster.step(victim)
        if fault.apply is not None:
            fault.apply(cluster, victim)
        hung = _wait_for_all(way, fault, cluster)
        cluster.end()
        ranks = [_see(cluster, rank, began, rank in hung) for rank in range(RANKS)]
    number = folder / f"number-{victim}"
    outcome = Outcome(way, fault.name, victim, fault.timeout, step, ranks, victim)
    if number.exists():
        outcome.number = int(number.read_text())
    outcome.checkpoints, outcome.broken = look_at_checkpoints(folder)
    outcome.slowness = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
    outcome.problems = find_problems(outcome, fault, expected)
    return outcome


def look_at_checkpoints(folder: Path) -> tuple[int, list[str]]:
    """How many files a program would load, and which of them are not whole. Those on a disk of its
    own are gone with the rank."""
    found = [path for path in folder.glob("checkpoints/*/*") if path.name[0].isdigit()]
    found = [path for path in found if not path.name.endswith(".new")]
    broken = [str(path.relative_to(folder)) for path in found if not _is_whole(path)]
    return len(found), broken


def _is_whole(path: Path) -> bool:
    if path.suffix != ".pt":
        return path.stat().st_size == MPI_CHECKPOINT_BYTES
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except zipfile.BadZipFile:
        return False


def _run_to_checkpoint(
    way: str, fault: Fault, launcher: Launcher, folder: Path, clock: Path | None
) -> None:
    with _cluster(fault, launcher, folder, clock) as cluster:
        cluster.start([job | {"steps": AT_STEP} for job in _jobs(way, fault, cluster)])
        cluster.wait(list(range(RANKS)), _FINISH_SECONDS)
        statuses = [rank.status for rank in cluster.ranks]
        cluster.end()
        if statuses != [0] * RANKS:
            raise RuntimeError(f"{way}: the run to step {AT_STEP} ended with {statuses}")
    for path in (*folder.glob("progress-*"), *folder.glob("result-*")):
        path.unlink()
    for path in (*folder.glob("output-*"), folder / "store-is-there"):
        if path.exists():
            path.rename(path.with_name(f"before-{path.name}"))


@contextlib.contextmanager
def _cluster(
    fault: Fault, launcher: Launcher, folder: Path, clock: Path | None
) -> Iterator[Cluster]:
    if clock is not None:
        write_offset(clock, 0)
    with contextlib.ExitStack() as cleanup:
        cluster = Cluster(launcher, folder, clock=clock)
        if fault.network is Network.BRIDGE:
            cleanup.enter_context(bridged(cluster, RANKS, RATE))
        elif fault.network is Network.RELAY:
            cleanup.enter_context(relayed(cluster, RANKS, RATE))
        cleanup.callback(cluster.end)
        yield cluster


def _jobs(way: str, fault: Fault, cluster: Cluster) -> list[dict[str, Any]]:
    """The jobs of all ranks, without the fault. Starts the store of the ways that need one."""
    job = {
        "way": way,
        "port": free_port(),
        "world_size": RANKS,
        "steps": STEPS,
        "timeout": fault.timeout,
        "save_every": SAVE_EVERY,
    }
    if needs_store(way):
        cluster.start_store(job)
    return [dict(job) for _ in range(RANKS)]


def _wait_for_all(way: str, fault: Fault, cluster: Cluster) -> set[int]:
    """Returns the ranks that had to be killed because they did not end."""
    victim = victim_of(way)
    others = [rank for rank in range(RANKS) if rank != victim]
    finishes = fault.must is Must.CHANGE_NOTHING or goes_on_without_a_rank(way, fault)
    allowed = _FINISH_SECONDS if finishes else fault.timeout + BEYOND_TIMEOUT + _HANGING_SECONDS
    if fault.must is Must.NEVER_BREAK:
        allowed = _FINISH_SECONDS
    ended = cluster.wait(others if fault.goes_on else list(range(RANKS)), allowed)
    if fault.goes_on:
        cluster.go_on(victim)
        ended = cluster.wait([victim], fault.timeout + BEYOND_TIMEOUT + _HANGING_SECONDS) and ended
    if ended:
        return set()
    cluster.show_stacks()
    return {rank for rank in range(RANKS) if cluster.ranks[rank].status is None}


def _see(cluster: Cluster, number: int, began: float, hung: bool) -> Seen:
    rank: Rank = cluster.ranks[number]
    assert rank.status is not None
    output = cluster.folder / f"output-{number}"
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    said, warned = read_output(lines)
    result = cluster.folder / f"result-{number}.json"
    digest = json.loads(result.read_text())["digest"] if result.exists() else None
    offset = time.time() - time.monotonic()  # of the clock of files
    seconds = round(rank.ended - began, 1)
    spoke = round(output.stat().st_mtime - offset - began, 1) if lines else None
    trained = result.stat().st_mtime - offset if result.exists() else rank.ended
    gap = round(max(rank.longest_gap, trained - rank.stepped), 1)
    return Seen(rank.status, seconds, said, warned, digest, cluster.step(number), spoke, hung, gap)


def read_output(lines: list[str]) -> tuple[str | None, list[str]]:
    """The last error and gradwire's lines; the warnings of a lost rank."""
    said: list[str] = []
    warned = []
    error = None
    for prefixed in lines:
        line = _PREFIX.sub("", prefixed)
        if _ERROR.match(line):
            error = line
        elif line.startswith("gradwire:"):
            said.append(line)
        elif warning := WARNING.search(line):
            warned.append(warning[0])
    return " | ".join([*([error] if error else []), *said]) or None, warned
