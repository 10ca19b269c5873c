"""The typer app. Each command's module is imported only when that command runs.

So ``gradwire --help`` neither loads PyTorch nor anything else a single command needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# Names, and their descriptions in `gradwire --help`. Command x is the function gradwire.cli.x.x.
COMMANDS = {
    "codecs": "List the codecs and their parameters.",
    "compress": "Compress .npy and .safetensors files.",
    "decompress": "Restore what compress wrote.",
    "inspect": "Show what is in a frame, a packet or a compressed file.",
    "bench": "Measure encode and decode_add next to memcpy.",
    "train": "Train in several processes behind a slow link, once for each codec.",
    "info": "Show version, SIMD targets, CPU and what was found installed.",
}

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class DeferredCommand(TyperCommand):
    """A command whose module is loaded when the command is chosen."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        module = import_module(f"gradwire.cli.{self.name}")
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        function = getattr(module, str(self.name))
        single.command(self.name, help=_unwrap(function), context_settings=_HELP_OPTIONS)(function)
        return typer.main.get_command(single).make_context(info_name, args, parent, **extra)


def _unwrap(function: Callable[..., object]) -> str:
    """The docstring with each paragraph on one line, for the terminal's width to break."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


class DeferredGroup(TyperGroup):
    """Lists COMMANDS in their order and makes a DeferredCommand of each."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return DeferredCommand(name=cmd_name, callback=None, help=COMMANDS[cmd_name])


app = typer.Typer(
    cls=DeferredGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=_HELP_OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import gradwire

        print(f"gradwire {gradwire.__version__}")
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
