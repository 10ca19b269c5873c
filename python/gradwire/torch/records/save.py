"""Checkpoints in files that a crash does not spoil."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, cast

import torch

from gradwire.files import replace_file


def save(path: str | os.PathLike[str], state: Any) -> None:
    """`torch.save(state, path)`, but whole or not at all.

    The file is written beside `path` under another name, flushed to the disk and renamed. If the
    process is killed at any byte, or the disk is full, or the machine stops, `path` holds what it
    held before, or all of `state`. A kill leaves the other file, `.NAME.*`, which the next save
    removes.

    `state`: what `torch.save` takes, such as
    `{"model": model.state_dict(), "gradwire": state.state_dict()}`;
    `torch.load(path, weights_only=True)` reads it. Each rank that keeps residuals saves a file of
    its own. Raises OSError that names `path`.
    """
    with replace_file(Path(path), durable=True) as file:
        torch.save(state, cast(IO[bytes], file))
