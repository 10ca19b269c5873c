"""Judges what came of a training with a fault: every rank must be right, and none too late."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from faults import KILLED_EARLY, STEPS, Fault, Must

VICTIM = 2
BEYOND_TIMEOUT = 5.0  # seconds that a rank may take beyond its timeout to end with an error
EXIT_SECONDS = 10.0  # that the process may take to end after that
STEP_SECONDS = 1.0  # that a step may take in the mean, on a machine with other work

# What an error says of the rank that it blames.
_BLAMED = re.compile(
    r"\branks? ((?:\d+(?:, | and )?)+) "
    r"(?:is gone|are gone|sent|stopped|closed|has|have|left|differ|was silent|does not|can't)"
    r"|\bmessage from rank (\d+)\b|\bsent by rank (\d+)\b"
)
WARNING = re.compile(r"\b\w+LostWarning: .*")


@dataclass
class Seen:
    """What a rank came to.

    seconds  from the fault to the end of its process
    spoke    from the fault to its last line, which is that of its error; None: it printed nothing
    said     the last line of its error, and gradwire's own lines; None: there was no error
    gap      the longest time after the fault in which it took no step, up to its result or, without
             one, the end of its process; None: a file of an older run, which does not have it
    """

    status: int
    seconds: float
    said: str | None
    warned: list[str]
    digest: str | None
    step: int
    spoke: float | None = None
    hung: bool = False
    gap: float | None = None


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
    slowness: float = 1.0  # by which the machine's other work multiplies what may take time
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
        problems += _not_as_before(outcome.ranks, expected if exact else None)
    elif not goes_on_without_a_rank(outcome.way, fault):
        problems += _not_stopped(outcome, fault)
    else:
        problems += _not_gone_on(outcome, fault)
    for rank, seen in enumerate(outcome.ranks):
        if seen.status == 0:
            problems += _too_slow(f"rank {rank}", seen, fault, outcome)
        else:
            problems += _too_late(rank, outcome, fault)
    return problems


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
    return problems


def _not_gone_on(outcome: Outcome, fault: Fault) -> list[str]:
    problems = []
    if fault.must is Must.STOP:
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


def _has_warned(seen: Seen) -> bool:
    return any(WARNING.search(text) for text in seen.warned)


def _victim_ends_well(outcome: Outcome, fault: Fault) -> list[str]:
    victim = outcome.ranks[outcome.victim]
    if victim.status == 0:
        return [f"rank {outcome.victim} ends with exit status 0"]
    if victim.status > 0 and victim.said is None:
        return [f"rank {outcome.victim} says nothing"]
    if victim.status > 0 and fault.cause not in (victim.said or ""):
        return [f"rank {outcome.victim} does not say '{fault.cause}'"]
    return []


def _too_slow(name: str, seen: Seen, fault: Fault, outcome: Outcome) -> list[str]:
    """Complains of a rank that trains to the end, but too slowly: a fault that must change nothing
    holds it up for as long as the fault lasts, another one until the timeout."""
    timeout, slowness = outcome.timeout, outcome.slowness
    held_up = fault.lasts if fault.must is Must.CHANGE_NOTHING else timeout
    waits = min(held_up, timeout) + slowness * BEYOND_TIMEOUT
    own = BEYOND_TIMEOUT + STEP_SECONDS * (STEPS - fault.at_step)
    finishes = held_up + slowness * own
    problems = []
    if seen.gap is not None and seen.gap > waits:
        problems.append(f"{name} takes no step for {seen.gap} s")
    if seen.seconds > finishes:
        problems.append(f"{name} finishes {seen.seconds} s after the fault")
    return problems


def _too_late(rank: int, outcome: Outcome, fault: Fault) -> list[str]:
    """Complains of a rank that stops, but too late. The time of a victim that was stopped counts
    from its continuation, which is when all others have ended."""
    seen, since, began = outcome.ranks[rank], "the fault", 0.0
    if rank == outcome.victim and fault.goes_on:
        since = "it was continued"
        began = max(other.seconds for other in outcome.ranks if other is not seen)
    allowed = outcome.timeout + outcome.slowness * BEYOND_TIMEOUT
    to_exit = outcome.slowness * EXIT_SECONDS
    ends = seen.seconds - began
    if seen.said is None or seen.spoke is None:
        exits = to_exit if seen.said is not None else 0.0
        return [f"rank {rank} ends {ends:.1f} s after {since}"] if ends > allowed + exits else []
    speaks = seen.spoke - began
    if speaks > allowed:
        return [f"rank {rank} has its error {speaks:.1f} s after {since}"]
    if ends > max(speaks, 0.0) + to_exit:
        return [f"rank {rank} ends {ends - speaks:.1f} s after its error"]
    return []
