"""The DDP module that averages with a state, and its ranks.

DDP gives the hook tensors without names, but rules, reports and checkpoints need names. The module
knows them, and is found by the parameters in the hook's bucket.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch.records.parameters import named_parameters, uncompiled


def find_module(state: object, parameters: Sequence[torch.Tensor]) -> DistributedDataParallel:
    """A DDP module that has all the parameters; of several, one in which `state` is registered.

    Raises RuntimeError if there is none, if several have other names or ranks for them, or if
    `state` is registered in a module of other parameters, too.
    """
    modules: list[DistributedDataParallel] = [
        candidate
        for candidate in _objects()
        # There are hundreds of thousands of objects, and issubclass of an abstract class is slow.
        if DistributedDataParallel in type(candidate).__mro__
        and isinstance(candidate, DistributedDataParallel)
        and hasattr(candidate, "_comm_hooks")  # its construction has ended
    ]
    registered = [m for m in modules if any(own is state for _, own in m._comm_hooks)]
    found = [
        module
        for module in registered or modules
        if {id(p) for p in module.parameters()}.issuperset(map(id, parameters))
    ]
    if len(found) < len(registered):
        raise RuntimeError(
            f"the GradwireState is registered in {len(registered)} DistributedDataParallel "
            "modules; it needs exactly one: model.register_comm_hook(state, gradwire_hook), and a "
            "state of its own for each model"
        )
    told = {(str(_names_in(m, parameters)), str(_ranks_of(m.process_group))) for m in found}
    if len(told) != 1:
        raise RuntimeError(
            f"{len(found)} DistributedDataParallel modules have the parameters of this bucket"
            f"{', with other names or ranks' if found else ''}: say which one averages with this "
            "state, GradwireState(model=ddp)"
        )
    return found[0]


def module_in(model: nn.Module) -> DistributedDataParallel:
    """The DDP module that was given as model=, which may be compiled. Raises TypeError."""
    inner = uncompiled(model)
    if not isinstance(inner, DistributedDataParallel):
        raise TypeError(
            "model is the DistributedDataParallel module whose hook gets this state; this is a "
            f"{type(inner).__name__}"
        )
    return inner


def _names_in(
    module: DistributedDataParallel, parameters: Iterable[torch.Tensor]
) -> list[str | None]:
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    return [names.get(id(parameter)) for parameter in parameters]


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)


def check_ranks(module: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError unless `group` (None: the default one) has the ranks of the module's group:
    gradients of other ranks would be averaged than DDP's."""
    theirs, ours = _ranks_of(module.process_group), _ranks_of(group)
    if theirs == ours:
        return
    raise ValueError(
        f"DistributedDataParallel averages over the ranks {theirs}, the GradwireState over {ours}: "
        "give GradwireState(process_group=) the group that the model has"
    )


def _objects() -> Iterable[object]:
    """All that the garbage collector knows. It does not list objects that gc.freeze() has set
    aside: those are reached from the modules, from the threads' frames and from all others."""
    listed = gc.get_objects()
    if gc.get_freeze_count() == 0:
        return listed
    reached: dict[int, object] = {}
    waiting = [sys.modules, *_locals_of_threads(), *listed]
    for skipped in (reached, waiting, listed):
        reached[id(skipped)] = None
    while waiting:
        one = waiting.pop()
        if id(one) not in reached:
            reached[id(one)] = one
            waiting += gc.get_referents(one)
    return reached.values()


def _locals_of_threads() -> Iterable[object]:
    for frame in sys._current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            yield from here.f_locals.values()
            here = here.f_back
