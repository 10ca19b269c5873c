"""What is given as a saved state and is none, in words that say what it is."""

from __future__ import annotations

import os
from typing import Any

_WHOLE = ("residuals", "rank", "world_size")  # entries that every state has


def require_state(state: Any) -> None:
    """Raises TypeError for what is no dict, and ValueError for a dict that is no state of gradwire,
    or lacks a part."""
    require_dict(state)
    version = state.get("format")
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"not a gradwire state: its format is {version!r}{_say_kind(state)}")
    for name in _WHOLE:
        if name not in state:
            raise ValueError(f"the gradwire state is not whole: it has no {name}")


def own_part_of(state: Any) -> Any:
    """What gradwire keeps in the state of a ServerOptimizer, beside the optimizer's entries. Raises
    the same errors."""
    require_dict(state)
    if "gradwire" not in state:
        require_state(state)
        source = state.get("source", "GradwireState")
        raise ValueError(f"the state is that of a {source}, this is a ServerOptimizer")
    require_state(state["gradwire"])
    for name in ("state", "param_groups"):
        if name not in state:
            raise ValueError(f"the ServerOptimizer's state is not whole: it has no {name}")
    return state["gradwire"]


def require_dict(state: Any) -> None:
    """Raises TypeError."""
    wanted = "the dict that state_dict() returned is needed"
    if isinstance(state, str | os.PathLike):
        name = os.fspath(state)
        raise TypeError(
            f"the state is {name!r}, the name of a file; {wanted}: torch.load({name!r}, "
            "weights_only=True) reads it from there"
        )
    if not isinstance(state, dict):
        found = "None" if state is None else f"of the type {type(state).__name__}"
        raise TypeError(f"the state is {found}; {wanted}")


def _say_kind(state: dict[Any, Any]) -> str:
    if {"state", "param_groups"} <= state.keys() and "gradwire" not in state:
        return ". It is an optimizer's own: load what state_dict() of gradwire's object returned"
    for key, value in state.items():
        if isinstance(value, dict) and "format" in value:
            return f". Its entry {key!r} is one: load that"
    return ""
