"""The options of parameter groups, which workers send to the servers as JSON.

A worker's scheduler sets `lr` in its own groups. The next push after a change carries all options
that are numbers, strings, truth values, or lists of these. So a schedule runs on the workers alone.
(Not used: the same schedule on the servers. It would have to count versions, and a schedule that
follows the loss cannot run there.)
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from gradwire.torch.link.errors import PeerMismatchError
from gradwire.torch.link.wire import Bytes
from gradwire.torch.records.parameters import Options, options_of


def encode_options(groups: list[Options]) -> Bytes:
    plain = [
        {key: _plain(value) for key, value in sorted(options.items()) if _is_plain(value)}
        for options in options_of(groups)
    ]
    return np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)


def decode_options(payload: Bytes) -> list[Options]:
    options: list[Options] = json.loads(payload.tobytes())
    return options


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
    latest: dict[int, Bytes], taken: list[int], strict: bool
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
    chosen = decode_options(latest[first])
    for rank in ranks[1:] if strict else ():
        if latest[rank].tobytes() != latest[first].tobytes():
            other = difference(chosen, decode_options(latest[rank]))
            raise PeerMismatchError(
                f"ranks {first} and {rank} differ in their parameter groups: {other}",
                (first, rank),
            )
    return chosen


def difference(a: list[Options], b: list[Options]) -> str:
    """The first option in which two lists of groups differ, as text."""
    for place, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"{key} of group {place} is {mine.get(key)} and {theirs.get(key)}"
    return f"{len(a)} and {len(b)} groups"


def _is_plain(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    if isinstance(value, tuple | list):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value
