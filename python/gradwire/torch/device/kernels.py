"""The kernels for a kind of device."""

from __future__ import annotations

import importlib
from typing import Any

import torch

# The module with the kernels for each kind of device. The CPU needs no such module.
KERNEL_MODULES = {"cuda": "gradwire._cuda"}


def require_kernels(device: torch.device) -> Any:
    """The module whose kernels run on this device: `gradwire._cuda`, or one that replaces it.

    Raises RuntimeError if gradwire was built without it, TypeError for other kinds of device.
    """
    module = KERNEL_MODULES.get(device.type)
    if module is None:
        raise TypeError(f"gradwire exchanges gradients on the CPU and on CUDA, not on {device}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"gradients on {device}: this gradwire was built without CUDA. Build it where nvcc is: "
            "in its source tree, pip install . -C cmake.define.GRADWIRE_CUDA=ON"
        ) from error


def has_kernels(device: torch.device) -> bool:
    """Whether gradients on this device are encoded and decoded there, and not on the CPU."""
    return device.type in KERNEL_MODULES


def stream_of(device: torch.device) -> int:
    """The handle of the current stream."""
    if device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle
