"""The texts that people write beside a page: they quote cells of its tables, so that no number in
them is older than the runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

from gradwire_lab.evaluate.found import MISSING

_QUOTE = re.compile(r"\{([^{};]+);([^{};]+);([^{};]+)\}")
_ITEM = "- "
_HOLE = "\0"  # a cell of a run that is not there
_SENTENCES = re.compile(r"(?:(?<=[.!?])|(?<=\.\*\*)) (?=[A-Z*`{\0])")


def fill(text: str, tables: Mapping[str, str], columns: int) -> str:
    """The text with a cell in place of each `{title; row; column}`, in lines of `columns`.

    Args:
        text: Paragraphs and lists in Markdown, and tables, whose lines stay as they are.
        tables: By the titles of experiments; "" where none of its runs is there. A quote has a
            title or its beginning, the first cell of a row, and a head. A sentence is left out if
            the run of a cell in it is missing, and an item if its sentences are.
        columns: The longest line.

    Raises:
        ValueError: No table has a cell that the text quotes.
    """

    def cell(quote: re.Match[str]) -> str:
        title, row, column = (re.sub(r"\s+", " ", part.strip()) for part in quote.groups())
        named = [title] if title in tables else [n for n in tables if n.startswith(title)]
        if len(named) != 1:
            raise ValueError(f"{len(named)} experiments are called '{title}'")
        found = tables[named[0]]
        text = _cell(found, row, column) if found else ""
        return _HOLE if MISSING in text or not text else text

    return "\n".join(_wrapped(_QUOTE.sub(cell, text), columns)).strip()


def _cell(table: str, row: str, column: str) -> str:
    lines = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    place = None
    for before, cells in zip([[], *lines], [*lines, []], strict=True):
        if set(cells[:1]) == {"---"}:  # the line below the heads
            place = before.index(column) if column in before else None
        elif place is not None and cells[:1] == [row]:
            return cells[place]
    raise ValueError(f"no table has a row '{row}' and a column '{column}'")


def _wrapped(text: str, columns: int) -> Iterable[str]:
    """Each paragraph and each item of a list in lines of `columns`."""
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        stands = not line.strip() or line.lstrip().startswith("|")
        if block and (stands or line.startswith(_ITEM)):
            indent = "  " if block[0].startswith((_ITEM, "  ")) else ""
            first = _ITEM if block[0].startswith(_ITEM) else indent
            if said := _without_holes(" ".join(map(str.strip, block)).removeprefix(_ITEM)):
                yield textwrap.fill(
                    said,
                    columns,
                    initial_indent=first,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            block = []
        if stands:
            yield line
        else:
            block.append(line)


def _without_holes(text: str) -> str:
    """The sentences whose cells are all there."""
    return " ".join(part for part in _SENTENCES.split(text) if _HOLE not in part)
