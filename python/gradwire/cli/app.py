"""The typer app, which imports a command's module when somebody asks for the command."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand, TyperGroup

from gradwire import __version__
from gradwire.errors import UserError, missing

LIBRARY_COMMANDS = ("codecs", "compress", "decompress", "delta", "fold", "info", "inspect", "patch")
LAB_COMMANDS = ("bench", "evaluate", "plan", "probe", "report", "simulate", "train")
_FRAMED = 80  # columns
_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


@cache
def _installed() -> dict[str, EntryPoint]:
    """The commands of other distributions, such as gradwire-lab."""
    return {point.name: point for point in entry_points(group="gradwire.commands")}


def list_commands() -> tuple[str, ...]:
    """The names of the library's commands, then of those that other distributions add."""
    return (*LIBRARY_COMMANDS, *sorted(_installed()))


def function_of(command: str) -> Callable[..., object]:
    """The function that is the command; its docstring is the description.

    Raises:
        UserError: It is a command of gradwire-lab, which is not installed.
    """
    if command in LIBRARY_COMMANDS:
        function = getattr(import_module(f"gradwire.cli.{command}"), command)
    elif command in _installed():
        function = _installed()[command].load()
    else:
        lacking = missing("gradwire-lab", "./lab")
        raise UserError(f"`gradwire {command}` needs the laboratory: {lacking}")
    return cast(Callable[..., object], function)


def _markup() -> Literal["rich"] | None:
    """None: no frames, in which typer cuts options and defaults if the terminal is narrow."""
    return "rich" if shutil.get_terminal_size().columns >= _FRAMED else None


def make_command(name: str) -> Any:
    """The command as typer runs it."""
    function = function_of(name)
    # Each paragraph becomes one line, which is broken at the terminal's width.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    described = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    alone = typer.Typer(add_completion=False, rich_markup_mode=_markup())
    alone.command(name, cls=_Command, help=described, context_settings=_HELP_OPTIONS)(function)
    return typer.main.get_command(alone)


class _Command(TyperCommand):
    """Refuses an option that is given twice and takes one value, of which typer takes the last, and
    an empty path, which Path takes for the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, given = self.make_parser(ctx).parse_args([*args])  # as the line has them
        for one in cast(list[Any], self.params):
            takes_one = not getattr(one, "multiple", False) and not getattr(one, "is_flag", False)
            count = given.count(one)
            if takes_one and count > 1 and not ctx.resilient_parsing:  # while a shell completes
                raise typer.BadParameter(f"it is given {count} times and takes one value", ctx, one)
        rest = super().parse_args(ctx, args)
        for one in cast(list[Any], self.params):
            read = zip(
                _listed(values.get(one.name)), _listed(ctx.params.get(one.name)), strict=False
            )
            is_empty = any(text == "" and isinstance(found, Path) for text, found in read)
            if is_empty and not ctx.resilient_parsing:
                raise typer.BadParameter("the path is empty; '.' is the current folder", ctx, one)
        return rest


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(list_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # For a wrong name, typer looks for a similar one among `commands`.
        known = cmd_name in (*LIBRARY_COMMANDS, *LAB_COMMANDS, *_installed())
        for name in (cmd_name,) if known else list_commands():
            self.commands[name] = make_command(name)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=_markup(),
    pretty_exceptions_enable=False,
    context_settings=_HELP_OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def gradwire(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compresses what distributed training sends: gradients, model deltas, pseudo-gradients."""
