"""Nested states, as a checkpoint of model and optimizer has them, as named tensors and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire.option_record import explains_arguments
from gradwire.strict_json import parse_json
from gradwire.weights.errors import WeightsError
from gradwire.weights.tensors import Shard, is_torch, typed_values

STRUCTURE = "structure.json"  # the tensor with everything that is no tensor
_DEPTH = 30  # of a state
_NESTING = 3 * _DEPTH + 4  # of its JSON
_SCALARS = "biufcmM"  # kinds of NumPy's: bools, numbers and times
_EXACT = 10**18  # integers below it are read as they are


def flatten(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Makes named tensors of a nested state, for `Publisher.publish`.

    A tensor's name is the path to it, such as `optimizer/state/0/exp_avg`. All else is JSON in a
    tensor of bytes, `structure.json`; NumPy's scalars come back as such.

    Args:
        state: Dictionaries, lists and tuples of arrays, tensors, `Shard`s, numbers, texts, bools
            and None, in one another; such as {"model": model.state_dict(), "optimizer":
            optimizer.state_dict(), "step": 100}. Keys are texts, integers, bools or None.

    Raises:
        WeightsError: A value is of another type, or two tensors have the same path.
    """
    found: dict[str, Any] = {}
    described = _describe(state, (), found)
    if STRUCTURE in found:
        raise WeightsError(f"the state has a tensor {STRUCTURE!r}, a name that flatten() needs")
    text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    bytes_of_text = np.frombuffer(text, np.uint8).copy()
    as_torch = any(is_torch(values) for values in found.values())
    return {STRUCTURE: typed_values("U8", bytes_of_text, as_torch), **found}


@explains_arguments
def unflatten(tensors: Mapping[str, Any]) -> Any:
    """Makes the nested state of what `flatten` returned, or a receiver has of it.

    Its tensors are those of the dictionary. An optimizer that loads it may go on with their memory.

    Raises:
        WeightsError: They are not from `flatten`, or a tensor is missing.
    """
    if STRUCTURE not in tensors:
        raise WeightsError(
            f"there is no tensor {STRUCTURE!r}; flatten() makes it of a nested state"
        )
    values = tensors[STRUCTURE]
    text = np.asarray(values.cpu() if is_torch(values) else values, np.uint8).tobytes()
    try:
        return _restore(parse_json(text, _NESTING), tensors)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{STRUCTURE!r} is not from flatten(): {error}") from None


def _describe(value: Any, path: tuple[str, ...], found: dict[str, Any]) -> Any:
    """As JSON: plain values as they are, all else as an object with one key, its kind."""
    where = "/".join(path)
    if len(path) > _DEPTH:
        raise WeightsError(f"{where!r} stands more than {_DEPTH} deep in the state")
    if isinstance(value, Mapping):
        return {"dict": [_describe_pair(key, one, path, found) for key, one in value.items()]}
    if type(value) in (list, tuple):
        listed = [_describe(one, (*path, str(i)), found) for i, one in enumerate(value)]
        return listed if type(value) is list else {"tuple": listed}
    if value is None or type(value) in (bool, int, float, str):
        return _plain(value)
    if isinstance(value, np.generic) and value.dtype.kind in _SCALARS:
        return {"numpy": [value.dtype.name, value.tobytes().hex()]}
    is_array = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    if isinstance(value, np.generic) or not (isinstance(value, Shard) or is_array):
        raise WeightsError(
            f"{where!r} is of type {type(value).__name__}; a state has arrays, tensors, "
            "dictionaries, lists, tuples, numbers, texts, bools and None"
        )
    if where in found:
        raise WeightsError(f"two tensors have the path {where!r}; take keys without a slash")
    found[where] = value
    return {"tensor": where}


def _describe_pair(
    key: Any, value: Any, path: tuple[str, ...], found: dict[str, Any]
) -> tuple[Any, Any]:
    if key is not None and type(key) not in (bool, int, str):
        raise WeightsError(
            f"the key {key!r} of {'/'.join(path) or 'the state'!r} is of type "
            f"{type(key).__name__}; keys are texts, integers, bools or None"
        )
    return _plain(key), _describe(value, (*path, str(key)), found)


def _plain(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) is int and abs(value) >= _EXACT:
        return {"int": str(value)}
    return value


def _restore(described: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(described, list):
        return [_restore(one, tensors) for one in described]
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "dict":
        return {_restore(key, tensors): _restore(one, tensors) for key, one in content}
    if kind == "tuple":
        return tuple(_restore(one, tensors) for one in content)
    if kind in ("float", "int"):
        return (float if kind == "float" else int)(content)
    if kind == "numpy":
        name, digits = content
        return np.frombuffer(bytes.fromhex(digits), name).reshape(())[()]
    if kind != "tensor":
        raise ValueError(f"it has a value of the kind {kind!r}")
    if content not in tensors:
        raise WeightsError(f"tensor {content!r} is missing")
    return tensors[content]
