"""The test for NaN and Inf that takes no memory."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.torch.parameters import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 100_003])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, numel: int) -> None:
    values = torch.linspace(-1, 1, numel).to(dtype)
    assert all_finite(values)
    for place in {0, numel // 2, numel - 1} if numel else ():
        for bad in (math.nan, math.inf, -math.inf):
            changed = values.clone()
            changed[place] = bad
            assert not all_finite(changed)
