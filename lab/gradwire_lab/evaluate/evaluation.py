"""What an evaluation is: experiments, each with its trainings, its tables and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradwire_lab.evaluate.arms import Arm
from gradwire_lab.evaluate.charts import Chart
from gradwire_lab.evaluate.found import Found


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper.

    about: Markdown. tables: Markdown, from what was found. figures: by name, charts of what was
    found; the text describes each for those who don't see it.
    """

    title: str
    about: str
    arms: tuple[Arm, ...]
    tables: Callable[[Found], str] | None = None
    figures: Mapping[str, tuple[str, Callable[[Found], Chart]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The experiments of a paper. name: on the command line, and of the page."""

    name: str
    title: str
    about: str
    experiments: tuple[Experiment, ...]

    def arms(self, of: str = "") -> list[Arm]:
        """Each once, in the order of the experiments. Of equal trainings that differ in their
        number of seeds, the one with most. of: those of experiments whose title begins so."""
        most: dict[Arm, Arm] = {}
        for experiment in self.experiments:
            for one in experiment.arms if experiment.title.startswith(of) else ():
                most[one] = max(most.get(one, one), one, key=lambda equal: equal.seeds)
        return list(most.values())
