"""A bucket that comes to the host in pieces, and residuals that lie elsewhere."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gradwire.torch.parameters import ordinary_tensors

if TYPE_CHECKING:
    from gradwire.torch.staging.stage import CopyStage

PIECE_BYTES = 1 << 23  # of a bucket, which are copied at once


class Arriving:
    """A bucket's values on the host, which arrive and go back in pieces. Here they are there.

    Attributes:
        values: Flat, of the bucket's dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def arrive(self, end: int) -> int:
        """Waits for the first `end` values. Returns how many of the first values are there."""
        return self.values.numel()

    def wait(self) -> None:
        """Waits for all values."""
        self.arrive(self.values.numel())

    def finished(self, begin: int, n: int) -> None:
        """The values [begin, begin + n) hold the result, and may go back."""

    def take_back(self) -> None:
        """What was finished changes again."""

    def check(self) -> None:
        """Raises what went wrong in `arrive` or `finished`."""


class Pieces(Arriving):
    """A bucket of a CopyStage."""

    def __init__(self, stage: CopyStage, there: torch.Tensor, host: torch.Tensor) -> None:
        """Begins to copy. In the stage's stream."""
        super().__init__(host)
        self._stage, self._there = stage, there
        self._error: Exception | None = None
        self._arrived = 0
        self._back: list[tuple[int, int]] = []  # begin and end of what goes back
        self._copied: deque[tuple[int, Any]] = deque()
        size = PIECE_BYTES // there.itemsize
        for begin in range(0, there.numel(), size):
            end = min(begin + size, there.numel())
            stage.copier.to_host(there[begin:end], host[begin:end])
            self._copied.append((end, stage.mark()))

    @property
    def is_there(self) -> bool:
        """Whether `wait` would return at once."""
        return all(copied is None or copied.query() for _, copied in self._copied)

    def arrive(self, end: int) -> int:
        try:
            with self._stage.copying():
                while self._arrived < end:
                    self._arrived, copied = self._copied.popleft()
                    if copied is not None:
                        copied.synchronize()  # the only waits for the device
        except RuntimeError as error:
            self._fail(error)
        return self._arrived

    def wait(self) -> None:
        super().wait()
        self.check()

    @ordinary_tensors()
    def finished(self, begin: int, n: int) -> None:
        if self._error is not None:
            return
        try:
            with self._stage.copying(), self._stage.after(None):
                self._stage.copier.to_device(
                    self.values[begin : begin + n], self._there[begin : begin + n]
                )
            self._back.append((begin, begin + n))
        except RuntimeError as error:
            self._fail(error)

    def take_back(self) -> None:
        self._back.clear()

    def put_rest(self) -> None:
        """Copies what has not gone back."""
        self.wait()
        at = 0
        for begin, end in [*sorted(self._back), (self.values.numel(), 0)]:
            if begin > at:
                self.finished(at, begin - at)
            at = max(at, end)
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._arrived = self.values.numel()


class KeptBytes:
    """Memory of residuals, uint8 and flat. Here it is the host's, for good.

    Attributes:
        stays: Whether it is.
    """

    stays = True

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[torch.Tensor]:
        """Inside, the bytes are in this memory of the host, and may be changed."""
        yield self._memory


class ResidualsOnDevice(KeptBytes):
    """Residuals on the device. They come to the host for each exchange."""

    stays = False

    def __init__(self, stage: CopyStage, nbytes: int) -> None:
        super().__init__(torch.zeros(nbytes, dtype=torch.uint8, device=stage.device))
        self._stage = stage

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[torch.Tensor]:
        stage, memory = self._stage, self._memory
        host = stage.take_memory(memory)
        with stage.copying(), stage.after(None):
            stage.copier.to_host(memory, host)
            copied = stage.mark()
            if copied is not None:
                copied.synchronize()
        try:
            yield host
        finally:  # of an exchange that broke off, too
            with stage.copying(), stage.after(None):
                stage.copier.to_device(host, memory)
            stage.kept_bytes += 2 * memory.numel()
            stage.give_memory(host)
