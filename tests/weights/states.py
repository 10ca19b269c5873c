"""States of a model at a time, for tests: the same number gives the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def state_of(time: int, n: int = 3000) -> dict[str, torch.Tensor]:
    """From one time to the next, few bfloat16 values change by an ulp, and all of one small
    tensor."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, generator=generator).bfloat16().reshape(-1, 30)
    for one in range(1, time + 1):
        weight.view(torch.int16).view(-1)[one::97] += 1
    counter = torch.tensor(time)
    return {"weight": weight, "bias": torch.full((7,), float(time)), "step": counter}


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype, name
        assert tuple(found[name].shape) == tuple(values.shape), name
        assert bits(found[name]) == bits(values), name


def bits(values: Any) -> bytes:
    if isinstance(values, torch.Tensor):
        if not values.numel():
            return b""
        values = values.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
        values = values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
    return np.ascontiguousarray(values).tobytes()
