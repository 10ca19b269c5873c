"""Models with LoRA adapters of peft are trained as the optimizer alone would, in all ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="scripts/test.sh recipes installs it")

import peft

from test_partial_models import WAYS, compare, nothing, trainable


def adapt(model: Any) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["first", "last"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_peft_are_trained_as_alone(way: str) -> None:
    compare(way, adapt, trainable, nothing)
