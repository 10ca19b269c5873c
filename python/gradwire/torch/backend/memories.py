"""Tells tensors apart by their memory, where nothing else says whose values they are."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Memories:
    """Numbers tensors by the memory in which they lie, from 0 on, in the order of their first use.

    So DDP's buckets, which lie in the same memory in every step, keep their numbers. A tensor in
    memory that was released and given out again has a new number.
    """

    def __init__(self) -> None:
        # By storage, offset and length. A weak reference keeps the storage's address from being
        # given to another one.
        self._known: dict[tuple[int, int, int], tuple[StorageWeakRef, int]] = {}
        self._count = 0

    def number_of(self, values: torch.Tensor) -> int:
        storage = StorageWeakRef(values.untyped_storage())
        place = storage.cdata, int(values.storage_offset()), values.numel()
        if place not in self._known:
            self._known[place] = storage, self._count
            self._count += 1
        return self._known[place][1]

    def forget_released(self) -> list[int]:
        """The numbers of tensors whose memory was released since the last call."""
        released = [place for place, (storage, _) in self._known.items() if storage.expired()]
        return [self._known.pop(place)[1] for place in released]
