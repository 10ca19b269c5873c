"""The typer app. A command's module imports what only that command needs when it runs, so
``gradwire --help`` loads neither PyTorch nor safetensors."""

from __future__ import annotations

import inspect as python_inspect
from typing import Annotated

import typer

from gradwire import __version__
from gradwire.cli.bench import bench
from gradwire.cli.codecs import codecs
from gradwire.cli.compress import compress
from gradwire.cli.decompress import decompress
from gradwire.cli.info import info
from gradwire.cli.inspect import inspect
from gradwire.cli.train import train

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=_HELP_OPTIONS,
)

COMMANDS = {
    command.__name__: command
    for command in (codecs, compress, decompress, inspect, bench, train, info)
}
for name, command in COMMANDS.items():
    # Each paragraph on one line, for the terminal's width to break.
    paragraphs = (python_inspect.getdoc(command) or "").split("\n\n")
    described = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(name, help=described, context_settings=_HELP_OPTIONS)(command)


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
