"""The codecs that hold now: those of the settings, or those that are chosen for `auto` texts from
what all ranks measured.

In a step in which a decision is due, each rank tries the candidates on its own input + residual:
for pushes on the segments of the two ranks before it (batches are alike, so two ranks tell enough),
for pulls on its own segments. At the end of the step the ranks send each other these rows, add them
in the order of ranks, and decide, each for itself, alike. The decision holds from the next step.

Before a tensor is compressed for the first time, its inputs alone are measured.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire._core import AutoGoal, Exchange, Layout
from gradwire.choice import Chooser, Row
from gradwire.errors import warn_user
from gradwire.torch.buckets.bucket import BucketJob
from gradwire.torch.checkpoint import StateDict, residuals_in
from gradwire.torch.exchange_settings import RAW_CODECS, ExchangeSettings
from gradwire.torch.network.engine import gather_bytes
from gradwire.torch.network.transport import Transport
from gradwire.torch.stats import ChosenCodec

Values = npt.NDArray[np.float32]
_INDEX = struct.Struct("<I")
_MEASURERS = 2  # ranks that try the pushes of a segment


class Place(NamedTuple):
    """A tensor's part in a goal."""

    goal: str
    direction: str
    name: str


class AutoCodecs:
    """What was chosen for every goal, and the rows of this rank in the step under way.

    Attributes:
        settings: with the codecs that hold now. Without `auto` texts they stay as they are.
    """

    def __init__(self, settings: ExchangeSettings) -> None:
        self.settings = settings
        self._goals = {AutoGoal(goal).text for goal in settings.goals}
        self._decides = False  # whether a decision ends the step under way
        self._steps = 0  # compressed ones
        self._choosers: dict[tuple[str, str], Chooser] = {}
        self._places: list[Place] = []  # in the order of buckets, which all ranks share
        self._rows: dict[Place, Row] = {}
        self._before: dict[tuple[str, str, int], Values] = {}

    @property
    def trying(self) -> AutoCodecs | None:
        """Tries codecs on what the step under way sends, if a decision ends it."""
        return self if self._decides else None

    def begin_step(self, raw: bool) -> None:
        # The first step is always due; its choosers are made when it meets its tensors.
        goals = [chooser.goal for chooser in self._choosers.values()]
        is_due = not goals or any(goal.is_due(self._steps + 1) for goal in goals)
        self._decides = bool(self._goals) and not raw and is_due

    def prepare(self, job: BucketJob, wire: Transport) -> None:
        """Chooses for those tensors of a new bucket that were never compressed, from their values,
        before they are exchanged."""
        if not self._goals or job.raw:
            return
        raw_codec = RAW_CODECS[job.values.dtype]
        layout = self.settings.bucket_layout(job.tensors, wire.world_size, raw_codec)
        new = [
            place
            for segment in layout.segments
            for place in _places(segment)
            if place.name not in self._chooser(place).tensors
        ]
        new = list(dict.fromkeys(new))
        if not new or wire.world_size == 1:
            return
        values = job.all_values().float().cpu().numpy()
        for segment in layout.segments:
            pair = [place for place in _places(segment) if place in new]
            if pair and _measures(segment["owner"], wire):
                row = self._try(pair[0], _part(values, segment))
                for place in pair:  # the average has not been seen yet
                    self._add(place, row)
        for chooser, rows in self._share(new, wire):
            chooser.begin(rows)
        self._take_chosen()

    def record_pushes(
        self, layout: Layout, exchange: Exchange, values: Values, wire: Transport
    ) -> None:
        """Tries the candidates on what this rank is about to push."""
        self._before = {(r.kind, r.name, r.offset): r.values for r in residuals_in(exchange)}
        for segment in layout.segments:
            if segment["push_goal"] and _measures(segment["owner"], wire):
                key = ("push", segment["name"], segment["tensor_offset"])
                place = Place(segment["push_goal"], "push", segment["name"])
                part, owed = _part(values, segment), self._before[key]
                self._add(place, self._try(place, part, owed, segment["push_codec"]))

    def record_pulls(
        self, layout: Layout, exchange: Exchange, values: Values, wire: Transport
    ) -> None:
        """Tries the candidates on what this rank has just sent as the owner. `values`: the result,
        which lacks what the residual now holds."""
        after = {(r.kind, r.name, r.offset): r.values for r in residuals_in(exchange)}
        for segment in layout.segments:
            if segment["pull_goal"] and segment["owner"] == wire.rank:
                key = ("pull", segment["name"], segment["tensor_offset"])
                place = Place(segment["pull_goal"], "pull", segment["name"])
                owed = self._before[key]
                x = _part(values, segment) + (after[key] - owed)
                self._add(place, self._try(place, x, owed, segment["pull_codec"]))
        self._before = {}

    def end_step(self, wire: Transport) -> bool:
        """Counts a compressed step; if a decision is due, decides from all ranks' rows. Returns
        whether a codec changed."""
        self._steps += 1
        changed = False
        if self._decides and wire.world_size > 1:
            for chooser, rows in self._share(self._places, wire):
                changed |= chooser.decide(rows, self._steps)
        if changed:
            self._take_chosen()
        return changed

    def _take_chosen(self) -> None:
        chosen = tuple(
            (direction, name, tensor.codec)
            for (_, direction), chooser in self._choosers.items()
            for name, tensor in chooser.tensors.items()
        )
        self.settings = replace(self.settings, chosen=chosen)

    def summary(self) -> tuple[ChosenCodec, ...]:
        return tuple(
            ChosenCodec(
                chooser.goal.text, direction, t.name, t.codec, t.bits, t.error, chooser.decisions
            )
            for (_, direction), chooser in self._choosers.items()
            for t in chooser.tensors.values()
        )

    def remarks(self) -> tuple[str, ...]:
        return tuple(
            remark
            for (_, direction), chooser in self._choosers.items()
            for remark in chooser.remarks(direction)
        )

    def state_dict(self) -> StateDict | None:
        """None without `auto` texts."""
        if not self._goals:
            return None
        return {
            "steps": self._steps,
            "choosers": [
                {"direction": direction, **chooser.state_dict()}
                for (_, direction), chooser in self._choosers.items()
            ],
        }

    def load_state_dict(self, state: StateDict | None) -> None:
        """Drops, with a warning, what was chosen for goals that the settings no longer have. If
        nothing is left, decisions come as at the start of a training."""
        if not self._goals or state is None:
            return
        self._choosers.clear()
        self._places.clear()
        self._rows.clear()
        for entry in state["choosers"]:
            if entry["goal"] in self._goals:
                chooser = Chooser(entry["goal"], self.settings.remedy)
                chooser.load_state_dict(entry)
                self._choosers[entry["goal"], entry["direction"]] = chooser
        self._steps = int(state["steps"]) if self._choosers else 0
        if dropped := {entry["goal"] for entry in state["choosers"]} - self._goals:
            warn_user(
                f"what was chosen for {', '.join(sorted(dropped))} is dropped, because the codecs "
                f"are now chosen for {', '.join(sorted(self._goals))}; the residuals are kept",
            )
        self._take_chosen()

    # -------------------------------------------------------------------------------------------

    def _chooser(self, place: Place) -> Chooser:
        key = place.goal, place.direction
        if key not in self._choosers:
            self._choosers[key] = Chooser(place.goal, self.settings.remedy)
        if place not in self._places:
            self._places.append(place)
            for (goal, direction), other in self._choosers.items():
                if direction == place.direction and goal != place.goal:
                    other.tensors.pop(place.name, None)  # loaded, and now in another goal by a rule
        return self._choosers[key]

    def _try(
        self, place: Place, x: Values, residual: Values | None = None, in_use: str = ""
    ) -> Row:
        goal = self._choosers[place.goal, place.direction].goal
        return np.array(goal.try_candidates(x, residual, in_use))

    def _add(self, place: Place, row: Row) -> None:
        self._rows[place] = self._rows[place] + row if place in self._rows else row

    def _share(
        self, places: Sequence[Place], wire: Transport
    ) -> Iterator[tuple[Chooser, dict[str, Row]]]:
        """Every chooser with the rows of its tensors among `places`, summed over the ranks."""
        own = b"".join(
            _INDEX.pack(index) + self._rows[place].astype("<f4").tobytes()
            for index, place in enumerate(places)
            if place in self._rows
        )
        for place in places:
            self._rows.pop(place, None)
        totals: dict[Place, Row] = {}
        all_rows = sum(_INDEX.size + 4 * self._row_length(place) for place in places)
        for message in gather_bytes(own, wire, all_rows):
            for place, row in self._unpack(message, places):
                totals[place] = totals[place] + row if place in totals else row
        for (goal, direction), chooser in self._choosers.items():
            mine = [p for p in places if (p.goal, p.direction) == (goal, direction)]
            yield chooser, {place.name: totals[place] for place in mine if place in totals}

    def _row_length(self, place: Place) -> int:
        return self._choosers[place.goal, place.direction].goal.row_length

    def _unpack(self, message: bytes, places: Sequence[Place]) -> Iterator[tuple[Place, Row]]:
        at = 0
        while at < len(message):
            (index,) = _INDEX.unpack_from(message, at)
            place = places[index]
            length = self._row_length(place)
            row = np.frombuffer(message, "<f4", length, at + _INDEX.size)
            yield place, row.astype(np.float64)
            at += _INDEX.size + 4 * length


def _places(segment: dict[str, Any]) -> list[Place]:
    return [
        Place(segment[f"{direction}_goal"], direction, segment["name"])
        for direction in ("push", "pull")
        if segment[f"{direction}_goal"]
    ]


def _part(values: Values, segment: dict[str, Any]) -> Values:
    start = segment["bucket_offset"]
    return values[start : start + segment["numel"]]


def _measures(owner: int, wire: Transport) -> bool:
    """Whether this rank tries the pushes to this owner."""
    return 1 <= (wire.rank - owner) % wire.world_size <= _MEASURERS
