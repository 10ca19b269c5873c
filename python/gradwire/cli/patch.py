"""``gradwire patch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gradwire.cli.delta import CHECKPOINT_HELP, read_views
from gradwire.cli.output import (
    ForceOption,
    JsonOption,
    Outputs,
    ThreadsOption,
    errors_name,
    print_json,
    report_beside,
    say,
    track,
    warn,
)
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.update import read_update

_OUTPUT_HELP = "Write the result to this .safetensors file, and leave OLD as it is."


def patch(
    old: Annotated[Path, Argument(metavar="OLD", help=CHECKPOINT_HELP)],
    file: Annotated[Path, Argument(metavar="DELTA", help="What `gradwire delta` wrote.")],
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT_HELP)] = None,
    threads: ThreadsOption = 1,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Apply a delta to a checkpoint, in place.

    OLD is checked first: if it is not the checkpoint that the delta was made for, nothing is
    changed. Where tensors appear, vanish or change their shape, a folder gets one new file.
    """
    with errors_name(file):
        update = read_update(file.read_bytes(), str(file))
    read_views(old, threads)
    checkpoint = Checkpoint(old, threads)
    target = old
    if output is not None:
        target = Outputs(output, 1, force).claim(old, _name_of_file, file)
    with errors_name(old), checkpoint.alone():
        checkpoint.check(update, writes=output is None)
        if output is None:
            try:
                checkpoint.apply(update, track("patch"))
            except BaseException:  # an interrupt, too
                if checkpoint.version is None:
                    warn(f"{old} is neither the old checkpoint nor the new one now: copy one anew")
                raise
            checkpoint.forget()
        else:
            checkpoint.write_copy(update, target, track("patch"))
    report = {
        "old": str(old),
        "delta": str(file),
        "output": str(target),
        "tensors": len(update.entries),
        "changed": update.changed,
    }
    with report_beside(target):
        if as_json:
            print_json(report)
        else:
            say(f"{old} -> {target}: tensors: {len(update.entries)}, changed: {update.changed}")


def _name_of_file(name: str) -> str:
    """Of a checkpoint with this name, which may be a folder."""
    return f"{name.removesuffix('.safetensors')}.safetensors"
