"""Where a rank exchanges the buckets of a device, beside the training that fills them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gradwire.torch.transports import Transport

_FIRST = -1  # what waits for the network is short, and others wait for it


class DeviceQueue:
    """A stream of its own on `device`, and what moves messages between its ranks."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        self.device = device
        self.transport = transport
        self._stream = torch.cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """What is queued here runs when `ready` has come, and what was queued here before."""
        with torch.cuda.stream(self._stream):  # None: no GPU's
            if ready is not None and self._stream is not None:
                self._stream.wait_event(ready)
            yield


def is_capturing(values: torch.Tensor) -> bool:
    """Whether the current stream's work becomes a CUDA graph."""
    return values.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark_ready(values: torch.Tensor) -> torch.cuda.Event | None:
    """An event behind what is queued for the values; None where they are on the CPU."""
    if values.device.type != "cuda":
        return None
    return torch.cuda.current_stream(values.device).record_event()
