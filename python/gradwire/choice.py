"""Codecs that are chosen at run time: `auto:bits=0.5`, `auto:error=0.3`.

A *goal* is such a text. A `Chooser` holds what was chosen for the tensors of a goal, and decides
anew from *rows*: what each candidate makes of a tensor (`AutoGoal.try_candidates`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._core import AutoGoal, GradwireError

Row = npt.NDArray[np.float64]
_FLOWING, _FIRST_TRIAL = 2, 3  # places in a row

_SLACK = 1.1  # trials predict no better than this


class LimitWarning(RuntimeWarning):
    """No choice of codecs keeps the limit of an `auto` text at the moment."""


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
    bytes: float  # as the trials predicted, to be compared with those that flow


class Chooser:
    """The codecs of the tensors that share a goal and a direction.

    Ranks that decide from the same rows choose the same codecs.
    """

    def __init__(self, text: str) -> None:
        self.goal = AutoGoal(text)
        self.candidates = self.goal.candidates
        self.tensors: dict[str, ChosenTensor] = {}
        self.decisions = 0
        self.bits = 0.0  # a value, as the last decision predicts them
        self.error = 0.0
        self._correction = 1.0
        self._accepted = False  # the limit could be kept once, or nearly
        self._warned = False

    def begin(self, rows: Mapping[str, Row], steps: int) -> bool:
        """Chooses for new tensors from their inputs alone, as `decide`."""
        return self._choose({name: row for name, row in rows.items() if row[0] > 0}, steps)

    def decide(self, rows: Mapping[str, Row], steps: int) -> bool:
        """Chooses for the tensors in `rows`; returns whether a codec changed.

        steps: compressed steps so far. Rows without values (nothing was measured, or it was not
        finite) change nothing. Raises GradwireError saying what is possible if the limit can't be
        kept: at once for an error; for a budget when residuals have settled. Later it warns once.
        """
        measured = {name: row for name, row in rows.items() if row[0] > 0}
        self._correct(measured)
        changed = self._choose(measured, steps)
        self.decisions += bool(measured)
        return changed

    def _choose(self, measured: Mapping[str, Row], steps: int) -> bool:
        if not measured:
            return False
        rows = [row.tolist() for row in measured.values()]
        choice = self.goal.choose(rows, steps, self._correction)
        is_settled = not self.goal.limits_bits or self.goal.is_settled(steps)
        if is_settled and not choice["within"]:
            self._report(choice["possible"])
        self._accepted |= is_settled
        self.bits, self.error = choice["bits"], choice["error"]
        changed = False
        for (name, row), tensor in zip(measured.items(), choice["tensors"], strict=True):
            codec = self.candidates[tensor["candidate"]]
            changed |= name not in self.tensors or self.tensors[name].codec != codec
            self.tensors[name] = ChosenTensor(
                name,
                codec,
                tensor["bits"],
                tensor["error"],
                float(row[_FIRST_TRIAL + 2 * tensor["candidate"]]),
            )
        return changed

    def state_dict(self) -> dict[str, Any]:
        return {
            "goal": self.goal.text,
            "tensors": [asdict(tensor) for tensor in self.tensors.values()],
            "decisions": self.decisions,
            "bits": self.bits,
            "error": self.error,
            "correction": self._correction,
            "accepted": self._accepted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tensors = {entry["name"]: ChosenTensor(**entry) for entry in state["tensors"]}
        self.decisions = int(state["decisions"])
        self.bits, self.error = float(state["bits"]), float(state["error"])
        self._correction = float(state["correction"])
        self._accepted = bool(state["accepted"])

    def _correct(self, rows: Mapping[str, Row]) -> None:
        """Learns by how much the last decision mistook the bytes that flow."""
        known = [name for name in rows if name in self.tensors]
        predicted = sum(self.tensors[name].bytes for name in known)
        flowing = sum(float(rows[name][_FLOWING]) for name in known)
        if predicted > 0 and flowing > 0:
            ratio = min(max(flowing / predicted, 0.5), 2.0)
            self._correction = float(np.sqrt(self._correction * ratio))

    def _report(self, possible: float) -> None:
        goal = self.goal
        key = "bits" if goal.limits_bits else "error"
        finding = (
            f"the codecs that send least take {possible:.3g} bits a value"
            if goal.limits_bits
            else f"the most exact codecs leave out {possible:.3g} of the norm of a step's input"
        )
        if possible > _SLACK * goal.limit and not self._accepted:
            raise GradwireError(
                f"'{goal.text}' can't be kept: on these tensors {finding}, so give at least "
                f"{key}={_SLACK * possible:.3g}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"'{goal.text}' can't be kept now: {finding}, and these codecs are taken",
                LimitWarning,
                stacklevel=2,
            )
