"""Reads dataclasses from JSON objects, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from gradwire.strict_json import refuse_constant, unique_pairs

_OBJECT = "an object"

T = TypeVar("T")


class FromJson:
    """The base of a dataclass that is read from its plain values."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Fields that are missing have their defaults; others are left out. Raises ValueError."""
        return read_fields(cls, values)


def parse_object(text: bytes) -> dict[str, Any]:
    """Raises ValueError, in words for the user, for what is no JSON object in UTF-8."""
    try:
        document = json.loads(
            text.decode(),
            object_pairs_hook=unique_pairs,
            parse_constant=refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is cut off or no JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"it holds {_describe(type(document))}, not {_OBJECT} of JSON")
    return document


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large for a number")
    return number


def read_fields(kind: type[T], values: object, of: str = "", *, all_known: bool = False) -> T:
    """Reads a dataclass, whose fields may hold others, and sequences and mappings of them.

    Args:
        kind: the dataclass.
        values: its fields, as JSON has them, and others.
        of: what they belong to, such as "codec raw"; empty: the file.
        all_known: the dataclass must have a field for each value.

    Raises:
        ValueError: A field is missing or unknown, or its value is of another kind.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{of or 'it'} is {_describe(type(values))}, not {_OBJECT}")
    types, read = get_type_hints(kind), {}
    for known in fields(kind):  # type: ignore[arg-type]
        called = f"`{known.name}` of {of}" if of else f"`{known.name}`"
        if known.name in values:
            type_, value = types[known.name], values[known.name]
            _check(type_, value, called)
            read[known.name] = _read(type_, value, known.name, all_known)
        elif known.default is MISSING and known.default_factory is MISSING:
            raise ValueError(f"{called} is missing")
    if all_known and (others := [name for name in values if name not in types]):
        raise ValueError(f"`{others[0]}` is no field of {of or f'a {kind.__name__.lower()}'}")
    return kind(**read)


def _read(type_: Any, value: Any, name: str, all_known: bool) -> Any:
    """The items of `layers` are layer 1, layer 2, ..., those of `codecs` are codec raw, ..."""
    origin: Any = get_origin(type_) or type_
    part: Any = next(filter(is_dataclass, (type_, *get_args(type_))), None)
    if value is not None and Path in (type_, *get_args(type_)):
        return Path(value)
    if part is None or value is None:
        return tuple(value) if origin is tuple else value
    read = partial(read_fields, part, all_known=all_known)
    if origin in (list, tuple):
        return origin(read(item, f"{name[:-1]} {number}") for number, item in enumerate(value, 1))
    if origin is Mapping:
        return {key: read(item, f"{name[:-1]} {key}") for key, item in value.items()}
    return read(value, name)


def _check(type_: Any, value: object, called: str) -> None:
    """Raises ValueError for a value of another type than a dataclass says, also in a list or an
    object. Those that are dataclasses are checked when they are read."""
    types = get_args(type_) if isinstance(type_, UnionType) else (type_,)
    wanted, given = [_describe(one) for one in types], _describe(type(value))
    fits = {"", given, "a number" if given == "a whole number" else given}
    if fits.isdisjoint(wanted):
        raise ValueError(f"{called} is {given}, not {' or '.join(wanted)}")
    for parts in (get_args(one) for one in types if _describe(one) == given):
        if parts and isinstance(value, list | dict) and not any(map(is_dataclass, parts)):
            for part, item in _typed_items(parts, value, called):
                _check(part, item, f"an item of {called}")


def _typed_items(
    parts: tuple[Any, ...], value: list[Any] | dict[str, Any], called: str
) -> Iterable[tuple[Any, Any]]:
    """The items of a list or an object, with their types. parts: of its own type. Of items that
    have no items, only one of each type."""
    if isinstance(value, list) and len(parts) > 1 and parts[-1] is not ...:
        if len(value) != len(parts):
            raise ValueError(f"{called} has {len(value)} items, not {len(parts)}")
        return zip(parts, value, strict=True)
    part, items = (parts[1], value.values()) if isinstance(value, dict) else (parts[0], value)
    unlike = {id(one) if isinstance(one, list | dict) else type(one): one for one in items}
    return [(part, one) for one in unlike.values()]


def _describe(type_: Any) -> str:
    """The type in words; empty: anything."""
    whole = get_origin(type_) or type_
    if whole is Literal:
        return _describe(type(get_args(type_)[0]))
    if is_dataclass(whole) or whole in (dict, Mapping):
        return _OBJECT
    known = {
        str: "a text", Path: "a text", bool: "true or false", int: "a whole number",
        float: "a number", list: "a list", tuple: "a list", NoneType: "null",
    }  # fmt: skip
    return known.get(whole, "")
