"""The DDP module of a state, with the names of a bucket's parameters.

DDP gives the hook tensors without names, but rules, reports and checkpoints need names. So the
state looks for the DDP module in which it is registered, which knows them, and its ranks.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def find_module(state: object) -> DistributedDataParallel:
    """The one DDP module with which `state` was registered.

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
    module: DistributedDataParallel = found[0]
    return module


def name_parameters_of(module: DistributedDataParallel) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in module.module.named_parameters()}


def check_ranks(module: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError unless `group` (None: the default one) has the ranks of the module's group:
    gradients of other ranks would be averaged than DDP's."""
    theirs, ours = (dist.get_process_group_ranks(g) for g in (module.process_group, group))
    if theirs == ours:
        return
    raise ValueError(
        f"DistributedDataParallel averages over the ranks {theirs}, the GradwireState over {ours}: "
        "give GradwireState(process_group=) the group that the model has"
    )
