"""Checkpoints in files that a crash does not spoil."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import IO, Any, cast

import torch

from gradwire.files import replace_file

_OLD_NAMES = {"path": "f", "state": "obj"}  # in their old order


def _takes_the_old_order(save: Callable[..., None]) -> Callable[..., None]:
    """Lets `save(path, state)`, the order of the first versions, do for a release what
    `save(state, path)` does."""

    @wraps(save)
    def either(*arguments: Any, **named: Any) -> None:
        are_swapped = len(arguments) == 2 and _is_path(arguments[0]) and not _is_path(arguments[1])
        if not are_swapped and not _OLD_NAMES.keys() & named.keys():
            return save(*arguments, **named)
        warnings.warn(
            "the order save(path, state) will end: gradwire.torch.save takes the state first, as "
            "torch.save does",
            DeprecationWarning,
            stacklevel=2,
        )
        given = dict(zip(_OLD_NAMES, arguments, strict=False)) | named
        return save(**{_OLD_NAMES.get(name, name): value for name, value in given.items()})

    return either


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


@_takes_the_old_order
def save(obj: Any, f: str | os.PathLike[str]) -> None:
    """`torch.save(obj, f)`, but whole or not at all.

    The file is written beside `f` under another name, flushed to the disk and renamed. If the
    process is killed at any byte, or the disk is full, or the machine stops, `f` holds what it held
    before, or all of `obj`. A kill leaves the other file, `.NAME.*`, which the next save removes.

    `obj`: what `torch.save` takes, such as
    `{"model": model.state_dict(), "gradwire": state.state_dict()}`;
    `torch.load(f, weights_only=True)` reads it. Each rank that keeps residuals saves a file of its
    own. Raises OSError that names `f`, and TypeError if it is no path: an open file can't be
    replaced.
    """
    if not _is_path(f):
        raise TypeError(
            f"gradwire.torch.save needs a path, whose file it replaces, not {type(f).__name__}: "
            "torch.save writes to an open file"
        )
    with replace_file(Path(f), durable=True) as file:
        torch.save(obj, cast(IO[bytes], file))
