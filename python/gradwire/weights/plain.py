"""PyTorch's tensors that are more or less than values in memory, which no version can have."""

from __future__ import annotations

from typing import Any

from gradwire.weights.errors import WeightsError


def plain_tensor(name: str, values: Any) -> Any:
    """The tensor, detached. Raises WeightsError, which names it and says what to take for it."""
    import torch
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
    remedies = {
        "load its values": values.is_meta or hasattr(values, "fake_mode"),
        "take its to_dense()": values.layout is not torch.strided,
        "take its dequantize()": values.is_quantized,
    }
    for remedy in (remedy for remedy, is_needed in remedies.items() if is_needed):
        raise WeightsError(
            f"tensor {name!r} has no plain values: it is {values.dtype}, {values.layout}, on "
            f"{values.device}; {remedy}"
        )
    return values
