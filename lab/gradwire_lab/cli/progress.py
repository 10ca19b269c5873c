"""The progress of a command that takes long: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress

from gradwire.cli.output import warn
from gradwire_lab.progress_line import ProgressLine

_SECONDS_BETWEEN_LINES = 10.0


class ProgressOfSteps(Progress):
    """Shown on stderr. A context manager. is_shown: False with --json."""

    def __init__(self, steps: int, is_shown: bool) -> None:
        console = Console(stderr=True)
        hidden = not (is_shown and console.is_terminal)
        super().__init__(ProgressLine(console), console=console, disable=hidden, transient=True)
        self._shows_lines = is_shown and not console.is_terminal
        self._began = self._last_line = time.monotonic()
        self._task = self.add_task("", total=steps)

    def begin(self, title: str) -> None:
        """The steps that follow are of this title."""
        self.update(self._task, description=title)

    def end_step(self) -> None:
        self.advance(self._task)
        now, task = time.monotonic(), self.tasks[0]
        if self._shows_lines and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            done = f"{task.completed:.0f} of {task.total:.0f} steps are done"
            warn(f"{task.description}: {done}, {now - self._began:.0f} s")
