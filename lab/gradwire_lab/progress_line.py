"""A line of progress, which a narrow terminal shows without its bar or its times."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_LEAST_BAR = 8
_LONGEST_BAR = 40


class ProgressLine(ProgressColumn):
    """The only column of a rich.progress.Progress. state: the task's field of this name, or ''.

    All text but the times is shown at any width, on two lines if one does not hold it.
    """

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> RenderableType:
        name = f"{task.description:<14}"
        count = f"{task.completed:.0f}/{task.total or 0:.0f}"
        state = task.fields.get("state", "")
        room = self._console.width - len(name) - len(count) - 2
        if state and len(state) > room:
            lines = [
                Text(line, no_wrap=True, overflow="fold") for line in (f"{name} {count}", state)
            ]
            return Group(*lines)
        texts = [count] + [state] * bool(state)
        room -= len(state) + bool(state)
        for time in (_clock(task.elapsed), f"left {_clock(task.time_remaining)}"):
            if len(time) < room:
                texts.append(time)
                room -= len(time) + 1
        row: list[RenderableType] = [Text(text, no_wrap=True) for text in (name, *texts)]
        if room >= _LEAST_BAR:
            width = min(room, _LONGEST_BAR) - 1
            row.insert(1, ProgressBar(task.total, task.completed, width))
        grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        grid.add_row(*row)
        return grid


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
