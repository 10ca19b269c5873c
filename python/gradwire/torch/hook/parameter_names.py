"""The names of a bucket's parameters.

DDP gives the hook tensors without names, but rules, reports and checkpoints need names. So the
state looks for the DDP module in which it is registered, which knows them.
"""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel


def name_parameters_of(state: object) -> dict[torch.Tensor, str]:
    """Name of each parameter in the one DDP module with which `state` was registered.

    Raises RuntimeError if there is none or more than one.
    """
    found = [
        candidate
        for candidate in gc.get_objects()
        # There are hundreds of thousands of objects, and issubclass of an abstract class is slow.
        if DistributedDataParallel in type(candidate).__mro__
        and any(registered is state for _, registered in candidate._comm_hooks)
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"the GradwireState is registered in {len(found)} DistributedDataParallel modules; "
            "it needs exactly one: model.register_comm_hook(state, gradwire_hook), and a state of "
            "its own for each model"
        )
    return {parameter: name for name, parameter in found[0].module.named_parameters()}
