"""What the runs of an evaluation ended with: means over seeds, bits, differences, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import Any

from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.train.recipes import METRICS, Metric
from gradwire_lab.train.report import RunResult, mean_of
from gradwire_lab.train.results import Series
from gradwire_lab.train.settings import TrainSettings

MISSING, STOPPED, DIVERGED = "not run", "stopped", "diverged"
# Student's t of so many values.
_T_95 = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645, 6: 2.57058}
MOST_SEEDS = max(_T_95)  # of an arm


@dataclass(frozen=True)
class Observed:
    """What a training's gradients were found to be (observe.py).

    steps: those that were looked at. tensors: names and numel of those that are compressed. codecs:
    for each codec, lists over steps of lists over tensors: density (share of the values that do not
    decode to 0), error (squared, relative to the squared norm), bits of a value, seconds of a core
    for encoding and decoding (not in older lines), and class_shares where the codec has classes.
    histograms: for the largest tensor of each number of dimensions, at the middle step: edges in
    standard deviations, and shares of the values: of the gradient, clipped, decoded (first codec),
    and of the average of all workers' decoded values.
    """

    steps: list[int]
    tensors: list[tuple[str, int]]
    codecs: dict[str, dict[str, list[list[Any]]]]
    histograms: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Found:
    """The results that are there, by arm and seed, the settings of each arm, and what was
    observed."""

    results: dict[Arm, dict[int, RunResult]]
    settings: dict[Arm, TrainSettings]
    observed: dict[Arm, Observed] = field(default_factory=dict)

    def metric(self, arm: Arm) -> Metric:
        return METRICS[self.settings[arm].data]

    def runs(self, arm: Arm) -> list[RunResult]:
        return list(self.results.get(arm, {}).values())

    def series(self, arm: Arm, label: str) -> Series:
        return Series(label, self.runs(arm))

    def finals(self, arm: Arm) -> list[float]:
        """The metric at the end of the runs that came to it."""
        return self.series(arm, "").finals

    def ends(self, arm: Arm) -> list[float]:
        """The same in the unit of plots."""
        return [self.metric(arm).scale * final for final in self.finals(arm)]

    def text(self, arm: Arm) -> str:
        """The metric at the end. STOPPED: a run could not go on, such as one of `auto` whose budget
        can't be kept."""
        runs, finals = self.runs(arm), self.finals(arm)
        if not runs:
            return MISSING
        if len(finals) < len(runs):
            why = STOPPED if any(run.failed for run in runs) else DIVERGED
            return f"{len(runs) - len(finals)} of {len(runs)} {why}" if len(runs) > 1 else why
        metric = self.metric(arm)
        return metric.text(fmean(finals)) + self._half(finals, metric)

    @staticmethod
    def _half(values: Sequence[float], metric: Metric) -> str:
        """Half of the interval, in the unit of plots; empty for a single value."""
        if len(values) < 2:
            return ""
        return f" ± {metric.scale * interval(values)[1]:.{_digits(metric)}f}"

    def pairs(self, arm: Arm, base: Arm) -> tuple[list[float], list[float]]:
        """The metric at the end of both, of the seeds with which both came to it."""
        known = self._pairs(arm, base).values()
        return [own for own, _ in known], [other for _, other in known]

    def ratios(self, arm: Arm, base: Arm) -> dict[int, float]:
        """The metric by that of the base, of each seed with which both came to the end."""
        return {seed: own / other for seed, (own, other) in self._pairs(arm, base).items()}

    def _differences(self, arm: Arm, base: Arm) -> dict[int, float]:
        return {seed: own - other for seed, (own, other) in self._pairs(arm, base).items()}

    def _pairs(self, arm: Arm, base: Arm) -> dict[int, tuple[float, float]]:
        return {
            seed: (own.final, other.final)
            for seed, own in self.results.get(arm, {}).items()
            if (other := self.results.get(base, {}).get(seed)) is not None
            if own.final is not None and other.final is not None
        }

    def difference(self, arm: Arm, base: Arm) -> str:
        """To the base, the mean over the seeds that both have: in points, or in nats."""
        differences = self._differences(arm, base)
        if not differences or arm == base:
            return ""
        return self._signed(list(differences.values()), self.metric(arm))

    def change(self, arm: Arm, base: Arm, other: Arm, other_base: Arm) -> str:
        """Of the difference, from that of another arm to another base, at equal seeds."""
        own, theirs = self._differences(arm, base), self._differences(other, other_base)
        changes = [own[seed] - theirs[seed] for seed in own if seed in theirs]
        return self._signed(changes, self.metric(arm)) if changes and arm != base else ""

    def _signed(self, differences: Sequence[float], metric: Metric) -> str:
        return signed([metric.scale * each for each in differences], _digits(metric))

    def bits(self, arm: Arm) -> str:
        """Bits of a value of the compressed tensors, pushed and pulled."""
        runs = self.runs(arm)
        legs = (
            mean_of(runs, lambda run: run.push_payload_bits),
            mean_of(runs, lambda run: run.pull_payload_bits),
        )
        return ", ".join(_short(mean) for mean in legs if mean is not None)

    def ratio(self, arm: Arm) -> str:
        """32 bits by the bits of a compressed value, the mean of push and pull."""
        bits = self.series(arm, "").bits
        return f"{32 / bits:.3g}x" if bits else ""

    def ratio_of_all(self, arm: Arm) -> str:
        """The same of everything that is sent: with headers and the tensors that go raw."""
        bits = self._bits_of_all(arm)
        return f"{32 / fmean(bits):.3g}x" if bits else MISSING

    def bits_of_all(self, arm: Arm) -> str:
        return ", ".join(map(_short, self._bits_of_all(arm)))

    def _bits_of_all(self, arm: Arm) -> list[float]:
        runs = self.runs(arm)
        legs = (
            mean_of(runs, lambda run: run.push_bits_per_value),
            mean_of(runs, lambda run: run.pull_bits_per_value),
        )
        return [mean for mean in legs if mean is not None]

    def served(self, arm: Arm) -> str:
        """The metric of the servers' own model at the end, and in brackets its difference to that
        of the same runs; empty where nobody measured it."""
        ends = [(run.served, run.final) for run in self.runs(arm) if run.final is not None]
        known = [(served, final) for served, final in ends if served is not None]
        if not known:
            return ""
        metric, values = self.metric(arm), [served for served, _ in known]
        drift = self._signed([served - final for served, final in known], metric)
        return f"{metric.text(fmean(values))}{self._half(values, metric)} ({drift})"

    def seconds_a_step(self, arm: Arm) -> float | None:
        """The mean over the runs, measured while they trained; None without runs."""
        seconds = self.seconds_of_runs(arm)
        return fmean(seconds.values()) if seconds else None

    def seconds_of_runs(self, arm: Arm) -> dict[int, float]:
        """The measured time of a step, by seed, of the runs that came to their end."""
        runs, steps = self.results.get(arm, {}), self.settings[arm].steps
        return {s: run.measured_seconds / steps for s, run in runs.items() if run.final is not None}

    def hours_left(self, arms: Sequence[Arm]) -> float | None:
        """The hours of the runs of these arms that are not there, by the time that a step of a
        worker took in runs of the same model, width and optimizer, and of the same exchange if
        there are any. None where none are there.
        """
        hours = 0.0
        for arm in arms:
            own = self.settings[arm]
            of_model = [one for one in self.results if self._computes_as_much(one, arm)]
            alike = [one for one in of_model if self.settings[one].exchange == own.exchange]
            seconds = [
                second / self.settings[one].workers
                for one in alike or of_model
                for second in self.seconds_of_runs(one).values()
            ]
            missing = arm.seeds - min(len(self.runs(arm)), arm.seeds)
            if missing and not seconds:
                return None
            if missing:
                hours += missing * own.steps * own.workers * median(seconds) / 3600
        return hours

    def _computes_as_much(self, arm: Arm, other: Arm) -> bool:
        own, theirs = self.settings[arm], self.settings[other]
        return all(getattr(own, k) == getattr(theirs, k) for k in ("model", "width", "optimizer"))

    def speed_up(self, arm: Arm, base: Arm, longer: float = 1.0) -> str:
        """The time of a step of the base by that of `longer` steps of the arm, with equal seeds."""
        own, other = self.seconds_of_runs(arm), self.seconds_of_runs(base)
        ratios = [other[seed] / (longer * own[seed]) for seed in own if seed in other]
        if not ratios:
            return MISSING
        return f"{fmean(ratios):.3g}" if arm == base else with_interval(ratios)


def _digits(metric: Metric) -> int:
    return 2 if metric.scale == 100.0 else 4


def with_interval(values: Sequence[float]) -> str:
    """The mean, and half of the 95 % interval where there are several values."""
    if len(values) < 2:
        return f"{fmean(values):.3g}"
    mean, half = interval(values)
    return f"{mean:.3g} ± {half:.2g}"


def signed(values: Sequence[float], digits: int) -> str:
    """The same of differences, with their sign."""
    half = f" ± {interval(values)[1]:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):+.{digits}f}{half}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of 2 to 6 values, and half of its 95 % interval (Student's t)."""
    return fmean(values), _T_95[len(values)] * stdev(values) / len(values) ** 0.5


def _short(bits: float) -> str:
    return f"{bits:.0f}" if bits > 31.9 else f"{bits:.3g}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown. All columns but the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def accuracy_table(
    found: Found,
    arms: Mapping[str, Arm],
    heads: Sequence[str] = (),
    cells: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """How each arm ends, and how it differs from the first. heads, cells: of further columns, for
    some arms."""
    base, nothing = next(iter(arms.values())), [""] * len(heads)
    rows = []
    for label, one in arms.items():
        seeds = str(len(found.finals(one)) or "")
        own = [label, seeds, found.bits(one), found.text(one), found.difference(one, base)]
        rows.append([*own, *cells.get(label, nothing)])
    return table(("design", "seeds", "bits", found.metric(base).title, "difference", *heads), rows)
