"""The CUDA stream on which a rank exchanges a device's buckets while the training goes on."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from gradwire._core import ShardCodecs

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


_HIGH_PRIORITY = -1  # the work of a bucket is short, and other ranks wait for it


class DeviceQueue:
    """A stream of its own on `device`, and the codecs whose work is queued there.

    offload_residuals: they lie in page-locked memory of the host.
    """

    def __init__(self, device: torch.device, offload_residuals: bool = False) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        with self.after(None):
            self.shard_codecs: ShardCodecs = require_kernels(device).shard_codecs(
                device.index or 0, stream_of(device), offload_residuals
            )

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Work that is queued here runs after `ready` and after the work queued here before."""
        if self._stream is None:  # the device is no GPU
            yield
            return
        # The device is entered first. Leaving a stream makes the thread's earlier device current:
        # in a new thread that is device 0, and this would create a CUDA context there.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield


def is_capturing(values: torch.Tensor) -> bool:
    """Whether the current stream's work becomes a CUDA graph."""
    return values.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark_ready(values: torch.Tensor) -> torch.cuda.Event | None:
    """An event after the work that is queued for the values; None if they are on the CPU."""
    if values.device.type != "cuda":
        return None
    return torch.cuda.current_stream(values.device).record_event()
