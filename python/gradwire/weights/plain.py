"""PyTorch's tensors that are more or less than values in memory, which no version can have."""

from __future__ import annotations

from typing import Any

from gradwire.weights.errors import WeightsError


def plain_tensor(name: str, values: Any) -> Any:
    """The tensor, detached. Raises WeightsError, which names it and says what to take for it."""
    from torch.masked import MaskedTensor
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_lazy(values):
        raise WeightsError(
            f"tensor {name!r} is lazy, and has no shape yet: let the model have an input first"
        )
    values = values.detach()
    if values.is_nested:
        raise WeightsError(f"tensor {name!r} is nested: take its values() and offsets()")
    if isinstance(values, MaskedTensor) or is_traceable_wrapper_subclass(values):
        raise WeightsError(
            f"tensor {name!r} is a {type(values).__name__}, which is made of other tensors: take "
            "these"
        )
    if remedy := _remedy_for(values):
        raise WeightsError(
            f"tensor {name!r} has no plain values: it is {values.dtype}, {values.layout}, on "
            f"{values.device}; {remedy}"
        )
    return values


def _remedy_for(values: Any) -> str:
    """What to take for a tensor; nothing: it has its values."""
    import torch

    if values.layout is not torch.strided:
        return "take its to_dense()"
    if values.is_quantized:
        return "take its dequantize()"
    if values._is_zerotensor():
        return "take its clone()"
    has_values = not values.is_meta and not hasattr(values, "fake_mode")
    if has_values and values.numel() and values.device.type == "cpu":
        has_values = values.untyped_storage().nbytes() > 0  # which FSDP frees
    return "" if has_values else "load its values"
