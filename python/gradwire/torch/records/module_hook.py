"""Hooks on the user's module and optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class ModuleHook:
    """Calls a method, and does not keep its object alive. A copy of the module (deepcopy, pickle,
    torch.save) has the hook without effect: the object knows the module itself alone."""

    def __init__(self, method: Callable[..., None] | None = None, *arguments: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, *given: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._arguments, *given)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Removes them and empties the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
