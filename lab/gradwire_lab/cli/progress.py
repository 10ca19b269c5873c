"""The progress of a command that takes long: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

from gradwire.cli.output import warn
from gradwire_lab.progress_line import ProgressLine

_SECONDS_BETWEEN_LINES = 10.0


class ProgressOfSteps:
    """Shown on stderr. A context manager. is_shown: False with --json."""

    def __init__(self, steps: int, is_shown: bool) -> None:
        console = Console(stderr=True)
        self._steps, self._done, self._title = steps, 0, ""
        self._lines = is_shown and not console.is_terminal
        self._began = self._last_line = time.monotonic()
        self._bar = Progress(
            ProgressLine(console),
            console=console,
            disable=not (is_shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> ProgressOfSteps:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, title: str) -> None:
        """The steps that follow are of this title."""
        self._title = title
        self._bar.update(self._task, description=title)

    def advance(self) -> None:
        """A step is done."""
        self._done += 1
        self._bar.advance(self._task)
        now = time.monotonic()
        if self._lines and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            seconds = now - self._began
            warn(f"{self._title}: {self._done} of {self._steps} steps are done, {seconds:.0f} s")
