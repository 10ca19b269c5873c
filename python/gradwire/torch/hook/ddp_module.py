"""The DDP module that averages with a state, and its ranks.

DDP gives the hook tensors without names, but rules, reports and checkpoints need names. The module
knows them, and is found by the parameters in the hook's bucket.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch.checkpoint import MemoryOrder
from gradwire.torch.exchange_settings import RAW_CODECS
from gradwire.torch.network.transport import ranks_in_world
from gradwire.torch.parameters import clean_name, named_parameters, uncompiled, unwrap
from gradwire.torch.shared_parameters import Slots
from gradwire.torch.staging.stage import is_capturing


def find_module(state: object, parameters: Sequence[torch.Tensor]) -> DistributedDataParallel:
    """A DDP module that has all the parameters; of several, one in which `state` is registered.

    Raises RuntimeError if there is none, if several have other names or ranks for them, or if
    `state` is registered in a module of other parameters, too.
    """
    modules: list[DistributedDataParallel] = [
        candidate
        for candidate in all_objects()
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
    if len(registered) == 1 and not found:
        here = {id(p) for p in registered[0].parameters()}
        shape = next(list(p.shape) for p in parameters if id(p) not in here)
        raise RuntimeError(
            f"DistributedDataParallel averages a parameter of shape {shape} that has left the "
            "model since, such as by putting another layer in its place, whose gradient it does "
            "not average: change the model before DistributedDataParallel(model), or wrap it again"
        )
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


def require_unhooked(module: DistributedDataParallel, owner: str) -> None:
    """Raises RuntimeError for a module that has a hook: DDP takes one, and keeps it."""
    if module._comm_hooks:
        hook, _ = module._comm_hooks[0]
        raise RuntimeError(
            f"{owner} puts a hook into DistributedDataParallel, and this module has "
            f"{hook.__qualname__} already: compress a model once, or wrap it again"
        )


def _names_in(
    module: DistributedDataParallel, parameters: Iterable[torch.Tensor]
) -> list[str | None]:
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    return [names.get(id(parameter)) for parameter in parameters]


def check_bucket(values: torch.Tensor) -> None:
    """Raises RuntimeError in the capture of a CUDA graph, and TypeError for gradients of a dtype
    that is not averaged."""
    if is_capturing(values):
        raise RuntimeError(
            "gradwire_hook can't be captured in a CUDA graph, because the host makes the packets: "
            "leave backward() out of the graph"
        )
    if values.dtype not in RAW_CODECS:
        raise TypeError(
            "gradwire_hook averages float32, bfloat16 and float16 gradients; this bucket is "
            f"{values.dtype}: make the model float32 (model.float())"
        )


class ThawWatch:
    """Looks at the buckets of each step for the parameters that need a gradient now. DDP averages
    those alone that needed one, and were there, when it was made."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._ignored = set(map(clean_name, module.parameters_to_ignore))
        self._model = weakref.ref(unwrap(module))
        self._seen: set[int] = set()  # in the buckets of this step
        self._read(unwrap(module))

    def _read(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in named_parameters(model) if n not in self._ignored]
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters = [parameter for _, parameter in named]
        self._slots = Slots(model)

    def look(self, index: int, parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        """Called for each bucket. Raises RuntimeError naming a parameter that is in none."""
        if index == 0:
            self._seen.clear()
        self._seen.update(map(id, parameters))
        if not is_last:
            return
        if self._slots.have_changed() and (model := self._model()) is not None:
            self._read(model)
        if self._seen.issuperset(self._names):
            return
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._seen:
                raise RuntimeError(
                    f"{self._names[id(parameter)]} was frozen, or not there, when "
                    "DistributedDataParallel was made, which does not average its gradient, so "
                    "that each rank would train its own: thaw it before "
                    "DistributedDataParallel(model), or wrap the model again"
                )


def averaged(module: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """The parameters whose gradients DDP averages."""
    ignored = set(map(clean_name, module.parameters_to_ignore))
    return [(n, p) for n, p in named_parameters(module) if p.requires_grad and n not in ignored]


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Empty for a group that torch.distributed does not know, which is refused later."""
    return dist.get_process_group_ranks(None) if group is None else ranks_in_world(group)


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


def shape_of(parameter: torch.Tensor) -> list[int]:
    """With a complex value as two: the last dimension is twice as long."""
    shape = list(parameter.shape)
    if parameter.is_complex():
        shape = [*shape[:-1], 2 * shape[-1]] if shape else [2]
    return shape


def all_objects() -> Iterable[object]:
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


# Beside row-major, by the number of dimensions: transposed, and channels_last.
_USUAL = {2: (1, 0), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


@dataclass
class _Known:
    """A bucket as it was when its orders were found."""

    address: int
    strides: list[tuple[int, ...]]
    orders: dict[str, MemoryOrder]


class BucketOrders:
    """Keeps the orders of all buckets of one model, as long as they last."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def find(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        values: torch.Tensor,
    ) -> dict[str, MemoryOrder]:
        """Returns the orders of those parameters in bucket `index`, which holds `values`, that do
        not lie there row-major.

        Complex values count as pairs.

        Raises RuntimeError for a parameter that has other strides than the bucket. It looks at
        values only if the bucket, or strides, are new.
        """
        gradients = [p if p.grad is None else p.grad for p in parameters]
        address, strides = values.data_ptr(), [t.stride() for t in (*parameters, *gradients)]
        known = self._known.get(index)
        if known is not None and (known.address, known.strides) == (address, strides):
            return known.orders
        orders: dict[str, MemoryOrder] = {}
        start = 0
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            lying, wanted = _as_real(parameter), _as_real(gradient)
            part = values[start : start + lying.numel()]
            start += part.numel()
            if wanted.data_ptr() == part.data_ptr():  # DDP's gradient_as_bucket_view
                orders[name] = MemoryOrder.of_strides(wanted)
                continue
            orders[name] = MemoryOrder.of_strides(lying)
            if parameter.grad is not None and _lies_otherwise(part, wanted, orders[name]):
                raise RuntimeError(
                    f"{name} lies in memory in another order than when DistributedDataParallel "
                    "made its buckets, so that DDP would copy averages to the wrong elements: call "
                    "model.to(memory_format=...) before DistributedDataParallel(model), or wrap "
                    "the model again"
                )
        orders = {name: order for name, order in orders.items() if not order.is_row_major}
        self._known[index] = _Known(address, strides, orders)
        return orders


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values as DDP has them in a bucket."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _lies_otherwise(values: torch.Tensor, gradient: torch.Tensor, order: MemoryOrder) -> bool:
    """Whether the values are the gradient in another order than this one."""
    shape, gradient = gradient.shape, gradient.to(values.dtype)
    rows = tuple(range(len(shape)))
    others = {MemoryOrder.of(shape, dims) for dims in (rows, _USUAL.get(len(shape), rows))}
    others.discard(order)
    if not others or torch.equal(order.view(values), gradient):
        return False
    return any(torch.equal(other.view(values), gradient) for other in others)
