"""Codecs that are chosen at run time: `auto:bits=0.5`, `auto:error=0.3`.

A *goal* is such a text. A `Chooser` holds what was chosen for the tensors of a goal, and decides
anew from *rows*: what each candidate makes of a tensor (`AutoGoal.try_candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._core import AutoGoal
from gradwire.errors import LimitError, LimitWarning, warn_user

Row = npt.NDArray[np.float64]
_VALUES, _FLOWING = 0, 2  # places in a row

_SLACK = 1.1  # trials predict no better than this
_NEWEST = 0.5  # share of the newest measurement in the mean, as gradients differ from step to step
_PAYBACK = 2  # periods of a goal in which bits above the budget are saved again, or spent below it
_MOST_PAYBACK = 0.5  # of the budget

# What a chooser's state has beside its tensors.
_NUMBERS = ("decisions", "bits", "error", "_correction", "_steps", "_overspent", "_accepted")


@dataclass(frozen=True)
class ChosenTensor:
    """The codec of a tensor, and what the last decision predicts of it.

    bits    a value
    error   norm of what a step leaves out / norm of its input
    """

    name: str
    codec: str
    bits: float
    error: float


class Chooser:
    """The codecs of the tensors that share a goal and a direction.

    Ranks that decide from the same rows choose the same codecs.
    """

    def __init__(self, text: str, remedy: str = "") -> None:
        """remedy: what else can be done if a budget can't be kept; empty: allow coarser codecs."""
        self.goal = AutoGoal(text)
        self._remedy = remedy
        self.candidates = self.goal.candidates
        self.tensors: dict[str, ChosenTensor] = {}
        self.decisions = 0
        self.bits = 0.0  # a value, as the last decision predicts them
        self.error = 0.0
        self.shortfall = ""  # what is possible, if the last decision does not keep the limit
        self._rows: dict[str, Row] = {}  # moving averages
        self._correction = 1.0  # bits that flow / bits that trials predict
        self._steps = 0  # at the last decision that knew what flowed
        self._overspent = 0.0  # bits a value beyond the budget, summed over steps
        self._accepted = False  # the limit could be kept once, or nearly
        self._warned = False

    def begin(self, rows: Mapping[str, Row]) -> None:
        """Chooses for new tensors from their inputs alone, as `decide`. A budget may be exceeded,
        because the residuals have not settled."""
        measured = {name: row for name, row in rows.items() if row[_VALUES] > 0}
        if measured:
            self._choose(measured, is_settled=not self.goal.limits_bits)

    def decide(self, rows: Mapping[str, Row], steps: int) -> bool:
        """Chooses for the tensors in `rows`; returns whether a codec changed.

        steps: compressed steps so far. Rows without values (nothing was measured, or it was not
        finite) change nothing. Raises LimitError saying what is possible if the limit can't be
        kept: at once for an error; for a budget when residuals have settled. If it was kept once,
        a LimitWarning says so once.
        """
        measured = {name: row for name, row in rows.items() if row[_VALUES] > 0}
        if not measured:
            return False
        self._account(measured, steps)
        for name, row in measured.items():
            before = self._rows.get(name, row)
            self._rows[name] = before + _NEWEST * (row - before)
        is_settled = not self.goal.limits_bits or self.goal.is_settled(steps)
        latest = {name: self._rows[name] for name in measured}
        changed, self.shortfall = self._choose(latest, is_settled)
        self.decisions += 1
        return changed

    def remarks(self, direction: str) -> tuple[str, ...]:
        """For statistics. direction: which way these tensors are sent, "push" or "pull"."""
        if not self.shortfall:
            return ()
        return (f"{self.goal.text}, {direction}: exceeds its limit, because {self.shortfall}",)

    def _choose(self, measured: Mapping[str, Row], is_settled: bool) -> tuple[bool, str]:
        """Returns whether a codec changed, and the shortfall."""
        rows = [row.tolist() for row in measured.values()]
        correction = self._correction if self.goal.limits_bits else 1.0
        choice = self.goal.choose(rows, self._limit_now() / correction)
        possible, shortfall = choice["possible"], ""
        if possible > _SLACK * self.goal.limit:
            shortfall = self._describe(possible)
            if is_settled:
                self._report(possible, shortfall)
        self._accepted |= is_settled
        self.bits, self.error = correction * choice["bits"], choice["error"]
        changed = False
        for name, tensor in zip(measured, choice["tensors"], strict=True):
            codec = self.candidates[tensor["candidate"]]
            changed |= name not in self.tensors or self.tensors[name].codec != codec
            bits = correction * tensor["bits"]
            self.tensors[name] = ChosenTensor(name, codec, bits, tensor["error"])
        return changed, shortfall

    def state_dict(self) -> dict[str, Any]:
        return {
            "goal": self.goal.text,
            "tensors": [asdict(tensor) for tensor in self.tensors.values()],
            "rows": {name: row.tolist() for name, row in self._rows.items()},
            **{name.lstrip("_"): getattr(self, name) for name in _NUMBERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tensors = {entry["name"]: ChosenTensor(**entry) for entry in state["tensors"]}
        self._rows = {name: np.array(row) for name, row in state["rows"].items()}
        for name in _NUMBERS:
            setattr(self, name, state[name.lstrip("_")])

    def _account(self, rows: Mapping[str, Row], steps: int) -> None:
        """Compares what flows with the prediction, and adds up what flowed beyond the budget since
        the last decision, as far as the tensors in `rows` and this step tell."""
        known = [
            (row.tolist(), self.tensors[n].bits) for n, row in rows.items() if n in self.tensors
        ]
        values = sum(row[_VALUES] for row, _ in known)
        flowing = 8 * sum(row[_FLOWING] for row, _ in known)
        predicted = sum(row[_VALUES] * bits for row, bits in known)
        if flowing > 0 and predicted > 0:
            self._correction *= math.sqrt(min(max(flowing / predicted, 0.5), 2.0))
        if self.goal.limits_bits and flowing > 0:
            most = _MOST_PAYBACK * self.goal.limit * _PAYBACK * self.goal.every
            self._overspent += (flowing / values - self.goal.limit) * (steps - self._steps)
            self._overspent = min(max(self._overspent, -most), most)
            self._steps = steps

    def _limit_now(self) -> float:
        """The goal's limit; that of bits so that the budget holds over the whole training."""
        return self.goal.limit - self._overspent / (_PAYBACK * self.goal.every)

    def _describe(self, possible: float) -> str:
        if self.goal.limits_bits:
            return f"the codecs that send least take {possible:.3g} bits a value"
        return f"the most exact codecs leave out {possible:.3g} of the norm of a step's input"

    def _report(self, possible: float, shortfall: str) -> None:
        goal = self.goal
        key = "bits" if goal.limits_bits else "error"
        if not self._accepted:
            message = (
                f"'{goal.text}' can't be kept: on these tensors {shortfall}, so give at least "
                f"{key}={_SLACK * possible:.3g}"
            )
            if goal.limits_bits and self._remedy:
                message += f". {self._remedy}"
            elif goal.limits_bits and goal.largest_s == 1.0:
                message += ". Or allow coarser codecs, which cost accuracy: s=1.5"
            raise LimitError(message)
        if not self._warned:
            self._warned = True
            warn_user(
                f"'{goal.text}' can't be kept now: {shortfall}, and these codecs are taken",
                LimitWarning,
            )
