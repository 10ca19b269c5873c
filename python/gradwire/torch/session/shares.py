"""What a rank takes over of a checkpoint's residuals, where the ranks or their parts are others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gradwire._core import Layout
from gradwire.advice import keeps_residual
from gradwire.torch.records.checkpoint import Residual
from gradwire.torch.records.exchange_settings import ExchangeSettings


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
