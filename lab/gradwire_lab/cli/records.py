"""Options of commands that stand in a record: a dataclass whose fields typer's Option describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_record(name: str, kind: Any) -> Callable[[Command], Command]:
    """A command with an option for each field of `kind` in place of its parameter `name`, which is
    one of its keywords."""
    names = [one.name for one in fields(kind)]

    def wrap(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            record = kind(**{one: given.pop(one) for one in names})
            command(**given, **{name: record})

        signature = inspect.signature(command, eval_str=True)
        types = get_type_hints(kind, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            options = [
                parameter.replace(name=one.name, default=one.default, annotation=types[one.name])
                for one in fields(kind)
            ]
            parameters += options if parameter.name == name else [parameter]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return wrap
