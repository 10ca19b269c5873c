"""Reads dataclasses from JSON objects, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from gradwire.strict_json import unique_pairs

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
        document = json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is cut off or no JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"it holds {_describe(type(document))}, not {_OBJECT} of JSON")
    return document


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
    """Raises ValueError for a value of another type than a dataclass says."""
    types = get_args(type_) if isinstance(type_, UnionType) else (type_,)
    wanted, given = [_describe(one) for one in types], _describe(type(value))
    fits = {"", given, "a number" if given == "a whole number" else given}
    if fits.isdisjoint(wanted):
        raise ValueError(f"{called} is {given}, not {' or '.join(wanted)}")


def _describe(type_: Any) -> str:
    """The type in words; empty: anything."""
    whole = get_origin(type_) or type_
    if is_dataclass(whole) or whole in (dict, Mapping):
        return _OBJECT
    known = {
        str: "a text", bool: "true or false", int: "a whole number", float: "a number",
        list: "a list", tuple: "a list", NoneType: "null",
    }  # fmt: skip
    return known.get(whole, "")
