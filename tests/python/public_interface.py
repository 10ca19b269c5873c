"""The public names and the help of every command, as text. Run it to write `public_interface.txt`.

A change of that file is a change for users: it belongs into the changelog.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import gradwire
import gradwire.torch
import gradwire.weights
from cli_runner import run

FILE = Path(__file__).with_suffix(".txt")
COMMANDS = (
    *("bench", "codecs", "compress", "decompress", "delta", "evaluate", "fold", "info"),
    *("inspect", "patch", "plan", "probe", "report", "simulate", "train"),
)


def describe() -> Iterator[str]:
    for module in (gradwire, gradwire.torch, gradwire.weights):
        yield f"# {module.__name__}\n"
        yield from (f"{name}\n" for name in sorted(module.__all__))
    for command in ("", *COMMANDS):
        yield f"\n# gradwire {command}\n"
        arguments = (command, "--help") if command else ("--help",)
        with mock.patch.dict(os.environ, {"COLUMNS": "79"}):  # below 80 there are no frames
            yield from (line.rstrip() + "\n" for line in run(*arguments).out.splitlines())


if __name__ == "__main__":
    FILE.write_text("".join(describe()), encoding="utf-8")
