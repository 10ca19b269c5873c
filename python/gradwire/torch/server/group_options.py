"""What workers tell the servers beside gradients: the options of parameter groups, as JSON, and
which tensors have no gradient.

A worker's scheduler sets `lr` in its own groups. The next push after a change carries all options
that are numbers, strings, truth values, or lists of these. So a schedule runs on the workers alone.
(A schedule on the servers was refused: it would have to count versions, and a schedule that follows
the loss cannot run there.)
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradwire.errors import warn_user
from gradwire.torch.errors import PeerMismatchError, WorkerDiffersWarning
from gradwire.torch.network.engine import pack_places, packed_size, unpack_places
from gradwire.torch.network.transport import Bytes
from gradwire.torch.parameters import Options, plain_options, plain_value

_VERSION = struct.Struct("<Q")
VERSION_BYTES = _VERSION.size


def encode_options(groups: list[Options]) -> bytes:
    return json.dumps(plain_options(groups)).encode()


def version_message(version: int, more: bytes = b"") -> Bytes:
    """more: options that hold from the push for this version on, or what else it is about."""
    return np.frombuffer(_VERSION.pack(version) + more, dtype=np.uint8)


def read_version(message: Bytes) -> int:
    """The version with which a message begins. Raises ValueError if it is too short for that."""
    if message.size < VERSION_BYTES:
        raise ValueError(
            f"it has {message.size} bytes, and begins with a version of {VERSION_BYTES}"
        )
    (version,) = _VERSION.unpack_from(message)
    return int(version)


def read_options(message: Bytes, groups: Sequence[Options]) -> list[Options]:
    """The options after the version, which `apply_options` can write into the groups. Raises
    ValueError for any other bytes."""
    try:
        options: list[Options] = json.loads(message[_VERSION.size :].tobytes())
        if not isinstance(options, list) or not all(isinstance(group, dict) for group in options):
            raise ValueError("no list of groups")
        for group in options:
            for value in group.values():
                plain_value(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it holds no options of parameter groups as JSON ({error})") from error
    if len(options) != len(groups):
        raise ValueError(f"it has options of {len(options)} parameter groups, not {len(groups)}")
    for place, (group, new) in enumerate(zip(groups, options, strict=True)):
        for key, value in new.items():
            if key in ("params", "param_names") or (key in group and not _fits(group[key], value)):
                raise ValueError(f"it says that {key} of group {place} is {value!r}")
    return options


def _fits(old: Any, new: Any) -> bool:
    """Whether an option may become `new`, as it came in a message."""
    if isinstance(old, tuple | list):
        if not isinstance(new, list) or (isinstance(old, tuple) and len(new) != len(old)):
            return False
        return all(_fits(*pair) for pair in zip(old, new, strict=False))
    if isinstance(old, str):
        return new is None or isinstance(new, str)
    if isinstance(old, bool):
        return new is None or isinstance(new, bool | int)
    return not isinstance(old, int | float | torch.Tensor) or isinstance(new, int | float)


def apply_options(groups: list[Options], options: list[Options]) -> None:
    """Writes the options into the groups, converted to the types that the groups have."""
    for group, new in zip(groups, options, strict=True):
        for key, value in new.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value


class OptionsOfWorkers:
    """What the workers sent.

    Where the options of two workers for a version differ, that is an error; once another process
    has joined, whose schedule must not end the training of all, a warning.
    """

    def __init__(self, may_differ: bool) -> None:
        """may_differ: workers may be ahead of each other, and nothing is compared."""
        self._may_differ = may_differ
        self._sent: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)  # by rank
        self._joined: dict[int, int] = {}  # by rank: how many had joined when it did

    def take(self, rank: int, message: Bytes) -> None:
        version = read_version(message)
        self._sent[rank].append((version, message[_VERSION.size :].tobytes()))

    def replace(self, rank: int) -> None:
        """Another process has the place of this rank from now on."""
        self._sent.pop(rank, None)
        self._joined[rank] = 1 + max(self._joined.values(), default=0)

    def choose(self, version: int, taken: Sequence[int]) -> list[Options] | None:
        """The options of the worker that has taken part for the longest time, and of those the
        lowest rank; None if no worker sent any.

        `taken`: the workers whose push is in the version. Raises PeerMismatchError where the
        options must be equal and are not.
        """
        latest = {rank: self._latest(rank, version) for rank in taken if rank in self._sent}
        if not latest:
            return None
        first = min(latest, key=lambda rank: (self._joined.get(rank, 0), rank))
        chosen: list[Options] = json.loads(latest[first])
        for rank, options in latest.items():
            if options != latest[first] and not self._may_differ:
                self._report(first, rank, _difference(chosen, json.loads(options)))
        return chosen

    def _report(self, first: int, rank: int, difference: str) -> None:
        what = f"ranks {first} and {rank} differ in their parameter groups: {difference}"
        if not self._joined:
            raise PeerMismatchError(what, (first, rank))
        self._may_differ = True  # it warns once
        warn_user(
            f"{what}. Those of rank {first} count, which has taken part for longer. A process that "
            "joins sets its schedulers by optimizer.version, see docs/reference/servers.md",
            WorkerDiffersWarning,
        )

    def _latest(self, rank: int, version: int) -> bytes:
        """The options of the rank for this version. A worker may have sent those of later ones."""
        sent = self._sent[rank]
        while len(sent) > 1 and sent[1][0] <= version:
            del sent[0]
        return sent[0][1]


def _difference(a: list[Options], b: list[Options]) -> str:
    """The first option in which two lists of groups differ, as text."""
    for place, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"{key} of group {place} is {mine.get(key)} and {theirs.get(key)}"
    return f"{len(a)} and {len(b)} groups"


def unused_size(tensors: int) -> int:
    """Bytes of the message for a part of so many tensors."""
    return VERSION_BYTES + packed_size(tensors)


def unused_message(version: int, unused: Sequence[int], tensors: int) -> Bytes:
    """unused: the places of those that the push for this version has no gradient of."""
    return version_message(version, pack_places(unused, tensors))


def read_unused(message: Bytes, tensors: int) -> tuple[int, set[int]]:
    """The version and the places. Raises ValueError for a message of another size."""
    if message.size != unused_size(tensors):
        raise ValueError(
            f"it has {message.size} bytes; a version and a bit for each of {tensors} tensors have "
            f"{unused_size(tensors)}"
        )
    return read_version(message), set(unpack_places(message[VERSION_BYTES:], tensors))


class UnusedOfWorkers:
    """What the workers said of one part."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._said: dict[tuple[int, int], set[int]] = {}  # places, by rank and version

    def take(self, rank: int, message: Bytes) -> None:
        """Raises ValueError for a message of another size."""
        version, places = read_unused(message, self._tensors)
        self._said[rank, version] = places & self._said.get((rank, version), places)

    def replace(self, rank: int) -> None:
        """Another process has the place of this rank from now on."""
        self._said = {key: places for key, places in self._said.items() if key[0] != rank}

    def everywhere(self, version: int, taken: Sequence[int]) -> list[int]:
        """The places of the tensors that no push of this version has a gradient of. `taken`: the
        workers whose push is in it. What was said of earlier versions is forgotten."""
        self._said = {key: places for key, places in self._said.items() if key[1] >= version}
        lacking = [self._said.get((rank, version), set()) for rank in taken]
        return sorted(set.intersection(*lacking)) if lacking else []
