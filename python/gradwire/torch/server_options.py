"""The options of parameter groups on their way from the workers to the servers, as JSON.

A worker's scheduler sets `lr` in its own groups. Whatever is plain in them travels with the next
push after it changed: so a schedule runs on the workers alone, and need not be known here.
(Refused: the same schedule on the servers; it would have to count versions, and a schedule that
follows the loss could not run there.)
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.wire import Bytes

_NOT_OPTIONS = ("params", "param_names")
Group = dict[str, Any]


def encode_options(groups: list[Group]) -> Bytes:
    plain = [
        {
            key: _plain(value)
            for key, value in sorted(group.items())
            if key not in _NOT_OPTIONS and _is_plain(value)
        }
        for group in groups
    ]
    return np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)


def decode_options(payload: Bytes) -> list[Group]:
    options: list[Group] = json.loads(payload.tobytes())
    return options


def apply_options(groups: list[Group], options: list[Group]) -> None:
    """Takes the options over, in the types that the groups have."""
    for group, new in zip(groups, options, strict=True):
        for key, value in new.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value


def choose_options(latest: dict[int, Bytes], taken: list[int], strict: bool) -> list[Group] | None:
    """Those of the lowest rank whose push is in the version.

    strict: no worker is ahead of another, so that they must agree. Raises PeerMismatchError.
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


def difference(a: list[Group], b: list[Group]) -> str:
    """The first option in which two differ, for people."""
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
