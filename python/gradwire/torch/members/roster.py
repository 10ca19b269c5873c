"""A generation of a training's members: who they are, and what they do first.

Every member has an id, which no other process ever has. When a member is lost, or processes ask to
join, the members of a generation report how far they are. From the reports anyone can decide the
next generation; the first decision that reaches the store is valid.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """How far a member is when its generation ends.

    done    exchanges that it has finished; None: it never had the others' model
    steps   local steps so far
    unsent  of each fragment of the model: local steps since its last exchange
    asking  processes that this member has seen to ask to join
    """

    done: int | None
    steps: int = 0
    unsent: tuple[int, ...] = ()
    asking: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: bytes) -> Report:
        found = json.loads(text)
        lists = {name: tuple(found[name]) for name in ("unsent", "asking")}
        return Report(**found | lists)


@dataclass(frozen=True)
class Roster:
    """The members of a generation.

    members   ids, ascending; the place of an id is the rank of its process
    source    the member that gives its model to those in `receivers`
    receivers   members that are an exchange behind, and newcomers
    done      exchanges that count: whoever has finished fewer is a receiver
    steps     local steps that count on all members from now on
    unsent    as in Report: what the members exchange first
    is_over   whether no process is left that has the model
    """

    generation: int
    members: tuple[int, ...]
    source: int
    receivers: tuple[int, ...]
    done: int
    steps: int
    unsent: tuple[int, ...]
    is_over: bool = False

    @staticmethod
    def of(found: dict[str, Any]) -> Roster:
        """From its fields, as JSON has them."""
        lists = {name: tuple(found[name]) for name in ("members", "receivers", "unsent")}
        return Roster(**found | lists)


def found_training(founders: Collection[int]) -> Roster:
    """The first generation: all take the model of the lowest."""
    source, *receivers = sorted(founders)
    return Roster(0, (source, *receivers), source, tuple(receivers), 0, 0, ())


def follow(roster: Roster, reports: Mapping[int, Report]) -> Roster:
    """The generation after `roster`, from the reports of its members that are left.

    Processes that ask to join must wait while members have unsent changes, because a newcomer has
    none and would weaken the average.
    """
    has_begun = any(report.done is not None for report in reports.values())
    if not has_begun and (roster.done > 0 or not reports):
        return Roster(roster.generation + 1, (), -1, (), roster.done, 0, (), is_over=True)
    done = max((report.done for report in reports.values() if report.done is not None), default=0)
    up_to_date = [
        member for member, report in reports.items() if report.done == done or not has_begun
    ]
    unsent = tuple(max(s) for s in zip(*(reports[m].unsent for m in up_to_date), strict=True))
    source = min(up_to_date)
    asking = {process for report in reports.values() for process in report.asking}
    members = sorted({*reports, *(() if any(unsent) else asking)})
    receivers = [m for m in members if m not in reports or reports[m].done != done]
    return Roster(
        roster.generation + 1,
        tuple(members),
        source,
        tuple(member for member in receivers if member != source),
        done,
        reports[source].steps,
        unsent,
    )
