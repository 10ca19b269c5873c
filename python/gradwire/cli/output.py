"""How the commands print JSON, tables and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any

import typer

import gradwire
from gradwire.printable import printable

ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]

# Wide enough for every table; a pipe or a file has no width of its own.
_WIDTH_WITHOUT_TERMINAL = 160


def check_codec(text: str) -> None:
    """Raises BadParameter for a wrong --codec, before anything is done."""
    try:
        gradwire.max_encoded_size(text, 0)
    except gradwire.GradwireError as error:
        raise typer.BadParameter(str(error), param_hint="--codec") from None


def print_json(document: object) -> None:
    """Prints `document` to stdout. NaN and Inf are refused, as they are not JSON."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], left: Container[int] = range(1)
) -> None:
    """Prints a table. The columns in `left` are text, the others numbers. Cells are no markup, and
    printable."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(
            name,
            justify="left" if index in left else "right",
            overflow="fold",
            no_wrap=index not in left,
        )
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL).print(table)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Prints a line `name  value` for each pair, with the values aligned."""
    lines = [(printable(name), printable(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


def say(text: str) -> None:
    """Prints lines of text in which names of files and tensors may stand."""
    print(printable(text, keep="\n"))


def warn(message: str) -> None:
    """Prints a message on stderr, so that --json stays one document."""
    print(f"gradwire: {printable(message, keep=chr(10))}", file=sys.stderr)


def human_bytes(size: int) -> str:
    """1536 -> "1.5 kB": powers of 1000."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5 or unit == "GB":
            return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")


def describe_compilation(build: dict[str, Any]) -> str:
    """How the compiled module was built, from the result of describe_build."""
    return f"{build['compiler']}, {build['build_type']}, {build['flags']}"


def significant(value: Any) -> str:
    """Three significant digits; a dash where there is no value."""
    return "-" if value is None else f"{value:.3g}"
