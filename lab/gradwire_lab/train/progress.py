"""The progress of a run: bars on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from gradwire.errors import printable
from gradwire_lab.progress_line import ProgressLine
from gradwire_lab.train.recipes import Metric

_SECONDS_BETWEEN_LINES = 10.0


def say(console: Console, text: str, style: str = "") -> None:
    """Prints a line that stays, without markup and without breaking it."""
    console.print(
        printable(text, keep="\n"), style=style, markup=False, highlight=False, soft_wrap=True
    )


class Display(Progress):
    """Shows the events of rank 0. A context manager."""

    def __init__(self, console: Console, steps: int, metric: Metric) -> None:
        super().__init__(ProgressLine(console), console=console, disable=not console.is_terminal)
        self._steps, self._metric = steps, metric
        self._task = TaskID(0)
        self._last_line, self._value = -math.inf, ""

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "begin":
            self._task = self.add_task(event["run"], total=self._steps, state="")
            self._last_line, self._value = -math.inf, ""
        if event["event"] != "step":
            return
        if "value" in event:
            self._value = f"  {self._metric.title} {self._metric.text(event['value'])}"
        step, state = event["step"], f"loss {event['loss']:.3f}{self._value}"
        self.update(self._task, completed=step, state=state)
        now = time.monotonic()
        finished = step == self._steps and "value" in event
        if self.disable and (finished or now - self._last_line >= _SECONDS_BETWEEN_LINES):
            self._last_line = now
            of_all = f"step {step}/{self._steps}  {event['seconds']:.1f} s"
            say(self.console, f"{event['run']:<14} {of_all}  {state}")
