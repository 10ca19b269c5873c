"""The names of a bucket's parameters.

DDP gives the hook tensors without names, but rules, reports and checkpoints need names. So the
state looks once for the DDP module in which it is registered, which knows them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch.records.parameters import NamedShape


def find_registered_module(state: object) -> DistributedDataParallel:
    """The one DDP module with which `state` was registered as a hook's state.

    Raises RuntimeError if there is none or more than one.
    """
    found = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), DistributedDataParallel)
        and any(registered is state for _, registered in candidate._comm_hooks)
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"the GradwireState is registered in {len(found)} DistributedDataParallel modules; "
            "it needs exactly one: model.register_comm_hook(state, gradwire_hook), and a state of "
            "its own for each model"
        )
    return found[0]


class ParameterNames:
    """Looks parameters up by identity, and asks the module again for an unknown one."""

    def __init__(self, state: object) -> None:
        self._state = weakref.ref(state)
        self._names: dict[int, str] = {}
        self._parameters: list[torch.Tensor] = []

    def shapes(self, parameters: Sequence[torch.Tensor]) -> list[NamedShape]:
        """Name and dimensions of each parameter, in the given order."""
        if any(id(parameter) not in self._names for parameter in parameters):
            named = dict(find_registered_module(self._state()).module.named_parameters())
            self._names = {id(parameter): name for name, parameter in named.items()}
            # References to the parameters keep their ids from being used again. There is none to
            # the module: it refers to the state where Python's garbage collector cannot see it.
            self._parameters = list(named.values())
        return [(self._names[id(parameter)], list(parameter.shape)) for parameter in parameters]
