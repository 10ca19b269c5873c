"""What the replays of CUDA graphs leave on a device for the step behind them."""

from __future__ import annotations

import torch


class Replays:
    """Whether a step in a graph was not finite, which is a matter of all its buckets.

    skipped   of the step before: what it sent is put back
    """

    def __init__(self, device: torch.device) -> None:
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        self._skips = torch.zeros_like(self.skipped)  # of the step under way
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def begin_step(self) -> None:
        self.skipped.copy_(self._skips)
        self._skips.zero_()

    def note(self, void: torch.Tensor) -> None:
        """`void`: bool, of one value: whether a bucket of the step is not finite."""
        self._skips |= void

    def end_step(self) -> None:
        self._count += self._skips

    @property
    def count(self) -> int:
        """Steps that were not finite. Waits for all that the device does."""
        if self._count.device.type == "cuda":
            torch.cuda.synchronize(self._count.device)
        return int(self._count)
