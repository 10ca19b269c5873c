"""One way to train with one fault: runs it, and judges what came of it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster import free_port
from faults import AT_STEP, KILLED_EARLY, RATE, SAVE_EVERY, STEPS, Fault, Must, Network
from running import Cluster, Launcher, Rank, bridged, relayed, write_offset

RANKS = 4
VICTIM = 2
SERVER = RANKS - 1
BEYOND_TIMEOUT = 5.0  # seconds that a rank may take beyond its timeout to end with an error
MPI_CHECKPOINT_BYTES = 400_000  # of mpi_rank.cc
EXIT_SECONDS = 10.0  # that the process may take to end after that
_START_SECONDS = 150.0
_FINISH_SECONDS = 300.0
_HANGING_SECONDS = 30.0  # beyond what is allowed, before a rank is killed

# What an error says of the rank that it blames.
_BLAMED = re.compile(
    r"\branks? ((?:\d+(?:, | and )?)+) "
    r"(?:is gone|are gone|sent|stopped|closed|has|have|left|differ|was silent|does not|can't)"
    r"|\bmessage from rank (\d+)\b|\bsent by rank (\d+)\b"
)
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_WARNING = re.compile(r"\b\w+LostWarning: .*")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)(?::|$)")


@dataclass
class Seen:
    """What a rank came to.

    seconds  from the fault to the end of its process
    spoke    from the fault to its last line, which is that of its error; None: it printed nothing
    said     the last line of its error, and gradwire's own lines; None: there was no error
    """

    status: int
    seconds: float
    said: str | None
    warned: list[str]
    digest: str | None
    step: int
    spoke: float | None = None
    hung: bool = False


@dataclass
class Outcome:
    way: str
    fault: str
    victim: int
    timeout: float
    step: int  # of the victim, when the fault began
    ranks: list[Seen]
    number: int = VICTIM  # by which errors name the victim
    checkpoints: int | None = None  # files that were found; None: nobody looked
    broken: list[str] = field(default_factory=list)  # the files among them that are not whole
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Outcome:
        return Outcome(**values | {"ranks": [Seen(**seen) for seen in values["ranks"]]})


def goes_on_without_a_rank(way: str, fault: Fault) -> bool:
    """Those who begin a training with servers must all come."""
    return way.endswith("-go-on") and not (way.startswith("servers") and fault.name == KILLED_EARLY)


def resumes_exactly(way: str) -> bool:
    """Whether a training that restarts has the bits of one that never stopped. With servers, the
    workers then begin with the exact model; mpi_rank.cc saves no residual."""
    return not way.startswith("servers") and way != "mpi"


def victim_of(way: str) -> int:
    """The rank to which a fault happens."""
    return SERVER if way == "servers-server" else VICTIM


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
    """Of all ranks, without the fault. Starts the store of the ways that need one."""
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
    seconds = round(rank.ended - began, 1)
    spoke = None
    if lines:
        began_at = time.time() - (time.monotonic() - began)  # of the clock of files
        spoke = round(output.stat().st_mtime - began_at, 1)
    return Seen(rank.status, seconds, said, warned, digest, cluster.step(number), spoke, hung)


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
        elif warning := _WARNING.search(line):
            warned.append(warning[0])
    return " | ".join([*([error] if error else []), *said]) or None, warned


def blamed(said: str | None) -> set[int]:
    """The ranks that an error blames."""
    found = _BLAMED.findall(said or "")
    return {int(number) for groups in found for number in re.findall(r"\d+", " ".join(groups))}


def find_problems(outcome: Outcome, fault: Fault, expected: str | None) -> list[str]:
    """What is not as it must be."""
    problems = [f"rank {rank} hangs" for rank, seen in enumerate(outcome.ranks) if seen.hung]
    problems += [f"{name} is not whole" for name in outcome.broken]
    must = fault.must
    if must is Must.NEVER_BREAK and all(seen.status == 0 for seen in outcome.ranks):
        must = Must.CHANGE_NOTHING
    if must is Must.CHANGE_NOTHING:
        exact = resumes_exactly(outcome.way) or not fault.needs_checkpoint
        return problems + _not_as_before(outcome.ranks, expected if exact else None)
    if not goes_on_without_a_rank(outcome.way, fault):
        return problems + _not_stopped(outcome, fault)
    if must is Must.STOP:
        going_on = [seen for rank, seen in enumerate(outcome.ranks) if rank != outcome.victim]
        problems += _victim_ends_well(outcome, fault)
    else:
        going_on = [seen for seen in outcome.ranks if seen.status == 0]
        problems += [
            f"rank {rank} does not name rank {outcome.number}"
            for rank, seen in enumerate(outcome.ranks)
            if rank != outcome.victim
            and seen.status != 0
            and outcome.number not in blamed(seen.said)
        ]
    if going_on and not any(map(_has_warned, going_on)):  # of servers, these warn
        problems.append("the others go on without a warning")
    return problems + _not_as_before(going_on, None)


def _not_as_before(ranks: list[Seen], expected: str | None) -> list[str]:
    problems = [f"exit status {seen.status}: {seen.said}" for seen in ranks if seen.status != 0]
    digests = {seen.digest for seen in ranks}
    if not problems and len(digests) > 1:
        problems.append("the ranks' models differ")
    elif not problems and expected is not None and digests != {expected}:
        problems.append("the model is not that of the run without the fault")
    return problems


def _not_stopped(outcome: Outcome, fault: Fault) -> list[str]:
    problems = _victim_ends_well(outcome, fault)
    for rank, seen in enumerate(outcome.ranks):
        if rank == outcome.victim:
            continue
        if seen.status == 0:
            problems.append(f"rank {rank} ends with exit status 0")
        elif seen.status < 0 and not seen.hung:
            problems.append(f"rank {rank} is ended by signal {-seen.status}")
        if outcome.number not in blamed(seen.said):
            problems.append(f"rank {rank} does not name rank {outcome.number}")
        elif blamed(seen.said) - {outcome.number, rank} and fault.must is Must.STOP:
            problems.append(f"rank {rank} also blames {sorted(blamed(seen.said))}")
        if not fault.needs_checkpoint:
            problems += _too_late(f"rank {rank}", seen, outcome.timeout + BEYOND_TIMEOUT)
    return problems


def _too_late(name: str, seen: Seen, allowed: float) -> list[str]:
    if seen.spoke is not None and seen.spoke > allowed:
        return [f"{name} has its error {seen.spoke} s after the fault"]
    if seen.seconds > allowed + EXIT_SECONDS:
        return [f"{name} ends {seen.seconds} s after the fault"]
    return []


def _has_warned(seen: Seen) -> bool:
    return any(_WARNING.search(text) for text in seen.warned)


def _victim_ends_well(outcome: Outcome, fault: Fault) -> list[str]:
    victim = outcome.ranks[outcome.victim]
    if victim.status == 0:
        return [f"rank {outcome.victim} ends with exit status 0"]
    if victim.status > 0 and victim.said is None:
        return [f"rank {outcome.victim} says nothing"]
    if victim.status > 0 and fault.cause not in (victim.said or ""):
        return [f"rank {outcome.victim} does not say '{fault.cause}'"]
    return []
