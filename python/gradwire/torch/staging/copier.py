"""Copies between a device and the host."""

from __future__ import annotations

import torch


def new_page_locked(n: int, dtype: torch.dtype) -> torch.Tensor:
    """So many values in page-locked memory of the host, for memory="pinned".

    Raises RuntimeError where PyTorch has no such memory.
    """
    try:
        return torch.empty(n, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"memory='pinned': no page-locked memory for {n * dtype.itemsize:,} bytes ({error}): "
            "memory='host' needs none"
        ) from error


class Copier:
    """Copies between a device and the host, in the order of the calls, on the current stream.

    has_streams: The copies are queued there. Without, they have ended when a call returns: nothing
    else could tell when. (mps queues copies, too, if it may.)
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams

    def to_host(self, values: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(values, non_blocking=self._has_streams)

    def to_device(self, host: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(host, non_blocking=self._has_streams)
