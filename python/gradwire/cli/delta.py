"""``gradwire delta``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gradwire.cli.output import (
    ForceOption,
    JsonOption,
    Outputs,
    ThreadsOption,
    errors_name,
    human_bytes,
    print_json,
    report_beside,
    say,
    track,
)
from gradwire.errors import UserError
from gradwire.files import replace_file
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.difference import make_update
from gradwire.weights.tensors import View
from gradwire.weights.update import Update, write_update

CHECKPOINT_HELP = "A .safetensors file, or a folder of such files."


def delta(
    old: Annotated[Path, Argument(metavar="OLD", help=CHECKPOINT_HELP)],
    new: Annotated[Path, Argument(metavar="NEW", help=f"The same later. {CHECKPOINT_HELP}")],
    output: Annotated[Path, Option("--output", "-o", help="The file to write.")],
    threads: ThreadsOption = 1,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write how one checkpoint becomes another.

    The delta is exact, whatever the bits, and small where few values change or change by little:
    gradwire patch OLD DELTA makes NEW of OLD, byte by byte if NEW is one file. Tensors may appear,
    vanish or change their shape.
    """
    target = Outputs(output, 1, force).claim(new, lambda name: f"{name}.delta", old)
    (before, old_head), (after, new_head) = read_views(old, threads), read_views(new, threads)
    with errors_name(new):
        update = make_update(before, after, Update(1, 0), threads, track("delta"))
        update.head = b"" if new_head == old_head else new_head
        update.removed = sorted(before.keys() - after.keys())
        pieces = write_update(update)
        with replace_file(target) as file:
            for piece in pieces:
                file.write(piece)
    report = {
        "old": str(old),
        "new": str(new),
        "output": str(target),
        "bytes": file.size,
        "tensors": len(update.entries),
        "values": update.numel,
        "changed": update.changed,
    }
    with report_beside(target):
        if as_json:
            print_json(report)
        else:
            share = update.changed / max(update.numel, 1)
            say(f"{old} -> {new}: {target}, {human_bytes(file.size)}, values changed: {share:.3g}")


def read_views(path: Path, threads: int) -> tuple[dict[str, View], bytes]:
    """The tensors of a checkpoint, which is not changed, and the first bytes of a file of them.
    Raises UserError where there is none."""
    with errors_name(path):
        checkpoint = Checkpoint(path, threads)
        found = checkpoint.views("c")
        if not found:
            raise UserError("no .safetensors file with tensors is there")
        return found, checkpoint.head(found)
