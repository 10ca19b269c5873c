"""The names and shapes of a model's parameters, and the options of an optimizer's groups."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradwire.torch.tensor_memory import (
    SHARES_WITH_ITSELF,
    flaw_of_memory,
    overlaps_itself,
    require_memory,
    require_own_memory,
)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Around code, or as a decorator: it computes without gradients, and what it makes are ordinary
    tensors, which can be changed anywhere, although the program may be in inference mode, under
    `with torch.device(...)` or in another mode of its own.

    The default dtype belongs to the whole process, whose other threads use it. So each factory
    names its dtype (and device) nevertheless.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def writing_to(*tensors: torch.Tensor) -> AbstractContextManager[object]:
    """Around code that changes the tensors, of which some may have been made in inference mode:
    these can be changed only there."""
    is_inference = any(tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if is_inference else contextlib.nullcontext()


EXCHANGED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of parameters
NamedShape = tuple[str, list[int]]
NamedTensor = tuple[str, torch.Tensor]
Options = dict[str, Any]  # of one parameter group
_NO_OPTIONS = {"params", "param_names"}  # entries of a group that are none
_PLAIN = (bool, int, float, str, type(None))

_REPLICATE = "torch.distributed._composable.replicate"

# Of modules that wrap another one: compiled, with activation checkpoints, sharded.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """The name of a parameter or buffer that rules, errors, reports and states have: that of the
    model without the wrappers, so that wrapping a model changes none."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those of the model in DistributedDataParallel, if it is in that."""
    return [(clean_name(name), p) for name, p in unwrap(model).named_parameters()]


def named_buffers(model: nn.Module) -> list[NamedTensor]:
    return [(clean_name(name), buffer) for name, buffer in unwrap(model).named_buffers()]


def unwrap(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel, or the model itself; both may be compiled."""
    inner = uncompiled(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def refuse_wrapped(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Raises ValueError if DistributedDataParallel or `replicate` averages the gradients of any of
    these, or FullyShardedDataParallel (FSDP1) shards them. (By names: their modules take long to
    import.)"""
    ours = set(map(id, tensors))
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        if isinstance(module, DistributedDataParallel):
            said = (
                "DistributedDataParallel, which averages gradients itself: give the module in it, "
                "and call that"
            )
        elif any(kind.__module__ == _REPLICATE for kind in kinds):
            said = (
                "replicate(), which averages gradients itself: leave that out, or take "
                "DistributedDataParallel in its place, and call compress with that"
            )
        elif any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
            said = (
                "FullyShardedDataParallel, and each rank has other values of it: take fully_shard "
                "(FSDP2) and FullyShardComm, which compresses what that sends"
            )
        else:
            continue
        if not ours.isdisjoint(map(id, module.parameters())):
            raise ValueError(f"{clean_name(f'{name}.').rstrip('.') or 'the model'} is in {said}")


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given; any other module itself."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or Inf. (torch.isfinite takes 7 bytes of memory for a float32.)"""
    if values.numel() == 0:
        return True
    return all(map(math.isfinite, torch.stack(torch.aminmax(values.detach())).cpu().tolist()))


def name_parameters(
    optimizer: Optimizer,
    named: Iterable[NamedTensor] | None,
    dtypes: Sequence[torch.dtype] = EXCHANGED,
) -> list[NamedTensor]:
    """The optimizer's parameters in the order of its groups, with the names that `named` has.

    None: their names are "group.place".
    Raises ValueError for a parameter without a name, TypeError for one that is not dense, of
    another dtype, an inference tensor, whose values are not in its memory, or which has elements in
    the memory of others.
    """
    names = None if named is None else {id(tensor): clean_name(name) for name, tensor in named}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            name = f"{index}.{place}" if names is None else names.get(id(tensor))
            if name is None:
                gathered = "; a forward pass gathers them: call model.reshard()"
                raise ValueError(
                    f"parameter {place} of group {index} is not among the named parameters of the "
                    f"model{gathered if is_sharded(tensor) else ''}; its shape is "
                    f"{list(tensor.shape)}"
                )
            odd = _form_of(tensor)
            if odd or tensor.dtype not in dtypes:
                valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise TypeError(
                    f"dense {valid} parameters are exchanged; {name} is "
                    f"{odd or _describe_dtype(tensor.dtype)}"
                )
            require_trainable(name, tensor)
            found.append((name, tensor))
    require_own_memory(found)
    return found


def require_trainable(name: str, parameter: torch.Tensor) -> None:
    """Raises TypeError for an inference tensor, which no step can change, and for a tensor whose
    memory does not hold its values."""
    if parameter.is_inference():
        raise TypeError(
            f"{name} was made inside torch.inference_mode(), so it can't be trained: make the "
            "model outside"
        )
    if parameter.is_meta:
        raise TypeError(f"{name} is on the device meta, without values: initialize the model first")
    flaw = flaw_of_memory(parameter)
    if flaw:
        raise TypeError(f"{name} is {flaw}: make a parameter that holds its values")


def tensors_in_common(
    model: nn.Module, kind: str, named: Iterable[NamedTensor]
) -> list[NamedTensor]:
    """Those of the model's parameters or buffers (`kind`) that all ranks take over from one of
    them: without those that DistributedDataParallel is told to ignore.

    Raises TypeError for one into which another rank's values can't be written.
    """
    ignored = set(map(clean_name, getattr(model, "_ddp_params_and_buffers_to_ignore", ())))
    found = [
        (name, tensor)
        for name, tensor in named
        if name not in ignored and not getattr(tensor, "_ddp_ignored", False)
    ]
    for name, tensor in found:
        if odd := _form_of(tensor):
            why = odd
        elif tensor.is_meta:
            why = "on the device meta, without values"
        elif flaw := flaw_of_memory(tensor):
            why = flaw
        elif overlaps_itself(tensor):
            why = SHARES_WITH_ITSELF
        else:
            continue
        raise TypeError(
            f"the {kind} {name} is {why}; the ranks can't take over each other's values of it: "
            "make it a dense tensor of its own, or leave it out by DistributedDataParallel."
            f"_set_params_and_buffers_to_ignore_for_model(model, ['{name}'])"
        )
    return found


def _describe_dtype(dtype: torch.dtype) -> str:
    """With what to do instead."""
    if dtype.is_complex:
        return f"{dtype}: make torch.view_as_real of it the parameter"
    return f"{dtype}: make the model float32 (model.float())"


def _form_of(tensor: torch.Tensor) -> str:
    """What a tensor is whose values are not numbers in rows and columns, and what to train instead;
    empty for a dense one."""
    if is_lazy(tensor):
        return "lazy, without a shape: call the model once before"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}): train tensor.dequantize(), and quantize afterwards"
    if tensor.is_nested:
        return f"nested ({tensor.layout}): make each part of it a parameter"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout}): make tensor.to_dense() the parameter"
    return ""


def shapes_of(named: Sequence[NamedTensor]) -> list[NamedShape]:
    return [(name, list(tensor.shape)) for name, tensor in named]


def split_like(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `values` (flat), which holds one tensor after the other, in the tensors' shapes."""
    parts = values.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def require_dense(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself. Raises TypeError if it is sparse."""
    if gradient.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({gradient.layout}), and gradwire exchanges dense "
            "gradients alone: make its nn.Embedding or nn.EmbeddingBag with sparse=False"
        )
    return gradient


def copy_gradient(name: str, parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the gradient, or zeros without one, to `values`. Raises TypeError if it is sparse,
    or its memory does not hold it."""
    if parameter.grad is None:
        values.zero_()
    else:
        gradient = require_dense(name, parameter.grad)
        require_memory(name, gradient)
        values.copy_(gradient.detach())  # of create_graph=True


def plain_options(param_groups: Sequence[dict[str, Any]]) -> list[Options]:
    """The entries that are numbers, strings, truth values, None, or lists of these, by name."""
    plain: list[Options] = []
    for group in param_groups:
        plain.append({})
        for key in sorted(group.keys() - _NO_OPTIONS):
            value = group[key]
            if value.__class__ in _PLAIN:
                plain[-1][key] = value
                continue
            with contextlib.suppress(TypeError):
                plain[-1][key] = plain_value(value)
    return plain


def plain_value(value: Any) -> Any:
    """The value as JSON holds it. Raises TypeError for a value of another type."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return plain_value(value.item())
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        return plain_value(value.item())
    if isinstance(value, tuple | list):
        return [plain_value(entry) for entry in value]
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"{type(value).__name__} is not sent")


class OptionsText:
    """The options of optimizers as text that ranks can compare."""

    def __init__(self) -> None:
        self._plain: list[list[Options]] = []
        self._text = ""

    def of(self, optimizers: Mapping[str, Optimizer]) -> str:
        """A line for each option, in which the optimizer has the name given here."""
        plain = [plain_options(optimizer.param_groups) for optimizer in optimizers.values()]
        if plain != self._plain:
            self._plain = plain
            self._text = "\n".join(
                f"{key} of group {place} of {name}: {value!r}"
                for name, groups in zip(optimizers, plain, strict=True)
                for place, group in enumerate(groups)
                for key, value in group.items()
            )
        return self._text


def options_of(param_groups: Sequence[dict[str, Any]]) -> list[Options]:
    """All entries of the groups but their parameters."""
    return [
        {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        for group in param_groups
    ]


def group_of_shards(named: Iterable[NamedTensor]) -> dist.ProcessGroup | None:
    """The ranks among which all the tensors are sharded; None if they are plain tensors.

    Raises ValueError for a mix of both, for different meshes, for a mesh that is not of one
    dimension, and for tensors that ranks of it have as a whole.
    """
    tensors = list(named)
    sharded = [(name, tensor) for name, tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return None
    if len(sharded) < len(tensors):
        plain = next(name for name, tensor in tensors if not is_sharded(tensor))
        raise ValueError(f"{sharded[0][0]} is sharded and {plain} is not: call fully_shard for all")
    meshes = [(n, t.device_mesh, t.placements) for n, t in cast(list[tuple[str, Any]], sharded)]
    first_name, first, _ = meshes[0]
    for name, mesh, (*outer, inner) in meshes:
        if not (inner.is_shard() and all(placement.is_replicate() for placement in outer)):
            raise ValueError(
                f"{name} has the placements {(*outer, inner)}, as of tensor parallelism, and ranks "
                "would end with different values of it: FullyShardComm takes such a model after "
                "fully_shard on another dimension of the mesh"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"{name} is sharded on a mesh of {mesh.ndim} dimensions, whose replicas average "
                "gradients already: call fully_shard(..., mesh=mesh['shard']), and give the group "
                "of the other dimension as process_group"
            )
        if mesh != first:
            raise ValueError(f"{first_name} and {name} are sharded on different meshes")
    group: dist.ProcessGroup = first.get_group()
    return group


def device_of(named: Iterable[NamedTensor]) -> torch.device:
    """Where all of them are; the CPU if there are none. Raises ValueError for several devices."""
    first = None
    for name, tensor in named:
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(
                f"{first[0]} is on {first[1]} and {name} on {tensor.device}: a rank exchanges the "
                "parameters of one device. Move the model to one, or give each part of it an "
                "optimizer, or a DistributedDataParallel, of its own"
            )
    return torch.device("cpu") if first is None else first[1]


def wide_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values as float32, in memory of their own; a float32 tensor itself, not to be changed."""
    return tensor.detach().float()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 has sharded it."""
    return hasattr(tensor, "_local_tensor")  # a DTensor, whose module takes long to import
