"""Tensors in the dtype that receivers see."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gradwire.weights.errors import WeightsError
from gradwire.weights.tensors import PROGRAMS, View, dtype_named, is_torch, require_torch

FLOATS = {"F64", "F32", "F16", "BF16"}  # which are cast
_TARGETS = FLOATS | {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_WITH_INFINITY = FLOATS | {"F8_E5M2"}
# The largest number, and the distance to the next one if there were one.
_LARGEST = {
    "F64": (float(np.finfo(np.float64).max), 2.0**971),
    "F32": (float(np.finfo(np.float32).max), 2.0**104),
    "BF16": (255.0 * 2.0**120, 2.0**120),
    "F16": (65504.0, 32.0),
    "F8_E4M3": (448.0, 32.0),
    "F8_E5M2": (57344.0, 8192.0),
    "F8_E4M3FNUZ": (240.0, 16.0),
    "F8_E5M2FNUZ": (57344.0, 8192.0),
}


def target_named(dtype: Any) -> str:
    """The safetensors dtype that `dtype=` names. Raises WeightsError where it is none of signed
    floats."""
    found = dtype_named(dtype)
    if found not in _TARGETS:
        names = ", ".join(PROGRAMS[name] for name in sorted(_TARGETS))
        raise WeightsError(f"dtype={PROGRAMS[found]}: floats are published as one of {names}")
    return found


def cast(view: View, dtype: str | None) -> View:
    """The view, or a copy of it with this safetensors dtype if it is of floats."""
    if dtype is None or view.dtype == dtype or view.dtype not in FLOATS:
        return view
    values = view.values
    if not is_torch(values) and dtype in FLOATS - {"BF16"}:
        values = values.astype(PROGRAMS[dtype])
    else:
        torch = require_torch(f"dtype={PROGRAMS[dtype]!r}")
        values = values if is_torch(values) else _as_torch(view, torch)
        if view.dtype == "F64" and dtype != "F32":
            values = _rounded_to_odd(values, torch)
        values = values.to(getattr(torch, PROGRAMS[dtype]))
    return View(view.name, dtype, view.shape, values, view.at, view.whole)


def _rounded_to_odd(values: Any, torch: Any) -> Any:
    """float64 as float32, so that rounding this to fewer bits rounds the float64: PyTorch would
    round to nearest twice. What is no float32 becomes the neighbour with an odd significand."""
    nearest = values.to(torch.float32)
    back, bits = nearest.to(torch.float64), nearest.view(torch.int32)
    bits -= (back.abs() > values.abs()).to(torch.int32)  # the neighbour towards zero
    bits |= ((back != values) & (values == values)).to(torch.int32)  # NaNs stay
    return nearest


def require_fit(targets: Iterable[tuple[View, str | None]]) -> None:
    """Raises WeightsError, which names the tensor, if a value would not be rounded to its dtype but
    lost: a number beyond the largest of the dtype, or an infinity where the dtype has none."""
    for view, dtype in targets:
        if dtype is None or view.dtype not in FLOATS or view.dtype == dtype:
            continue
        largest, step = _LARGEST[dtype]
        keeps_infinity = dtype in _WITH_INFINITY
        if keeps_infinity and _LARGEST[view.dtype][0] <= largest:
            continue
        lost = _count_beyond(view.values, largest + step / 2, keeps_infinity)
        if lost:
            raise WeightsError(
                f"tensor {view.name!r}: {lost} of its {math.prod(view.shape)} values are too large "
                f"for dtype={PROGRAMS[dtype]}, whose largest is {largest:g}. Nothing was "
                "published; take a dtype with their range, or clamp them"
            )


def _count_beyond(values: Any, limit: float, keeps_infinity: bool) -> int:
    if is_torch(values):
        low, high = (float(one) for one in values.aminmax()) if values.numel() else (0.0, 0.0)
    else:
        with np.errstate(invalid="ignore"):  # of dtypes that ml_dtypes adds
            low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if max(-low, high) < limit:  # False if there is a NaN
        return 0
    magnitude = abs(values)
    beyond = magnitude >= limit
    return int((beyond & (magnitude != math.inf) if keeps_infinity else beyond).sum())


def _as_torch(view: View, torch: Any) -> Any:
    values = np.require(view.values, requirements=["C", "W"])  # PyTorch warns of read-only memory
    if view.dtype == "BF16":  # of ml_dtypes, which PyTorch does not know
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
