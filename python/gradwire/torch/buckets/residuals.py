"""What a bucket's exchange takes over of residuals, and the residuals that no bucket has yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradwire._core import Layout
from gradwire.errors import keeps_residual
from gradwire.torch.checkpoint import Residual
from gradwire.torch.exchange_settings import ExchangeSettings

if TYPE_CHECKING:
    from gradwire.torch.buckets.bucket import Bucket


class ResidualStore:
    """Keeps the residuals of parameters that no bucket has yet, and finds those that one has.

    The former come from a checkpoint, from other ranks, or from buckets that DDP has replaced.

    Attributes:
        loss_scale: the gradient scaler's, of which residuals are multiples; None: no scaler.
        keeps_undo: whether a copy of the residuals is kept while a bucket is averaged, so that an
            exchange that is broken off can be undone.
        unfinished: the bucket whose exchange was broken off, with keeps_undo.
    """

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self.loss_scale: float | None = None
        self.unfinished: int | None = None
        self._buckets = buckets
        self._unplaced: list[Residual] = []
        self.keeps_undo = False
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

    def begin(self, index: int) -> None:
        """The exchange of this bucket begins."""
        if self.keeps_undo:
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
        if before == loss_scale:
            return
        factor = (loss_scale or 1.0) / (before or 1.0)
        for bucket in self._buckets.values():
            bucket.scale_residuals(factor)
        self._unplaced = [r._replace(values=r.values * np.float32(factor)) for r in self._unplaced]


class Shares:
    """The shares of the ranks of one bucket, N ranks that keep residuals.

    What all ranks owe together ("owed") becomes residuals whose mean over the ranks (of pushes) and
    sum (of pulls) is that amount again, for each element:

        N = 1                           the rank adds it to its next step, and owes nothing then
        all push (broadcast)            a push residual of the whole amount on every rank
        an owner that keeps a residual  it keeps 1 / N of the amount, and the others push all of it
        pushes without a residual       the owner keeps all
        pulls without a residual, or of other values than averages (ShardedOptimizer pulls
                                        changes, and a reduce-scatter nothing): the N - 1 others
                                        push N / (N - 1) times the amount

    Residuals of pulls that are no averages stay pulls, of whoever owns their elements now.
    """

    def __init__(self, layout: Layout, settings: ExchangeSettings) -> None:
        self._ranks = layout.workers
        self._has_owners = settings.inner_info["has_owners"]
        self._pulls_averages = settings.leg is None and settings.update is None
        self._codecs = {
            (s["name"], s["tensor_offset"]): (s["push_codec"], s["pull_codec"])
            for s in layout.segments
        }

    def take(self, residuals: Sequence[Residual], held: Sequence[Residual]) -> Iterator[Residual]:
        """What to import into this rank's exchange. held: its residuals, with their places."""
        places_of = defaultdict(list)
        for place in held:
            places_of[place.name].append(place)
        for residual in residuals:
            places = places_of[residual.name]
            if residual.kind == "owed":
                yield from self._take_owed(residual, places)
            elif self._pulls_averages:
                yield residual
            elif self._ranks == 1:
                if residual.kind == "push":
                    yield residual
            else:
                yield from _cut(residual, (p for p in places if p.kind == residual.kind))

    def drop(self, residual: Residual, held: Sequence[Residual]) -> bool:
        """Whether values of the residual are lost: no other rank takes them, and this one does not
        keep any for their elements. held: as in `take`."""
        places = [place for place in held if place.name == residual.name]
        if residual.kind == "owed" or (residual.kind == "pull" and not self._pulls_averages):
            return not places and bool(residual.values.any())
        left = residual.values.copy()
        for place in places:
            first, last = (max(0, at - residual.offset) for at in (place.offset, _end(place)))
            left[first:last] = 0
        return bool(left.any())

    def _take_owed(self, owed: Residual, places: Iterable[Residual]) -> Iterator[Residual]:
        if self._ranks == 1:
            yield owed._replace(kind="push")
            return
        for place in places:
            factor = self._factor(place)
            for part in _cut(owed, [place] if factor else []):
                values = part.values * np.float32(factor)
                yield part._replace(kind=place.kind, values=values)

    def _factor(self, place: Residual) -> float:
        ranks = self._ranks
        if not self._has_owners:
            return 1.0
        push, pull = (keeps_residual(c) for c in self._codecs[place.name, place.offset])
        pull = pull and self._pulls_averages
        if place.kind == "push":
            return 1.0 if pull else ranks / (ranks - 1)
        if not pull:
            return 0.0
        return 1 / ranks if push else 1.0


def _end(place: Residual) -> int:
    return place.offset + place.values.size


def _cut(residual: Residual, places: Iterable[Residual]) -> Iterator[Residual]:
    """The parts of the residual that lie in these places of its tensor."""
    end = _end(residual)
    for place in places:
        first = max(place.offset, residual.offset)
        last = min(_end(place), end)
        if first < last:
            values = residual.values[first - residual.offset : last - residual.offset]
            yield residual._replace(offset=first, values=values)
