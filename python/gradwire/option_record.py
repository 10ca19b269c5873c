"""The base of records of options, and errors that help to find an option's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from gradwire.argument_types import check_types, fits

_P = ParamSpec("_P")
_T = TypeVar("_T")

# What other libraries call an option: whose word it is, and the option here.
_FOREIGN = {
    "sync_every": ("torchft", "every"),
    "fragment_sync_delay": ("torchft", "delay"),
    "fragment_update_alpha": ("torchft", "mix"),
    "model_fragments": ("torchft", "fragments"),
    "outer_optimizer": ("torchft", "outer"),
    "should_quantize": ("torchft", "codec"),
    "min_replica_size": ("torchft", "min_ranks"),
    "start_powerSGD_iter": ("PowerSGD", "start_iter"),
    "matrix_approximation_rank": ("PowerSGD", "codec"),
    "use_error_feedback": ("PowerSGD", "codec"),
    "min_compression_rate": ("PowerSGD", "min_numel"),
    "random_seed": ("PowerSGD", "seed"),
}


@dataclass(frozen=True)
class OptionRecord:
    """Frozen options that check themselves: a subclass raises from its `__post_init__`, after this
    class has raised TypeError for a value of another type than its annotation."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        _check_names(cls.__name__, given, {field.name: field.default for field in fields(cls)})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """The end of the chain: a record may have several records as bases."""
        for name, value in check_types(type(self), vars(self)).items():
            object.__setattr__(self, name, value)

    def given(self, **plain: Any) -> Self:
        """The record with options that were given as plain keywords, too; None: it was not given.

        Raises:
            ValueError: An option is given in both ways.
        """
        named = {name: value for name, value in plain.items() if value is not None}
        here = self.changed()
        for name in named:
            if name in here:
                raise ValueError(f"{name} is given twice: as {name}= and in {type(self).__name__}")
        return replace(self, **named) if named else self

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in vars(self).items() if value != usual.get(name)}


def describe_unknown(owner: str, name: str, known: Mapping[str, Any]) -> str:
    """The error for an argument that `owner` lacks.

    Args:
        owner: The public class or function.
        name: The argument.
        known: The arguments of `owner`, and the records that are defaults among them.
    """
    records = {key: value for key, value in known.items() if isinstance(value, OptionRecord)}
    written = dict.fromkeys(known, "")
    for key, record in records.items():
        for field in fields(record):
            written.setdefault(field.name, f"{key}={type(record).__name__}({field.name}=...)")
    found = f"{owner} has no argument '{name}'"
    if written.get(name):
        return f"{found}: write {written[name]}"
    if name in _FOREIGN:
        source, here = _FOREIGN[name]
        if here not in written:
            return f"{found}: it is {source}'s word for {here}, which {owner} does not have"
        return f"{found}, as {source} calls it: write {written[here] or here + '=...'}"
    near = get_close_matches(name, written, n=1, cutoff=0.5)
    if near:
        return f"{found}; did you mean {written[near[0]] or near[0] + '=...'}?"
    return f"{found}; it has {', '.join(known)}"


def _check_names(owner: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(describe_unknown(owner, name, known))


def explains_arguments(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function or an `__init__`. A keyword that it lacks raises TypeError, see
    `describe_unknown`; so does one of another type than its annotation."""
    parameters = inspect.signature(call).parameters
    known = {name: p.default for name, p in parameters.items() if name != "self"}
    leads = next(iter(known)) == "optimizer"  # the function says more of a model in its place
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @wraps(call)
    def checked(*args: _P.args, **given: _P.kwargs) -> _T:
        owner = type(args[0]).__name__ if "self" in parameters else call.__name__
        if not takes_any:
            _check_names(owner, given, known)
        named: dict[str, Any] = dict(zip(parameters, args, strict=False)) | given
        if leads and not fits(call, "optimizer", named.get("optimizer")):
            return call(*args, **given)
        plain = check_types(call, named)
        first = [plain[name] for name, _ in zip(parameters, args, strict=False)]
        both: Any = [*first, *args[len(first) :]], {name: plain[name] for name in given}
        return call(*both[0], **both[1])

    return checked
