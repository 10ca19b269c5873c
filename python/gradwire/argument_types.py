"""Arguments that are not of the types that their annotations name."""

from __future__ import annotations

import operator
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import repeat
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

# What to call a class of another library.
_CLASSES = {
    "LossScaler": "a torch.amp.GradScaler",
    "Module": "a torch.nn.Module",
    "Optimizer": "a torch.optim.Optimizer",
    "PathLike": "a path",
    "ProcessGroup": "a process group of torch.distributed",
    "Store": "a store of torch.distributed, such as TCPStore(host, port),",
    "dtype": "a torch.dtype",
}
_OUTSIDE = -100  # what torch.distributed.new_group gives a rank that is not in the group


def check_types(owner: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError naming the first argument that does not fit its annotation.

    Numbers of other types than Python's fit where they convert without loss, a list where a tuple
    is meant, and anything where an annotation says nothing that can be checked here.

    Args:
        owner: The function, or the class of a record, that has the annotations.
        given: Arguments by their names.

    Returns:
        The arguments, with such numbers and texts as Python's own: what takes them, and the states
        and reports in which they are written, know those alone.
    """
    plain = {}
    for name, value in given.items():
        if not fits(owner, name, value):
            wanted = _say(_hints_of(owner)[name])
            raise TypeError(f"{name} is {_show(value)}; {wanted} is needed")
        plain[name] = _plain(value, _hints_of(owner).get(name, Any))
    return plain


def fits(owner: Any, name: str, value: Any) -> bool:
    """Whether the value fits the annotation of this argument, see check_types."""
    return _fits(value, _hints_of(owner).get(name, Any))


@cache
def _hints_of(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner)


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:  # which is a class
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in _NUMBERS:
        return _NUMBERS[hint](value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Callable:
        return callable(value)
    if origin in (tuple, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and (
            _fit(value, inner)
            if origin is tuple
            else all(_fits(entry, inner[0]) for entry in value)
        )
    if origin is Iterable:  # perhaps one that can be read once
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    kind = origin or hint
    if not isinstance(kind, type) or _is_unchecked_protocol(kind):
        return True
    is_outside = kind.__name__ == "ProcessGroup" and value.__class__ is int and value == _OUTSIDE
    return is_outside or isinstance(value, kind)


def _is_unchecked_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


def _fit(values: Sequence[Any], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is ...:
        return all(_fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_fits, values, hints))


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:  # a tensor has the method, whatever its dtype
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes | bytearray):
        return False  # which float() reads
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several values
        return False
    return True


_NUMBERS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: _is_whole,
    float: _is_number,
}


def _plain(value: Any, hint: Any) -> Any:
    """A value that fits, with Python's own numbers and texts."""
    origin, inner = get_origin(hint), get_args(hint)
    if value.__class__ in _PYTHONS:
        return value
    if hint in _CONVERSIONS:
        return _CONVERSIONS[hint](value)
    if origin in (Union, types.UnionType):
        return _plain(value, next(one for one in inner if _fits(value, one)))
    if origin in (tuple, Sequence):
        each = inner if origin is tuple and inner[-1] is not ... else repeat(inner[0])
        entries = list(map(_plain, value, each))
        if all(map(operator.is_, entries, value)):  # the list may be of a class of its own
            return value
        return tuple(entries) if isinstance(value, tuple) else entries
    return value


_PYTHONS = (bool, int, float, str, types.NoneType)
_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    bool: bool,
    int: operator.index,
    float: float,
    str: str.__str__,  # of a member of an Enum, too
}


def _show(value: Any) -> str:
    """Short values as they are written, others by their class."""
    if value is None or isinstance(value, str | bytes | int | float | complex | Enum):
        return str(value) if isinstance(value, Enum) else reprlib.repr(value)
    if isinstance(value, list | tuple | dict | set) and _is_plain(value):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _with_article(type(value).__name__)


def _is_plain(value: Iterable[Any]) -> bool:
    return all(
        _is_plain(entry)
        if isinstance(entry, list | tuple)
        else entry is None or isinstance(entry, str | int | float)
        for entry in value
    )


def _say(hint: Any, many: bool = False) -> str:
    """What fits, in plain words. many: of several such values."""
    plain = {
        bool: ("True or False", "truth values"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        str: ("a text", "texts"),
    }
    if hint in plain:
        return plain[hint][many]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_say(one, many) for one in inner if one is not types.NoneType)
    if origin is Callable:
        return "functions" if many else "a function"
    if origin in (tuple, Sequence, Iterable):
        what = {tuple: "tuple", Sequence: "list", Iterable: "list"}[origin]
        each = inner[0] if inner[-1] is ... or len(set(inner)) == 1 else Any
        of = "" if isinstance(each, TypeVar) or each is Any else f" of {_say(each, many=True)}"
        return f"{what}s{of}" if many else f"a {what}{of}"
    kind: Any = origin or hint
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [str(member) for member in kind]
        return f"{', '.join(names[:-1])} or {names[-1]}"
    name = getattr(kind, "__name__", str(kind))
    one = _CLASSES.get(name) or _with_article(name)
    return f"{one.partition(' ')[2]}s" if many else one


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"
