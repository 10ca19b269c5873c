"""Arrays and tensors as bytes, whoever made them: NumPy, PyTorch, or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import missing
from gradwire.memory_overlap import Reach, first_overlap
from gradwire.tensor_dtypes import SAFETENSORS_BITS
from gradwire.weights.errors import WeightsError
from gradwire.weights.plain import plain_tensor

Bytes = NDArray[np.uint8]
Place = tuple[int, ...]

# How NumPy, ml_dtypes and PyTorch call the dtypes of .safetensors files.
_NAMES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
PROGRAMS = {dtype: name for name, dtype in _NAMES.items()}


class Placed:
    """A tensor or a part of it. at: the indices of its first element in the whole tensor, whose
    shape is `whole`; both are empty where it is the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: Place
    whole: tuple[int, ...]

    @property
    def key(self) -> str:
        return key_of(self.name, self.at)

    @property
    def form(self) -> tuple[object, ...]:
        """What it is, apart from its values."""
        return self.name, self.dtype, self.shape, self.at, self.whole

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class View(Placed):
    """A tensor, or the part of it that a rank holds, with its memory.

    values: a NumPy array or a PyTorch tensor. Bytes of a file are an array of uint8 that has one
    dimension more than `shape`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Any
    at: Place = ()
    whole: tuple[int, ...] = ()

    def read(self) -> Bytes:
        """Its bytes in C order: its own memory where that holds them so, or a copy."""
        if is_torch(self.values):
            import torch

            values = self.values.resolve_conj().resolve_neg().cpu().contiguous()
            # A single element may have any stride.
            return values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
        return np.ascontiguousarray(self.values).reshape(-1).view(np.uint8)

    def read_copy(self) -> Bytes:
        """Its bytes in C order, in memory that nobody else writes."""
        data = self.read()
        return data.copy() if data.ctypes.data == _address(self.values) else data

    def write(self, data: Bytes) -> None:
        """Gives it these bytes, which `read` may have returned."""
        if not data.size:
            return
        is_there = data.ctypes.data == _address(self.values)
        if is_torch(self.values):
            import torch

            if is_there:  # PyTorch has not seen the write
                torch.autograd.graph.increment_version(self.values)
                return
            whole = torch.empty(self.values.shape, dtype=self.values.dtype, device="cpu")
            whole.reshape(-1).view(torch.uint8).numpy()[:] = data
            with torch.inference_mode(self.values.is_inference()), torch.no_grad():
                self.values.copy_(whole)
        elif not is_there:
            self.values[...] = data.view(self.values.dtype).reshape(self.values.shape)

    @cached_property
    def memory(self) -> tuple[Any, ...]:
        """The same for two tensors that are the same memory, seen in the same way."""
        values, where, signs = self.values, "cpu", (False, False)
        if is_torch(values):
            where, signs = str(values.device), (values.is_conj(), values.is_neg())
        return where, _address(values), self.dtype, self.shape, self._axes, signs

    @cached_property
    def reach(self) -> Reach:
        """Where its elements lie; there must be some."""
        where, address, *_ = self.memory
        # What has negative strides has the memory of what is turned round.
        first = address + sum((n - 1) * min(stride, 0) for n, stride in self._axes)
        strides = [abs(stride) for _, stride in self._axes]
        return Reach(self.key, where, first, self.values.shape, strides, self.values.itemsize)

    @property
    def is_writable(self) -> bool:
        """Whether its elements can be written, and share no memory."""
        if not prod(self.values.shape):
            return True
        can_write = is_torch(self.values) or self.values.flags.writeable
        return can_write and first_overlap([self.reach]) is None

    @cached_property
    def _axes(self) -> tuple[tuple[int, int], ...]:
        """The length and the stride in bytes of each dimension."""
        if is_torch(self.values):
            strides = [self.values.itemsize * stride for stride in self.values.stride()]
        else:
            strides = self.values.strides
        return tuple(zip(self.values.shape, strides, strict=True))

    def is_same_memory(self, other: View | None) -> bool:
        """Whether the other view, which was made later, is of the same memory."""
        if other is None:
            return False
        if is_torch(self.values) and not self.values.data_ptr():
            return True  # some devices have no addresses, and empty tensors
        return not prod(self.shape) or self.memory == other.memory

    def part(self, at: Place, shape: tuple[int, ...]) -> View:
        """The view of a part of a whole tensor."""
        if not at:
            return self
        cut = tuple(slice(begin, begin + n) for begin, n in zip(at, shape, strict=True))
        return View(self.name, self.dtype, shape, self.values[cut], at, self.shape)


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a tensor that this rank publishes; DTensors need none.

    Args:
        values: The array or tensor.
        at: The indices of its first element in the whole tensor.
        whole: The shape of the whole tensor.
    """

    values: Any
    at: tuple[int, ...]
    whole: tuple[int, ...]


def key_of(name: str, at: Place) -> str:
    return f"{name}@{','.join(map(str, at))}" if at else name


def same_name(key: str) -> WeightsError:
    return WeightsError(
        f"two tensors have the name {key!r}; that of a part ends with its place. Let rename= give "
        "each a name of its own, and no name of another tensor"
    )


def is_torch(values: Any) -> bool:
    # Another thread may be importing PyTorch, which has no tensors before.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(values, tensor)


def tensors_of(state: Any) -> Mapping[str, Any]:
    """The dictionary of tensors that `state` is, or that its `state_dict()` gives. A module that
    torch.compile has made has the names of the one that it was made of."""
    state = getattr(state, "_orig_mod", state)
    found = state if isinstance(state, Mapping) else getattr(state, "state_dict", dict)()
    if not isinstance(found, Mapping) or not (found or isinstance(state, Mapping)):
        raise WeightsError(
            f"{type(state).__name__} is neither a dictionary of arrays or tensors nor a model with "
            "state_dict()"
        )
    return found


def views_of(
    state: Any,
    rename: Callable[[str], str] = str,
    refused: dict[str, WeightsError] | None = None,
    in_team: bool = False,
) -> dict[str, View]:
    """The tensors of a dictionary or a model by their keys, in its order.

    in_team: whether other ranks publish, too, and parts that one of them has are left out. Raises
    WeightsError, which names what is no tensor of plain values; with `refused` it stands there.
    """
    found: dict[str, View] = {}
    for own_name, values in tensors_of(state).items():
        name = checked_name(own_name, rename)
        try:
            view = _view(name, values, in_team)
        except WeightsError as error:
            if refused is None:
                raise
            refused[name], view = error, None
        if view is None:
            continue
        if view.key in found:
            raise same_name(view.key)
        found[view.key] = view
    return found


def checked_name(own: Any, rename: Callable[[str], str] = str) -> str:
    name = rename(own) if isinstance(own, str) else own
    if not isinstance(name, str) or name in ("", "__metadata__"):
        raise WeightsError(
            f"{name!r} cannot be the name of a tensor: names are texts, not empty, and "
            "'__metadata__' is what .safetensors files call something else"
        )
    return name


def dtype_named(dtype: Any) -> str:
    """The safetensors dtype of a NumPy or PyTorch dtype, or of its name."""
    text = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")  # np.float16 is a class
    found = _NAMES.get(text) or _NAMES.get(getattr(dtype, "name", text))
    if found is None:
        raise WeightsError(
            f"dtype {text} is not supported; take one of {', '.join(sorted(_NAMES))}"
        )
    return found


def make_values(dtype: str, shape: tuple[int, ...], use_torch: bool) -> Any:
    """A new tensor of zeros: of PyTorch where `use_torch` says so or NumPy has no such dtype."""
    program = PROGRAMS.get(dtype)
    if program is None:
        raise WeightsError(f"a tensor of {dtype} can be in a file only")
    if not use_torch:
        with suppress(TypeError):
            return np.zeros(shape, program)
    torch = require_torch(f"a tensor of {program}")
    return torch.zeros(shape, dtype=getattr(torch, program), device="cpu")


def typed_values(dtype: str, data: Bytes, use_torch: bool) -> Any:
    """Bytes as a flat array or tensor; NumPy has unsigned integers for dtypes that it lacks."""
    if use_torch:
        typed = make_values(dtype, (len(data) * 8 // SAFETENSORS_BITS[dtype],), True)
        View("", dtype, tuple(typed.shape), typed).write(data)
        return typed
    try:
        return data.view(PROGRAMS.get(dtype, ""))
    except TypeError:
        return data.view(f"u{max(SAFETENSORS_BITS[dtype] // 8, 1)}")


def raw_values(data: Bytes, shape: tuple[int, ...]) -> Bytes:
    """Bytes of a tensor as an array that can be cut as the tensor is. Elements of less than a byte
    stay one row."""
    numel = prod(shape)
    whole = numel == 0 or data.size % numel == 0
    return data.reshape(*shape, data.size // max(numel, 1)) if whole else data


def copy_of(view: View) -> View:
    """The tensor in memory of its own, as bytes."""
    return replace(view, values=raw_values(view.read_copy(), view.shape))


def element_of(dtype: str) -> tuple[int, bool]:
    """Width in bytes and order, float or integer, of the elements that deltas count in."""
    is_float = dtype.startswith(("F16", "F32", "BF", "F8", "C64")) and dtype != "F8_E8M0"
    return min(max(SAFETENSORS_BITS[dtype] // 8, 1), 4), is_float


def tied_names(views: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    """Pairs: a tensor's key, and that of an earlier one which is the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    for key, view in views.items():
        if prod(view.shape) and first.setdefault(view.memory, key) != key:
            yield key, first[view.memory]


def overlapping(views: Mapping[str, View]) -> Iterator[str]:
    """The keys of tensors in whose reach of memory others begin, but for those that are tied."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for key, view in views.items():
        if prod(view.shape):
            names.setdefault(view.memory, []).append(key)
    last: tuple[Reach, list[str]] | None = None
    reaches = [(views[keys[0]].reach, keys) for keys in names.values()]
    for reach, keys in sorted(reaches, key=lambda one: (one[0].device, one[0].address)):
        if last is not None and reach.device == last[0].device and reach.address < last[0].end:
            yield from [*last[1], *keys]
            if reach.end <= last[0].end:
                continue
        last = reach, keys


def _view(name: str, values: Any, in_team: bool) -> View | None:
    """None: another rank publishes it."""
    if isinstance(values, View):
        return values
    at: Place = ()
    whole: tuple[int, ...] = ()
    if isinstance(values, Shard):
        values, at, whole = values.values, _integers(name, values.at), _integers(name, values.whole)
    elif hasattr(values, "device_mesh") and hasattr(values, "placements"):
        sharded = _shard_of(name, values, in_team)
        if sharded is None:
            return None
        values, at, whole = sharded
    if is_torch(values):
        values = plain_tensor(name, values)
    elif isinstance(values, np.ma.MaskedArray):
        raise WeightsError(
            f"tensor {name!r} is a masked array, and a mask cannot be published: give its "
            "filled(), or its data and its mask as two tensors"
        )
    elif hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
        values = np.asarray(values) if hasattr(values, "__array__") else np.from_dlpack(values)
    else:
        is_nested = isinstance(values, Mapping | list | tuple)
        nested = "; flatten() makes tensors of a nested state" if is_nested else ""
        raise WeightsError(
            f"{name!r} is of type {type(values).__name__}; only arrays and tensors are published"
            f"{nested}"
        )
    try:
        dtype = dtype_named(values.dtype)
    except WeightsError as error:
        raise WeightsError(f"tensor {name!r}: {error}") from None
    if not is_torch(values) and not values.dtype.isnative:
        native = values.dtype.newbyteorder("<").str
        raise WeightsError(f"tensor {name!r} has big-endian values; astype({native!r}) turns them")
    view = View(name, dtype, tuple(values.shape), values, at, whole)
    fits = all(b >= 0 and b + n <= w for b, n, w in zip(at, view.shape, whole, strict=False))
    if (at or whole) and not (len(at) == len(whole) == len(view.shape) and fits):
        raise WeightsError(
            f"tensor {name!r}: a part of shape {list(view.shape)} at {list(at)} is not within "
            f"{list(whole)}"
        )
    # Where others hold something, no part is empty: theirs may begin at the same place.
    return None if in_team and at and 0 not in whole and not view.numel else view


def _integers(name: str, given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, given))
    except TypeError:
        raise WeightsError(
            f"tensor {name!r}: a part has its place and the whole shape as lists of integers, not "
            f"{given!r}"
        ) from None


def _shard_of(name: str, values: Any, in_team: bool) -> tuple[Any, Place, tuple[int, ...]] | None:
    """What this rank holds of a DTensor; None where it is not among its ranks. In a team also where
    another rank publishes the same."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = values.device_mesh, values.placements
    coordinate = mesh.get_coordinate()
    replica = any(
        where > 0 and placement.is_replicate()
        for where, placement in zip(coordinate or (), placements, strict=True)
    )
    for placement in placements:
        if placement.is_partial() or type(placement).__name__ == "_StridedShard":
            raise WeightsError(
                f"tensor {name!r} is a DTensor with {placement}, which is no block of it; "
                "redistribute() it"
            )
    local = values.to_local()
    if coordinate is None or (in_team and replica):
        return None
    whole = tuple(values.shape)
    if tuple(local.shape) == whole:
        return local, (), ()
    _, at = compute_local_shape_and_global_offset(whole, mesh, placements)
    return local, tuple(at), whole


def _address(values: Any) -> int:
    if not is_torch(values):
        return values.ctypes.data
    return values.data_ptr() or id(values)  # some devices have no addresses


def require_torch(what: str) -> Any:
    try:
        import torch
    except ImportError:
        lacking = missing("PyTorch", "'.[torch]'")
        raise WeightsError(f"{what}: {lacking}") from None
    return torch
