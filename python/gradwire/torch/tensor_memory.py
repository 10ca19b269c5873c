"""Where the values of tensors lie in memory: whether it holds them, in which order, and whether
others share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.memory_overlap import Reach, first_overlap

SHARES_WITH_ITSELF = "expanded or made of overlapping windows: its elements share memory"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, in the same memory; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after each write to the tensor that PyTorch sees."""
    local = local_of(tensor)
    return local.data_ptr(), local._version


def _lacking_values(tensor: torch.Tensor) -> str:
    """What a tensor is whose values lie outside of its memory; empty if none do, or on the device
    meta."""
    tensor = local_of(tensor)
    if tensor.numel() == 0 or tensor.is_meta:
        return ""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    storage = tensor.untyped_storage()
    # (On another device than the CPU it need not have an address.)
    has_address = tensor.device.type != "cpu" or storage.data_ptr() != 0
    if storage.device == tensor.device and has_address and storage.nbytes() >= end:
        return ""
    kind = type(tensor).__name__
    return f"a {kind} whose memory does not hold its values (fake, or freed)"


def flaw_of_memory(tensor: torch.Tensor) -> str:
    """Why the tensor's memory does not hold its values; empty if it does, or on the device meta.
    Reading freed memory ends the process, and PyTorch's negative bit is lost where memory is read.
    """
    negative = "stored as its negative (see tensor.resolve_neg())" if tensor.is_neg() else ""
    return _lacking_values(tensor) or negative


def require_memory(name: str, gradient: torch.Tensor) -> None:
    """Raises TypeError for the gradient of a parameter whose memory does not hold its values. (Half
    a microsecond for an ordinary one.)"""
    if gradient.layout != torch.strided:
        return
    if gradient.__class__ is torch.Tensor and gradient.is_contiguous():
        end = (gradient.storage_offset() + gradient.numel()) * gradient.itemsize
        if gradient.untyped_storage().nbytes() >= end:
            return
    if flaw := _lacking_values(gradient):
        raise TypeError(f"the gradient of {name} is {flaw}")


def _reaches_of(name: str, tensor: torch.Tensor) -> list[Reach]:
    """Nothing for a tensor without elements, or without an address."""
    local = local_of(tensor).detach()
    if local.is_meta or local.numel() == 0 or local.data_ptr() == 0:
        return []
    width = local.itemsize
    strides = [stride * width for stride in local.stride()]
    return [Reach(name, str(local.device), local.data_ptr(), local.shape, strides, width)]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two of its elements lie in the same memory."""
    return first_overlap(_reaches_of("", tensor)) is not None


def require_own_memory(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises TypeError for parameters of which two elements lie in the same memory, where each of
    them would be stepped."""
    pair = first_overlap(reach for name, tensor in named for reach in _reaches_of(name, tensor))
    if pair is None:
        return
    if pair[0] == pair[1]:
        raise TypeError(f"{pair[0]} is {SHARES_WITH_ITSELF}: make its clone() the parameter")
    raise TypeError(
        f"{pair[0]} and {pair[1]} share memory, and each would be stepped by itself: tie them by "
        "one nn.Parameter in both places, or make the clone() of one the parameter"
    )


def in_order_of(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values, to be the parameter's gradient: a copy in the parameter's order in memory, or
    themselves if they have it. Fused optimizers read both as one row."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, dtype=values.dtype).copy_(values)
