"""Where a rank exchanges the buckets of a device, beside the training that fills them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from gradwire.torch.device_replays import Replays
from gradwire.torch.transports import Transport

_FIRST = -1  # what waits for the network is short, and others wait for it


class DeviceQueue:
    """A stream of its own on `device`, and what moves messages between its ranks."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        self.device = device
        self.transport = transport
        self.replays = Replays(device)
        self._stream = torch.cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """What is queued here runs when `ready` has come, and what was queued here before."""
        if self._stream is None:  # no GPU's
            yield
            return
        # The device first: whoever leaves a stream alone takes the device that was current, the
        # first one in a thread of its own, and makes a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield

    def after_all(self) -> AbstractContextManager[None]:
        """What is queued here runs when the device has done all that it has to do, replays of CUDA
        graphs in anybody's stream, too.
        """
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        return self.after(None)


def is_capturing(values: torch.Tensor) -> bool:
    """Whether the current stream's work becomes a CUDA graph."""
    return values.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark_ready(values: torch.Tensor) -> torch.cuda.Event | None:
    """An event behind what is queued for the values; None where they are on the CPU."""
    if values.device.type != "cuda":
        return None
    return torch.cuda.current_stream(values.device).record_event()
