"""A collective as averages of rows, which are exchanged in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire.torch.backend.rules import MARK, REDUCE_SCATTER
from gradwire.torch.records.parameters import NamedShape, all_finite
from gradwire.torch.session.bucket import Bucket, BucketJob


@dataclass(frozen=True)
class Collective:
    """What a program has called.

    whole    the larger of the two tensors of the call
    rows     1, or a row for each rank, which owns it
    fill     writes what this rank gives into the rows
    deliver  writes the exchanged rows to where the caller expects them
    factor   see BucketJob

    Most codecs send a tensor with NaN or Inf as NaN alone. Then all ranks must exchange anew,
    without a codec. They notice by the markers that all get; but from a reduce-scatter each rank
    gets its own row alone, so a mark goes with each row.
    """

    op: str
    whole: torch.Tensor
    rows: int
    fill: Callable[[torch.Tensor], object]
    deliver: Callable[[torch.Tensor], object]
    factor: int = 1

    def job(self, step: int, raw: bool) -> BucketJob:
        """The rows, filled. Called in the communication thread."""
        columns = self._columns
        tensors: list[NamedShape] = [("values", [self.rows, columns])]
        if self.op == REDUCE_SCATTER:
            tensors.append((MARK, [self.rows, 1]))
        values = self.whole.new_empty(self.rows, columns + len(tensors) - 1)
        self.fill(values[:, :columns])
        if self.op == REDUCE_SCATTER:
            values[:, columns] = 0.0 if all_finite(values[:, :columns]) else torch.nan
        return BucketJob(step, tensors, values.view(-1), raw=raw, factor=self.factor)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Cuts the job's values into the rows, without marks."""
        return values.view(self.rows, -1)[:, : self._columns]

    def found_non_finite(self, bucket: Bucket, values: torch.Tensor, rank: int) -> bool:
        """Whether a rank gave NaN or Inf, or a sum is infinite, so that the bucket's exchange of
        these values made more of them NaN; equal on all ranks."""
        if self.op == REDUCE_SCATTER:
            return not all_finite(values.view(self.rows, -1)[rank, self._columns :])
        return bucket.exchange.non_finite is not None

    @property
    def _columns(self) -> int:
        return self.whole.numel() // self.rows
