"""The residuals of a training: in the exchanges of its buckets, or without a bucket."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradwire.torch.records.checkpoint import Residual
from gradwire.torch.session.bucket import Bucket


class ResidualStore:
    """Keeps the residuals of parameters that no bucket has yet, and finds those that one has.

    The former come from a checkpoint, from other ranks, or from buckets that DDP has replaced.

    Attributes:
        loss_scale: the gradient scaler's, of which residuals are multiples; None: no scaler.
        unfinished: the bucket whose exchange was broken off, where undoing is kept.
    """

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self.loss_scale: float | None = None
        self.unfinished: int | None = None
        self._buckets = buckets
        self._unplaced: list[Residual] = []
        self._keeps_undo = False
        self._before: list[Residual] = []  # of the unfinished bucket

    def all(self) -> list[Residual]:
        placed = [r for bucket in self._buckets.values() for r in bucket.residuals()]
        return placed + self._unplaced

    def before_unfinished(self) -> list[Residual]:
        """As `all`, but those of the unfinished bucket as they were before its exchange."""
        if self.unfinished is None:
            return self.all()
        others = [b for index, b in self._buckets.items() if index != self.unfinished]
        placed = [r for bucket in others for r in bucket.residuals()]
        return self._before + placed + self._unplaced

    def keep_undo(self) -> None:
        """From now on a copy of the residuals is kept while a bucket is averaged, so that an
        exchange that is broken off can be undone."""
        self._keeps_undo = True

    def begin(self, index: int) -> None:
        """The exchange of this bucket begins."""
        if self._keeps_undo:
            self.unfinished, self._before = index, self._buckets[index].residuals()

    def confirm(self) -> None:
        """The bucket is averaged, and nothing will be undone."""
        self.unfinished, self._before = None, []

    def add(self, residuals: list[Residual]) -> None:
        self._unplaced += residuals

    def replace(self, residuals: list[Residual]) -> None:
        """Instead of all that no bucket has."""
        self._unplaced = residuals

    def place(self, bucket: Bucket) -> None:
        """Gives a new bucket the residuals of its tensors."""
        names = {name for name, _ in bucket.tensors}
        bucket.adopt([residual for residual in self._unplaced if residual.name in names])
        self._unplaced = [r for r in self._unplaced if r.name not in names]

    def rescale(self, loss_scale: float | None) -> None:
        """Gives residuals, which are sums of scaled gradients, the gradient scaler's new scale."""
        before, self.loss_scale = self.loss_scale, loss_scale
        if before is None or loss_scale is None or before == loss_scale:
            return
        factor = loss_scale / before
        for bucket in self._buckets.values():
            bucket.exchange.scale_residuals(factor)
        self._unplaced = [r._replace(values=r.values * np.float32(factor)) for r in self._unplaced]
