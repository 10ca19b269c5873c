"""The most bytes of a state that another process sends, from this process's own objects."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch.optim import LBFGS, Optimizer

from gradwire.torch.records.stepped_copy import DEVICES, step_of_copy

# torch.save's entry for a tensor: a name, two headers of ZIP, alignment to 64 bytes, the pickle.
_BESIDE_TENSOR = 512
_BESIDE_ALL = 65536  # names and numbers
_MOST_MODELS = 256


def bytes_of(state: object) -> int:
    """The bytes of the tensors in dicts, lists and tuples, with what torch.save adds to each; a
    tensor on the meta device counts as if it had values."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() + _BESIDE_TENSOR
    if isinstance(state, Mapping):
        return sum(bytes_of(each) for each in state.values())
    if isinstance(state, list | tuple):
        return sum(bytes_of(each) for each in state)
    return 0


def most_bytes(*states: object) -> int:
    """The bytes of a message with these states. An Optimizer stands for its largest state."""
    sizes = (_of_optimizer(s) if isinstance(s, Optimizer) else bytes_of(s) for s in states)
    return sum(sizes) + _BESIDE_ALL


def _of_optimizer(optimizer: Optimizer) -> int:
    """Most optimizers make their state in the first step, so a copy of this one takes a step. One
    that can't be copied so counts as `_MOST_MODELS` times its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = bytes_of(list(optimizer.state.values()))
    if isinstance(optimizer, LBFGS):
        # The direction and the gradient before; of each kept step two of these and two numbers.
        numel = sum(p.numel() for p in parameters)
        flat = torch.empty(numel, dtype=parameters[0].dtype, device="meta")
        history = optimizer.param_groups[0]["history_size"]
        return bytes_of([flat] * (2 + 2 * history)) + (1 + 2 * history) * _BESIDE_TENSOR
    for device in DEVICES:
        with contextlib.suppress(Exception):  # of any optimizer's own code
            return max(own, bytes_of(list(step_of_copy(optimizer, device).state.values())))
    return max(own, _MOST_MODELS * bytes_of(parameters))
