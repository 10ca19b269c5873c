"""A folder of a store with faults."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from gradwire.weights.folder import MemoryFolder


class FaultyFolder(MemoryFolder):
    """A folder in memory.

    late_reads: so often a file that was written is not found. late_lists: lists show only files
    that were there before this many were written. full_after: the disk is full when so many files
    were written.
    """

    place = "faulty://store"

    def __init__(self, late_reads: int = 0, late_lists: int = 0, full_after: int = 10**9) -> None:
        super().__init__()
        self.late_reads, self.late_lists, self.full_after = late_reads, late_lists, full_after
        self.bytes_read = 0
        self._unseen: dict[str, int] = {}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = super().read(name, begin, end)
        if self._is_late(name):
            raise FileNotFoundError(name)
        self.bytes_read += len(data)
        return data

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        if len(self.files) >= self.full_after and name not in self.files:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        super().write(name, pieces, only_new)
        self._unseen[name] = self.late_reads

    def names(self) -> list[str]:
        shown = max(len(self.files) - self.late_lists, 0)
        return super().names()[:shown]

    def _is_late(self, name: str) -> bool:
        self._unseen[name] = self._unseen.get(name, 0) - 1
        return self._unseen[name] >= 0
