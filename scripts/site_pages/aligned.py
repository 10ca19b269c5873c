"""Aligned lists of docstrings, which become tables:

codec          the codec of pushes and pulls
pull_codec     another codec for pulls
"""

from __future__ import annotations

import re

_ENTRY = re.compile(r"^([A-Za-z_*][\w *,.()=-]*?) {2,}(\S.*)$")


def as_tables(text: str) -> str:
    """The docstring with a table in the place of each aligned list."""
    lines: list[str] = []
    rows: list[list[str]] = []
    for line in [*text.split("\n"), ""]:
        entry = _ENTRY.match(line)
        if entry:
            rows.append([entry[1], entry[2]])
        elif rows and line.startswith("  "):
            rows[-1][1] += " " + line.strip()
        else:
            if rows:
                lines += ["", "| argument | meaning |", "| --- | --- |", *map(_row, rows), ""]
                rows = []
            lines.append(line)
    return "\n".join(lines)


def _row(row: list[str]) -> str:
    name, text = (cell.replace("|", "\\|") for cell in row)
    return f"| `{name}` | {text} |"
