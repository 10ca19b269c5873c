"""Tables for terminals, which lose no character at any width."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

from gradwire.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP = "  "
# Where a line may end. A number has no such place.
_IN_TITLE = re.compile(r"( +|(?<=[a-z][-/])(?=[a-z]))")
_IN_TEXT = re.compile(r"( +)")
_IN_CODEC = re.compile(r"( +|(?<=[,:])(?=[a-z]))")
_READABLE = 24  # characters that a column of sentences gets at least


@dataclass(frozen=True)
class Table:
    """What rich prints as wide as the terminal is.

    In a narrow terminal first titles and then texts are broken into lines. Where that is not
    enough, the columns stand in several tables below each other, each of which begins with the
    first `keys` columns. left: the columns of text, which may be broken at spaces; the others hold
    numbers, which are not broken. codecs: the columns in which codecs may be broken after commas,
    too; those of other columns are where even the first columns need it. Cells are no markup.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    keys: int = 1
    codecs: Collection[int] = ()
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        room = options.max_width - self.indent
        for number, part in enumerate(self._parts(room)):
            widths = _allot(part, room)
            of_part = list(zip(part, widths, strict=True))
            titles = [_break(column.title, _IN_TITLE, width) for column, width in of_part]
            shown = [("", "")] * (number > 0) + [(line, "bold") for line in _row(titles, of_part)]
            rule = "-" if options.ascii_only else "─"
            shown.append((_GAP.join(rule * width for width in widths), ""))
            for row in range(len(self.rows)):
                cells = [column.lines(row, width) for column, width in of_part]
                shown += [(line, "") for line in _row(cells, of_part)]
            for line, style in shown:
                yield Text(
                    line and " " * self.indent + line, style, no_wrap=True, overflow="ignore"
                )

    def _parts(self, width: int) -> list[list[_Column]]:
        """The columns of each table."""
        columns = [
            _Column(
                title,
                [printable(row[i]) for row in self.rows],
                i in self.left,
                _IN_CODEC if i in self.codecs else _IN_TEXT,
            )
            for i, title in enumerate(self.titles)
        ]
        keys, others = columns[: self.keys], columns[self.keys :]
        parts = [[*keys, *others[:1]]]
        for column in others[1:]:
            wider = [*parts[-1], column]
            if sum(one.least for one in wider) <= _room(wider, width):
                parts[-1] = wider
            else:
                parts.append([*keys, column])
        return parts


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]
    is_text: bool
    end_of_line: re.Pattern[str]

    @cached_property
    def widths(self) -> list[int]:
        """Those at which nothing is broken, the title alone, texts too, and codecs in any column.
        Numbers are not broken."""
        widest = _longest(self.cells)
        title = _longest(_IN_TITLE.split(self.title))
        whole, below_title = max(_width(self.title), widest), max(title, widest)
        if not self.is_text:
            return [whole, below_title, below_title, below_title]
        readable = _READABLE if widest > 2 * _READABLE else 0
        in_texts, in_codecs = (
            _longest(piece for cell in self.cells for piece in places.split(cell))
            for places in (self.end_of_line, _IN_CODEC)
        )
        return [whole, below_title, max(title, readable, in_texts), max(title, in_codecs)]

    @property
    def least(self) -> int:
        return self.widths[2]

    def lines(self, row: int, width: int) -> list[str]:
        places = self.end_of_line if width >= self.least else _IN_CODEC
        return _break(self.cells[row], places, width)


def _room(columns: Sequence[_Column], width: int) -> int:
    return width - len(_GAP) * (len(columns) - 1)


def _allot(columns: Sequence[_Column], width: int) -> list[int]:
    """The width of each column. Titles are broken before texts are."""
    whole, *narrower = zip(*(column.widths for column in columns), strict=True)
    widths = list(whole)
    for least in narrower:
        while sum(widths) > _room(columns, width):
            loose = [i for i in range(len(widths)) if widths[i] > least[i]]
            if not loose:
                break
            widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def _row(cells: Sequence[list[str]], columns: Sequence[tuple[_Column, int]]) -> Iterator[str]:
    """The lines of a row from those of its cells."""
    for pieces in zip_longest(*cells, fillvalue=""):
        padded = [
            piece + pad if column.is_text else pad + piece
            for piece, (column, width) in zip(pieces, columns, strict=True)
            for pad in [" " * (width - _width(piece))]
        ]
        yield _GAP.join(padded).rstrip()


def _break(text: str, places: re.Pattern[str], width: int) -> list[str]:
    """Lines of at most `width`, unless a piece is longer."""
    first, *rest = places.split(text)
    lines = [first]
    for space, piece in zip(rest[::2], rest[1::2], strict=True):
        longer = lines[-1] + space + piece
        if _width(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    return lines


def _longest(texts: Iterable[str]) -> int:
    return max(map(_width, texts), default=0)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
