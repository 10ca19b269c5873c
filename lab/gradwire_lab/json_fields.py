"""Reads JSON objects that hold a dataclass: for files of users with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from gradwire.strict_json import unique_pairs

_OBJECT = "an object"


class FromJson:
    """The base of a dataclass that is read from its plain values."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Fields that are missing have their defaults; others are left out. Raises TypeError,
        ValueError, KeyError."""
        made: Self = _build(cls, values)
        return made


def _build(kind: Any, value: Any) -> Any:
    inner, whole = get_args(kind), get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        types = get_type_hints(kind)
        return kind(**{n: _build(types[n], each) for n, each in dict(value).items() if n in types})
    if isinstance(kind, UnionType):
        return None if value is None else _build(inner[0], value)
    if whole in (list, tuple):
        return whole(_build(inner[0], each) for each in value)
    return Path(value) if kind is Path else value


def parse_object(text: bytes) -> dict[str, Any]:
    """Raises ValueError, in words for the user, for what is no JSON object in UTF-8."""
    try:
        document = json.loads(text.decode(), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is cut off or no JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"it holds {_kind_of(document)}, not {_OBJECT} of JSON")
    return document


def check_fields(kind: type, values: object, of: str = "") -> dict[str, Any]:
    """values: the fields of a dataclass, as JSON has them, and others. of: what they belong to,
    such as "codec raw"; empty: the file. Raises ValueError that names the first field that is
    missing or whose value is of another kind. Items of lists and objects are not looked at."""
    if not isinstance(values, dict):
        raise ValueError(f"{of or 'it'} is {_kind_of(values)}, not {_OBJECT}")
    types = get_type_hints(kind)
    for known in fields(kind):
        if known.name in values:
            check_kind(values[known.name], types[known.name], known.name, of)
        elif known.default is MISSING and known.default_factory is MISSING:
            raise ValueError(f"{_name(known.name, of)} is missing")
    return values


def check_no_others(kind: type, values: dict[str, Any], of: str) -> None:
    """Raises ValueError that names a field that the dataclass does not have."""
    known = {one.name for one in fields(kind)}
    for name in values:
        if name not in known:
            raise ValueError(f"`{name}` is no field of {of}")


def take_field(values: dict[str, Any], name: str, kind: Any, of: str = "") -> Any:
    """A field of an object. Raises ValueError as check_fields does."""
    if name not in values:
        raise ValueError(f"{_name(name, of)} is missing")
    check_kind(values[name], kind, name, of)
    return values[name]


def check_kind(value: object, kind: Any, name: str, of: str = "") -> None:
    """kind: a type as dataclasses have it. Raises ValueError."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    wanted = [_describe(one) for one in kinds]
    if not any(one == "" or _fits(value, one) for one in wanted):
        raise ValueError(f"{_name(name, of)} is {_kind_of(value)}, not {' or '.join(wanted)}")


def _name(name: str, of: str) -> str:
    return f"`{name}` of {of}" if of else f"`{name}`"


def _describe(kind: Any) -> str:
    """The kind in words; empty: anything."""
    whole = get_origin(kind) or kind
    if is_dataclass(whole) or whole in (dict, Mapping):
        return _OBJECT
    known = {
        str: "a text", bool: "true or false", int: "a whole number", float: "a number",
        list: "a list", tuple: "a list", NoneType: "null",
    }  # fmt: skip
    return known.get(whole, "")


def _kind_of(value: object) -> str:
    return _describe(type(value))


def _fits(value: object, wanted: str) -> bool:
    given = _kind_of(value)
    return given == wanted or (given, wanted) == ("a whole number", "a number")
