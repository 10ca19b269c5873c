"""What is owed to each parameter, according to the states of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from gradwire.torch import GradwireState

Owed = dict[str, dict[str, np.ndarray]]


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: p.grad.flatten().numpy().copy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def owed(state: GradwireState) -> Owed:
    """Residuals of this rank by kind and parameter name, flattened, up to the last known value."""
    return owed_in(state.state_dict())


def owed_in(state: dict[str, Any]) -> Owed:
    result: Owed = {"push": {}, "owed": {}, "pull": {}}
    for entry in state["residuals"]:
        values = entry["values"].double().numpy()
        kept = result[entry["kind"]].get(entry["name"], np.zeros(0))
        end = entry["offset"] + values.size
        if kept.size < end:
            kept = np.concatenate([kept, np.zeros(end - kept.size)])
        kept[entry["offset"] : end] += values
        result[entry["kind"]][entry["name"]] = kept
    return result


def total_owed(ranks: list[Owed]) -> dict[str, np.ndarray]:
    """The amount owed to each parameter: mean of the push residuals, or what all ranks owe together
    and is equal on each, plus the pull residual."""
    names = {name for rank in ranks for kind in rank.values() for name in kind}
    size = {n: max(k[n].size for rank in ranks for k in rank.values() if n in k) for n in names}
    total = {name: np.zeros(size[name]) for name in names}
    for rank in ranks:
        for kind, share in (("push", 1 / len(ranks)), ("owed", 1 / len(ranks)), ("pull", 1.0)):
            for name, values in rank[kind].items():
                total[name][: values.size] += share * values
    return total
