"""How the commands print JSON, tables and errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import gradwire
from gradwire import GradwireError
from gradwire._core import codec_names
from gradwire.errors import UserError, printable
from gradwire.table import Table

if TYPE_CHECKING:
    from rich.console import Console


ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing files.")]
ThreadsOption = Annotated[
    int, typer.Option(min=1, max=256, help="Threads; the bytes do not depend on it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]

# Wide enough for every table; a pipe or a file has no width of its own.
_WIDTH_WITHOUT_TERMINAL = 160


def check_codec(text: str) -> None:
    """Raises BadParameter for a wrong --codec, before anything is done."""
    try:
        gradwire.max_encoded_size(text, 0)
    except gradwire.GradwireError as error:
        raise typer.BadParameter(str(error), param_hint="--codec") from None


# What a shell offers when somebody asks it to complete a value.


def complete_codec(incomplete: str) -> list[str]:
    names = [codec["name"] for codec in (*gradwire.codecs(), *codec_names())]
    return [name for name in names if name.startswith(incomplete)]


def complete_exchange(incomplete: str) -> list[str]:
    names = [info["name"] for info in gradwire.exchanges()]
    return [name for name in names if name.startswith(incomplete)]


def print_json(document: object) -> None:
    """Prints `document` to stdout. NaN and Inf are refused, as they are not JSON."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    left: Collection[int] = (0,),
    keys: int = 1,
) -> None:
    """Prints a Table; an empty line stands before and after it."""
    table = Table(columns, [[str(cell) for cell in row] for row in rows], left, keys, indent=1)
    print()
    terminal().print(table, soft_wrap=True)
    print()


def terminal(*, is_on_stderr: bool = False) -> Console:
    """stdout or stderr: as wide as the terminal, or as COLUMNS says."""
    from rich.console import Console

    console = Console(stderr=is_on_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def track(what: str) -> Callable[[Sequence[Any]], Iterator[Any]]:
    """A function that passes a list on, and shows on a terminal how far it is: on stderr."""

    def follow(items: Sequence[Any]) -> Iterator[Any]:
        console = terminal(is_on_stderr=True)
        if not console.is_terminal:
            return iter(items)
        from rich.progress import track

        return iter(track(items, what, console=console, transient=True))

    return follow


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


_OUTPUT_HELP = (
    "Where to write: a file, or a directory if there are several inputs. Default: beside each "
    "input, with .gw added to its name or taken from it."
)
OutputOption = Annotated[Path | None, Option("--output", "-o", help=_OUTPUT_HELP)]


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Errors in the block that name no file are about `path`, and say so."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    except MemoryError:
        raise UserError(f"{path}: out of memory") from None
    except (UserError, GradwireError) as error:
        named = str(error).startswith(f"{path}: ")
        raise UserError(str(error) if named else f"{path}: {error}") from None


def report_beside(target: Path) -> AbstractContextManager[object]:
    """What is printed in the block goes to stderr if `target` is stdout."""
    # Without a stdout, nothing is printed.
    if sys.stdout and target.exists() and os.path.samestat(target.stat(), os.fstat(1)):
        return redirect_stdout(sys.stderr)
    return nullcontext()


class Outputs:
    """Where the results of a command's inputs go.

    output: the user's --output. None puts each result beside its source. A directory takes all
    results. A file is valid with one input alone.
    """

    def __init__(self, output: Path | None, inputs: int, force: bool) -> None:
        self._output = output
        self._inputs = inputs
        self._force = force
        self._sources: dict[Path, Path] = {}

    def claim(self, source: Path, rename: Callable[[str], str], *others: Path) -> Path:
        """Returns the file to write for `source`: `rename` of its name, unless the user named it.
        The name of `.` is that of the folder.

        Raises UserError if the directory does not exist, if the file is an input (`source` or one
        of `others`) or would be one of the tensors' files in an input, if it or a symbolic link
        exists and is not to be overwritten, or if another input already claimed it.
        """
        named = source.resolve() if source.name in ("", "..") else source
        if not named.name and (self._output is None or self._output.is_dir()):
            raise UserError(f"{source} gives the result no name: name it with --output")
        name = rename(named.name)
        if self._output is None:
            target = named.parent / name
        elif self._output.is_dir():
            target = self._output / name
        elif self._inputs > 1:
            raise UserError(
                f"--output {self._output}: with {self._inputs} inputs it must be a directory"
            )
        else:
            target = self._output
        if not target.parent.is_dir():
            raise UserError(f"{target.parent}: no such directory")
        place = Path(os.path.realpath(target))
        inputs = {Path(os.path.realpath(one)) for one in (source, *others)}
        if place in inputs:
            raise UserError(f"{target} is an input, and is not overwritten: name another file")
        if place.parent in inputs and place.suffix == ".safetensors":
            raise UserError(
                f"{target} would be one of the files of {target.parent}, an input: name another "
                "folder"
            )
        other = self._sources.setdefault(place, source)
        if other is not source:
            raise UserError(f"{other} and {source} would both be written to {target}")
        if os.path.lexists(target) and not self._force:
            what = "exists" if target.exists() else f"is a symbolic link to {place}"
            does = "overwrites it" if target.exists() else "writes the file that it names"
            raise UserError(f"{target} {what}; --force {does}")
        return target
