"""The functions that the ranks of a test cluster run with gradients of 16 bits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.errors import NonFiniteStepWarning
from gradwire.torch.options import grouped
from owed import Owed, owed


@dataclass
class Averaged:
    """One gradient of this rank, and its average."""

    own: torch.Tensor
    averaged: torch.Tensor
    skipped: bool
    owed: Owed  # after the step
    warnings: list[str]
    stats: dict[str, Any]


def average_given(dtype: torch.dtype, what: str, state_options: dict[str, Any]) -> Averaged:
    """One step whose gradient is noise, or 60000 everywhere."""
    model = nn.Linear(96, 96, bias=False).to(dtype)
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = torch.randn(96, 96, generator=generator) if what == "noise" else torch.full((96, 96), 6e4)
    own = own.to(dtype)
    ddp = DistributedDataParallel(model)
    state = GradwireState(**grouped(state_options))
    ddp.register_comm_hook(state, gradwire_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp(torch.eye(96, dtype=dtype)).backward(own.T)
    assert model.weight.grad is not None
    skipped = state.last_step()["skipped"]
    said = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    return Averaged(own, model.weight.grad, skipped, owed(state), said, state.stats().as_dict())


def average_unlike(dtypes: list[torch.dtype], state_options: dict[str, Any]) -> None:
    """The ranks' models have different dtypes, which DDP itself does not notice."""
    dtype = dtypes[dist.get_rank()]
    ddp = DistributedDataParallel(nn.Linear(96, 96, bias=False).to(dtype), init_sync=False)
    ddp.register_comm_hook(GradwireState(**grouped(state_options)), gradwire_hook)
    ddp(torch.eye(96, dtype=dtype)).sum().backward()
