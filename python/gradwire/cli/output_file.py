"""Where a command writes, and writing there without ever leaving half a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from gradwire.cli.output import CommandError


def claim_output(source: Path, output: Path | None, name: str, inputs: int, force: bool) -> Path:
    """Returns the file to write for `source`.

    `output` is what the user gave: nothing (then `name` beside the source), a directory (then
    `name` in it), or a file, which only a lone input may have. CommandError if the directory is
    not there, or the file is, unless `force`.
    """
    if output is None:
        target = source.with_name(name)
    elif output.is_dir():
        target = output / name
    elif inputs > 1:
        raise CommandError(f"--output {output}: with {inputs} inputs it must be a directory")
    else:
        target = output
    if not target.parent.is_dir():
        raise CommandError(f"{target.parent}: no such directory")
    if target.exists() and not force:
        raise CommandError(f"{target} exists; --force overwrites it")
    return target


def write_file(target: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Writes `parts` to `target`, which appears whole or not at all. Returns its size."""

    def write(file: BinaryIO) -> None:
        for part in parts:
            file.write(part)

    return replace_file(target, write)


def replace_file(target: Path, write: Callable[[BinaryIO], None]) -> int:
    """Lets `write` fill a file beside `target`, then puts it in its place. Returns its size."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        size = temporary.stat().st_size
        # mkstemp makes the file private; a new file of the user's gets what the umask leaves.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size
