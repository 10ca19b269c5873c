"""A device that is not the CPU: its tensors are arrays which nothing but a copy reads.

    install()
    model.to(DEVICE)

It is PyTorch's PrivateUse1, whose operations run in Python. A tensor has an array on the CPU, which
only this module sees; its memory has no address, and an operation of it with a tensor on the CPU is
an error. `counts` has the copies to the host and back, and how often the host waited for a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "array_device"
DEVICE = f"{NAME}:0"
GROUP = "array_group"
counts: Counter[str] = Counter()

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_WAITS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_FACTORIES = ("empty.memory_format", "empty_strided")


class ArrayTensor(torch.Tensor):
    """A tensor on the device."""

    array: torch.Tensor

    @staticmethod
    def __new__(cls, array: torch.Tensor) -> ArrayTensor:
        made: ArrayTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            array.size(),
            strides=array.stride(),
            storage_offset=array.storage_offset(),
            dtype=array.dtype,
            device=torch.device(DEVICE),
        )
        made.array = array
        return made

    def data_ptr(self) -> int:
        """As an identity: on a device it is no place in the host's memory."""
        return self.array.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"ArrayTensor({self.array})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # PyTorch's annotation lacks `func`
        cls, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
    wanted = kwargs.get("device")
    if func in _COPIES:
        _count_copy(func, given, wanted)
    elif any(not isinstance(a, ArrayTensor) and a.dim() > 0 for a in given):
        raise RuntimeError(f"{func}: expected all tensors on the same device, {DEVICE} and cpu")
    if func in _WAITS:
        counts["waits"] += 1
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    made_of = {id(t.array): t for t in given if isinstance(t, ArrayTensor)}

    def array_of(tensor: ArrayTensor) -> torch.Tensor:
        return tensor.array

    result = func(
        *tree_map_only(ArrayTensor, array_of, args), **tree_map_only(ArrayTensor, array_of, kwargs)
    )
    to_host = func is _aten.copy_.default and not isinstance(args[0], ArrayTensor)
    if to_host or (wanted is not None and torch.device(wanted).type == "cpu"):
        return result

    def tensor_of(array: torch.Tensor) -> torch.Tensor:
        return made_of[id(array)] if id(array) in made_of else ArrayTensor(array)

    return tree_map_only(torch.Tensor, tensor_of, result)


def _count_copy(func: Any, given: list[torch.Tensor], wanted: Any) -> None:
    source = isinstance(given[-1], ArrayTensor)
    if func is _aten.copy_.default:
        target = isinstance(given[0], ArrayTensor)
    else:
        target = source if wanted is None else torch.device(wanted).type == NAME
    if source != target:
        counts["to_host" if source else "to_device"] += 1
        counts["bytes"] += given[-1].nbytes


def _operation(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(_aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(func, args, kwargs)


_library: torch.library.Library | None = None


def install() -> None:
    """Makes the device known to PyTorch; once is enough."""
    global _library
    if _library is not None:
        return
    _setup_privateuseone_for_python_backend(NAME)
    _library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        _library.impl(name, _operation(name), "PrivateUse1")


def to_device(model: torch.nn.Module) -> torch.nn.Module:
    """Moves its parameters and buffers, which become other objects."""
    install()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(DEVICE)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class ArrayGroup(dist.ProcessGroup):
    """Ranks that send each other tensors of the device alone, as NCCL does with those of GPUs."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # that of a group in Python
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _run(self, name: str, *given: Any) -> Any:
        for tensor in tree_flatten(given)[0]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, ArrayTensor):
                raise RuntimeError(f"{name}: no backend for tensors on {tensor.device}")
        arrays = tree_map_only(ArrayTensor, lambda tensor: tensor.array, given)
        return getattr(self._gloo, name)(*arrays)

    def broadcast(self, *given: Any) -> Any:
        return self._run("broadcast", *given)

    def allgather(self, *given: Any) -> Any:
        return self._run("allgather", *given)

    def allreduce(self, *given: Any) -> Any:
        return self._run("allreduce", *given)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        return GROUP


def new_group() -> dist.ProcessGroup:
    """All ranks, over tensors of the device alone."""
    install()
    if GROUP not in dist.Backend.backend_list:
        dist.Backend.register_backend(GROUP, ArrayGroup, devices=[NAME])
    return dist.new_group(backend=GROUP)
