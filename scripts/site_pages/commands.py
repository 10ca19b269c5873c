"""The page of the command line's options, as Typer writes it."""

from __future__ import annotations

from typer.cli import get_docs_for_click

from gradwire.cli.app import LAB_COMMANDS, LIBRARY_COMMANDS, make_command
from make_man import EXIT_STATUS


def page() -> str:
    """All commands in Markdown."""
    commands = (*LIBRARY_COMMANDS, *LAB_COMMANDS)
    title = f"# Options of the commands\n\nExit status. {EXIT_STATUS}\n"
    return "\n".join([title, *map(_section, commands)])


def _section(name: str) -> str:
    command = make_command(name)
    context = command.context_class(command, info_name=f"gradwire {name}")
    return get_docs_for_click(obj=command, ctx=context, name=f"gradwire {name}", indent=1)
