"""A device that is not the CPU: its tensors are arrays which nothing but a copy reads.

    install()
    model.to(DEVICE)

It is PyTorch's PrivateUse1, whose operations run in Python. A tensor has an array on the CPU, which
only this module sees; its memory has no address, and an operation of it with a tensor on the CPU is
an error. Its streams do all work at once, and the host does not know. `counts` has the copies to
the host and back, and how often the host waited: for a value, a stream, an event, or a copy that
was not queued. Waits of gradwire's communication thread are counted as "waits beside".
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map_only

from cluster import Cluster

# PyTorch 2.9 has no devices in Python.
_Module: Any = getattr(backend_registration, "_DummyBackendModule", object)
_make_known = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)

NAME = "arraydevice"
DEVICE = f"{NAME}:0"
GROUP = "array_group"
counts: Counter[str] = Counter()

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
}
_FACTORIES = ("empty.memory_format", "empty_strided")


def _count_wait() -> None:
    is_beside = threading.current_thread().name.startswith("gradwire")
    counts["waits beside" if is_beside else "waits"] += 1


class DeviceStream:
    """Of the device."""

    stream_id = device_index = device_type = 0  # FSDP2 of PyTorch 2.15 asks for them

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """Takes what torch.cuda.Stream takes."""

    def record_event(self) -> DeviceEvent:
        return DeviceEvent()

    def wait_event(self, event: DeviceEvent) -> None:
        """The work before the event has been done."""

    def wait_stream(self, stream: DeviceStream) -> None:
        """Its work has been done."""

    def synchronize(self) -> None:
        _count_wait()


class DeviceEvent:
    """In a stream of the device."""

    def record(self, stream: DeviceStream | None = None) -> None:
        """The work before it has been done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _count_wait()


class DeviceModule(_Module):  # type: ignore[misc]
    """What torch.cuda is for GPUs."""

    Stream, Event = DeviceStream, DeviceEvent

    def __init__(self) -> None:
        self._main, self._here = DeviceStream(), threading.local()

    def current_stream(self, device: Any = None) -> DeviceStream:
        found: DeviceStream = getattr(self._here, "stream", self._main)
        return found

    @contextlib.contextmanager
    def stream(self, stream: DeviceStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def device(self, device: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class ArrayStorage:
    """The memory of an array, as what a tensor on the device has."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.device = torch.device(DEVICE)
        self.size = self.nbytes = memory.nbytes
        self.data_ptr, self.resize_ = memory.data_ptr, memory.resize_


class ArrayTensor(torch.Tensor):
    """A tensor on the device."""

    array: torch.Tensor

    @staticmethod
    def __new__(cls, array: torch.Tensor, device: Any = DEVICE) -> ArrayTensor:
        made: ArrayTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            array.size(),
            strides=array.stride(),
            storage_offset=array.storage_offset(),
            dtype=array.dtype,
            device=torch.device(device),
        )
        made.array = array
        return made

    def data_ptr(self) -> int:
        """As an identity: on a device it is no place in the host's memory."""
        return self.array.data_ptr()

    def untyped_storage(self) -> Any:
        return ArrayStorage(self.array.untyped_storage())

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
        _count_copy(func, given, wanted, args[2:3] == (True,) or kwargs.get("non_blocking"))
    elif len({a.device for a in given if a.dim() > 0}) > 1:
        raise RuntimeError(f"{func}: expected all tensors on the same device")
    if func in _WAITS:
        _count_wait()
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

    places = [t.device for t in given if isinstance(t, ArrayTensor)]
    place = torch.device(wanted) if wanted is not None else places[0]

    def tensor_of(array: torch.Tensor) -> torch.Tensor:
        return made_of[id(array)] if id(array) in made_of else ArrayTensor(array, place)

    return tree_map_only(torch.Tensor, tensor_of, result)


def _count_copy(func: Any, given: list[torch.Tensor], wanted: Any, is_queued: Any) -> None:
    source = isinstance(given[-1], ArrayTensor)
    if func is _aten.copy_.default:
        target = isinstance(given[0], ArrayTensor)
    else:
        target = source if wanted is None else torch.device(wanted).type == NAME
    if source != target:
        counts["to_host" if source else "to_device"] += 1
        counts["bytes"] += given[-1].nbytes
        if not is_queued:
            _count_wait()


def _operation(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(_aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(func, args, kwargs)


_library: torch.library.Library | None = None


def cluster_of(world_size: int) -> Iterator[Cluster]:
    """A cluster whose ranks know the device; for a fixture."""
    cluster = Cluster(world_size)
    cluster.run(world_size, install)
    yield cluster
    cluster.close()


def install() -> None:
    """Makes the device known to PyTorch; once is enough."""
    global _library
    if _library is not None:
        return
    if _make_known is None:
        raise RuntimeError("this PyTorch has no devices in Python")  # tests/conftest.py skips it
    _make_known(NAME, DeviceModule())
    _keep_futures_on_the_host()
    dist.Backend.register_backend(GROUP, ArrayGroup, devices=[NAME])
    _library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        _library.impl(name, _operation(name), "PrivateUse1")


def _keep_futures_on_the_host() -> None:
    """A future of the device would take streams of it in C++, where it has none."""
    make = torch.futures.Future.__init__

    def init(future: Any, *, devices: Any = None) -> None:
        make(future, devices=[d for d in devices or () if torch.device(d).type != NAME])

    setattr(torch.futures.Future, "__init__", init)  # noqa: B010 - its type is generic


def to_device(model: torch.nn.Module, device: str = DEVICE) -> torch.nn.Module:
    """Moves its parameters and buffers, which become other objects."""
    install()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
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

    def all_gather_single(self, *given: Any) -> Any:
        return self._run("_allgather_base", *given)

    def reduce_scatter_single(self, *given: Any) -> Any:
        return self._run("_reduce_scatter_base", *given)

    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        return GROUP

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name


def new_group() -> dist.ProcessGroup:
    """All ranks, over tensors of the device alone."""
    install()
    return dist.new_group(backend=GROUP)


def make_mesh(replicas: int) -> DeviceMesh:
    """All ranks, for models that FSDP2 shards on the device."""
    shape = {"replicas": replicas, "shards": dist.get_world_size() // replicas}
    if replicas == 1:
        del shape["replicas"]
    groups: dict[int | str, Any] = dict.fromkeys(shape, GROUP)
    names = tuple(shape)
    return init_device_mesh(
        NAME, tuple(shape.values()), mesh_dim_names=names, backend_override=groups
    )
