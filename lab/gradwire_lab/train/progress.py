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
        self._steps = steps
        self._metric = metric
        self._last_line = -math.inf
        self._value = ""
        self._task: TaskID | None = None

    def show(self, event: dict[str, Any]) -> None:
        """Shows an event of rank 0 if it is about progress."""
        if event["event"] == "begin":
            self._value = ""
            self._task = self.add_task(event["run"], total=self._steps, state="")
            self._last_line = -math.inf
        elif event["event"] == "step":
            self._show_step(event)

    def _show_step(self, event: dict[str, Any]) -> None:
        run, step = event["run"], event["step"]
        if "value" in event:
            self._value = f"  {self._metric.title} {self._metric.text(event['value'])}"
        state = f"loss {event['loss']:.3f}{self._value}"
        if self._task is not None:
            self.update(self._task, completed=step, state=state)
        now = time.monotonic()
        finished = step == self._steps and "value" in event
        if self.disable and (finished or now - self._last_line >= _SECONDS_BETWEEN_LINES):
            self._last_line = now
            say(
                self.console,
                f"{run:<14} step {step}/{self._steps}  {event['seconds']:.1f} s  {state}",
            )
