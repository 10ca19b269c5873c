"""The options of parameter groups, which workers send to the servers as JSON.

A worker's scheduler sets `lr` in its own groups. The next push after a change carries all options
that are numbers, strings, truth values, or lists of these. So a schedule runs on the workers alone.
(A schedule on the servers was refused: it would have to count versions, and a schedule that follows
the loss cannot run there.)
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import torch

from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import Bytes
from gradwire.torch.records.parameters import Options, options_of


def encode_options(groups: list[Options]) -> Bytes:
    plain: list[Options] = []
    for options in options_of(groups):
        plain.append({})
        for key, value in sorted(options.items()):
            with contextlib.suppress(TypeError):
                plain[-1][key] = _plain(value)
    return np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)


def apply_options(groups: list[Options], options: list[Options]) -> None:
    """Writes the options into the groups, converted to the types that the groups have."""
    for group, new in zip(groups, options, strict=True):
        for key, value in new.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value


def choose_options(
    latest: dict[int, bytes], taken: list[int], strict: bool
) -> list[Options] | None:
    """The options of the lowest rank whose push is in the version; None if no worker sent any.

    `latest`: what each worker sent last. `taken`: the workers whose push is in the version.
    `strict`: no worker is ahead of another, so their options must be equal. Raises
    PeerMismatchError where they are not.
    """
    ranks = [rank for rank in taken if rank in latest]
    if not ranks:
        return None
    first = ranks[0]
    chosen: list[Options] = json.loads(latest[first])
    for rank in ranks[1:] if strict else ():
        if latest[rank] != latest[first]:
            raise PeerMismatchError(
                f"ranks {first} and {rank} differ in their parameter groups: "
                f"{_difference(chosen, json.loads(latest[rank]))}",
                (first, rank),
            )
    return chosen


def _difference(a: list[Options], b: list[Options]) -> str:
    """The first option in which two lists of groups differ, as text."""
    for place, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"{key} of group {place} is {mine.get(key)} and {theirs.get(key)}"
    return f"{len(a)} and {len(b)} groups"


def _plain(value: Any) -> Any:
    """The value as JSON holds it. Raises TypeError for a value of another type."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not sent")
