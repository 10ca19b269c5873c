"""Finds parameters that each rank trains by itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from gradwire.errors import warn_user
from gradwire.torch.errors import UnsharedParameterWarning
from gradwire.torch.parameters import NamedTensor
from gradwire.torch.tensor_memory import mark_of

# The ids of the parameters that an object exchanges, which it keeps alive. (PyTorch swaps no tensor
# that has a weak reference, as it does where a DTensor is cast.)
_claimed: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()
_lock = threading.Lock()


def claim(tensors: Sequence[torch.Tensor], owner: object) -> None:
    """While `owner` lives, which has the tensors, it exchanges these parameters."""
    with _lock:
        _claimed[owner] = set(map(id, tensors))


class UnsharedWatch:
    """Warns, once, of parameters that no object of gradwire exchanges and that are written between
    steps: those of a second optimizer, which was not given.

    A parameter must have a gradient, and have been written between the last two pairs of looks. One
    write may be a load, and what has no gradient is an average of weights.
    """

    def __init__(self, owner: str) -> None:
        """owner: the class to name."""
        self._owner = owner
        self._marks: dict[str, tuple[int, int]] = {}
        self._written: set[str] = set()
        self._has_warned = False

    def look(self, others: Sequence[NamedTensor]) -> None:
        """At the beginning of a step. others: the model's, but for those that are exchanged."""
        if self._has_warned:
            return
        marks = {name: mark_of(t) for name, t in others if t.grad is not None and not _is_owned(t)}
        written = {name for name, mark in marks.items() if self._marks.get(name, mark) != mark}
        again = [name for name in marks if name in written & self._written]
        self._marks, self._written = marks, written
        if again:
            self._has_warned = True
            more = f" and {len(again) - 1} more" if again[1:] else ""
            warn_user(
                f"{again[0]}{more} changed between steps, but {self._owner} was not given the "
                "optimizer that changes it, so each rank trains its own. Exchange it, too: "
                "LocalSteps takes several optimizers in a list",
                UnsharedParameterWarning,
            )


def _is_owned(tensor: torch.Tensor) -> bool:
    with _lock:
        return any(id(tensor) in claimed for claimed in _claimed.values())
