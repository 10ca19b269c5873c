"""What one rank's segments of a bucket on a device owe between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire._core import GradwireError

SegmentInfo = dict[str, Any]  # an entry of `gradwire._core.Layout.segments`


class DeviceResiduals:
    """Residuals in the places of their segments, in a tensor as long as the bucket for each dtype.

    Reads and writes as `gradwire._core.Exchange` does, with the same bits.
    """

    def __init__(
        self,
        segments: Sequence[SegmentInfo],
        numel: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._segments = segments
        self._numel = numel
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._dtypes: dict[int, torch.dtype] = {}  # of the segments that keep one
        self._tensors: dict[torch.dtype, torch.Tensor] = {}

    def keep(self, segment: int, dtype: torch.dtype) -> None:
        self._dtypes[segment] = dtype
        if dtype not in self._tensors:
            self._tensors[dtype] = torch.zeros(self._numel, dtype=dtype, device=self._device)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """As long as the bucket."""
        return self._tensors[dtype]

    def of(self, segment: int) -> torch.Tensor | None:
        dtype = self._dtypes.get(segment)
        return None if dtype is None else self._tensors[dtype][self.place(segment)]

    def place(self, segment: int) -> slice:
        begin = self._segments[segment]["bucket_offset"]
        return slice(begin, begin + self._segments[segment]["numel"])

    def add(self, segment: int, values: torch.Tensor, first: int = 0) -> None:
        """Adds float32 values from the segment's value `first` on, rounded to the kept dtype."""
        kept = self.of(segment)
        if kept is not None:
            part = kept[first : first + values.numel()]
            part.copy_(part.float() + values)

    def copies(self, places: Sequence[slice]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is kept in these places, and a copy of it."""
        kept = [tensor[place] for tensor in self._tensors.values() for place in places]
        return [(part, part.clone()) for part in kept]

    @staticmethod
    def restore(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], where: torch.Tensor) -> None:
        """Puts the copies back, if `where` (bool, of one value) is true."""
        for part, copy in copies:
            torch.where(where, copy, part, out=part)

    def scale(self, factor: float) -> None:
        for tensor in self._tensors.values():
            tensor.mul_(factor)

    def pay(self, bucket: torch.Tensor) -> None:
        """Adds everything to the bucket, and owes nothing any more."""
        for segment in self._dtypes:
            kept = self.of(segment)
            assert kept is not None
            bucket[self.place(segment)] += kept.float()
        self._dtypes.clear()
        self._tensors.clear()

    def __bool__(self) -> bool:
        return bool(self._dtypes)

    def export(self) -> list[dict[str, Any]]:
        pieces = []
        for i in sorted(self._dtypes):
            segment, kept = self._segments[i], self.of(i)
            assert kept is not None
            pieces.append(
                {
                    "kind": "pull" if segment["owner"] == self._rank else "push",
                    "name": segment["name"],
                    "offset": segment["tensor_offset"],
                    "values": kept.float().cpu().numpy().copy(),
                }
            )
        return pieces

    def import_piece(
        self, kind: str, name: str, offset: int, values: npt.NDArray[np.float32]
    ) -> None:
        """Adds a piece where this layout has its values, at the weight that keeps the mean of the
        push residuals plus the pull residual.

        Raises GradwireError for a place that the layout has not, and for NaN or Inf.
        """
        parts = [(i, s) for i, s in enumerate(self._segments) if s["name"] == name]
        ends = [s["tensor_offset"] + s["numel"] for _, s in parts]
        if not parts or offset + values.size > max(ends):
            raise _refused(
                "invalid_argument",
                f"residual of tensor '{name}', values {offset}..{offset + values.size}: the layout "
                "has no such place",
            )
        if not np.isfinite(values).all():
            raise _refused("non_finite", f"residual of tensor '{name}': not finite")
        for i, segment in parts:
            begin = segment["tensor_offset"]
            first = max(begin, offset)
            last = min(begin + segment["numel"], offset + values.size)
            if first >= last:
                continue
            here = "pull" if segment["owner"] == self._rank else "push"
            weights = {("pull", "push"): 1 / self._world_size, ("push", "pull"): self._world_size}
            factor = np.float32(weights.get((here, kind), 1.0))
            part = np.ascontiguousarray(values[first - offset : last - offset]) * factor
            self.add(i, torch.from_numpy(part).to(self._device), first - begin)


def _refused(code: str, message: str) -> GradwireError:
    error = GradwireError(message)
    error.code = code
    return error
